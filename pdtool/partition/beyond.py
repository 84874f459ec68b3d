"""Plans beyond the formulas: schedules and weight policies that are simulated instead, and plans made for them.

`cost.py` covers 1f1b with stashing, 1f1b-flush and gpipe, and only those are searched. For the others a plan is made
from one that was searched, and the simulator says what it costs.
"""

from __future__ import annotations

from pdtool.artifacts.cluster_file import ClusterSpec
from pdtool.artifacts.plan import Plan, Predicted, Stage, Why
from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.errors import UsageError
from pdtool.partition.evaluate import Way
from pdtool.partition.paces import speed
from pdtool.partition.search import Options
from pdtool.partition.simulator.planned import pieces, planned_job
from pdtool.partition.simulator.simulate import simulate
from pdtool.schedule import SEARCHED_SCHEDULES, default_shape

SOURCE = {"2bw": "1f1b", "zb-h1": "1f1b-flush"}  # the schedule whose search gives the stages


def has_formulas(plan: Plan) -> bool:
    """Whether cost.py says what the plan costs."""
    return plan.schedule in SEARCHED_SCHEDULES and plan.weights in ("stash", "flush") and plan.update_every is None


def with_simulated_figures(plan: Plan, profile: Profile) -> Plan:
    """The plan with figures from a simulation; times are per minibatch.

    Raises:
        ScheduleError: its numbers in flight make it deadlock.
    """
    job = planned_job(plan, profile)
    found = simulate(job)
    places = range(plan.pipeline_depth)
    shares = [[share for share in found.shares if share.stage == s] for s in places]
    pace = found.pace_s
    compute = [sum(share.busy_s for share in shares[s]) / len(shares[s]) / found.minibatches for s in places]
    slowest = max(places, key=compute.__getitem__)
    figures = Predicted(
        **speed(plan, profile, pace, pace, Way()),
        compute_s=tuple(compute[s % plan.pipeline_depth] / plan.chunks for s in range(len(plan.stages))),
        allreduce_s=(0.0,) * len(plan.stages),
        transfer_s=(0.0,) * (len(plan.stages) - 1),
        memory_bytes=tuple(
            max(share.memory_bytes for share in shares[s % plan.pipeline_depth]) for s in range(len(plan.stages))
        ),
        traffic_bytes=round(found.sent_bytes),
        plan_sha256=plan.plan_sha256,
    )
    why = Why(bottleneck=f"stage {slowest} computes most; {plan.schedule} is simulated, there is no formula for it")
    return plan.model_copy(update={"predicted": figures, "why": why})


def interleaved(profile: Profile, profile_path: str, cluster: Cluster, options: Options) -> Plan:
    """Several stages on each worker, all of about the same time, in the order of the model's operators.

    Raises:
        UsageError: there are fewer operators than stages, or one is pinned elsewhere.
    """
    workers = options.workers or cluster.workers
    if workers > cluster.workers:
        raise UsageError(f"--workers {workers}: the cluster has {cluster.workers}", "give no more than that")
    microbatches, chunks = options.microbatches, options.chunks
    flight = default_shape("interleaved", (1,) * workers, microbatches, chunks).in_flight
    stages = tuple(
        Stage(
            nodes=tuple(profile.graph.compress(nodes)),
            replicas=1,
            workers=(s % workers,),
            in_flight=flight[s % workers],
        )
        for s, nodes in enumerate(pieces(profile, workers * chunks))
    )
    plan = Plan(
        name=f"{profile.name}-{cluster.topology}",
        model=profile.model,
        profile=profile_path,
        digests={**profile.digests, profile_path: profile.content_sha256},
        batch_size=profile.batch_size,
        cluster=ClusterSpec.of(cluster),
        schedule="interleaved",
        weights="flush",
        microbatches=microbatches,
        chunks=chunks,
        stages=stages,
    )
    plan.check()
    return with_simulated_figures(plan, profile)
