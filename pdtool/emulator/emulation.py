"""An emulation: its scaling of bytes and times, the runs of its plans one after the other, and its artifact.

A machine has fewer cores than the cluster has workers. So messages are divided by `scale`, and everything is `slowdown`
times slower, until sending and updating leave the cores mostly idle. Measurements are scaled back. This module also
decides how many minibatches an epoch needs for a steady state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import EmulatedPlan, Emulation, Report
from pdtool.artifacts.run_dir import RunDir
from pdtool.emulator.pretend_cluster import BURST_BYTES
from pdtool.emulator.sleeping_model import MODEL_FILE, Scaling, sleeping_tensors, write_sleeping_model
from pdtool.emulator.workers import links_of
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.host import memory_limits
from pdtool.options.simulate_options import MAX_FACTOR, EmulateOptions
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.stage_costs import tied_bytes
from pdtool.runtime.config import RunConfig
from pdtool.schedule import PipelineShape, steady_minibatches, steady_run
from pdtool.units import format_bytes, format_seconds

_SENT_BYTES_PER_CORE_S = 3e6  # so few that a message takes little time of a core compared with its link
_UPDATED_BYTES_PER_CORE_S = 300e6  # of weights: the same holds for updates
_SHORTEST_MINIBATCH_S = 0.15  # a worker's own time, 2 to 4 ms a minibatch, is little compared with this
_STEADY_S, _MOST_STEADY = 8.0, 96  # minibatches in the measured part of an epoch
_STEADY_ROUNDS = 2  # rounds of the stage with most replicas
_STEADY_PERIODS, _MOST_IN_PERIODS = 3, 48  # minibatches after which rounds of several lengths meet
_WORKER_BYTES = 150_000_000  # of a process with torch imported, besides memory shared with the others
_SMALLEST_MESSAGE_BYTES = 2_000  # a smaller message goes in one packet, however slow the link
_LONG_MESSAGE_BYTES = 20 * BURST_BYTES  # an idle link sends a twentieth of this at once
_LONG_CHUNK_BYTES = 6_000  # of an all-reduce: large compared with its headers and the next worker's start
_LONGEST_MINIBATCH_S = 0.5  # longer messages must not exceed this


def choose_scaling(plan: Plan, profile: Profile, scale: float | None = None, slowdown: float | None = None) -> Scaling:
    """Return a scaling that leaves the cores of this machine mostly idle.

    Args:
        plan: with predictions.
        scale, slowdown: the user's values; None: as needed.

    Raises:
        ArtifactError: by its profile the plan takes no time, or so little that no slowdown makes it long enough.
    """
    time_s = _time_per_minibatch_s(plan)
    if time_s * MAX_FACTOR < _SHORTEST_MINIBATCH_S:
        what = f"{plan.config} takes {format_seconds(time_s)} per minibatch, which is too short to emulate"
        raise ArtifactError(
            plan.profile, what, "use a profile with longer times, for example with a larger --batch-size"
        )
    load = _core_s(plan, profile) / time_s / (os.cpu_count() or 1)
    if slowdown is None:
        slowdown = max(1.0, _SHORTEST_MINIBATCH_S / time_s)
        if scale is None:
            longer = load / _scale_of_long_messages(plan, profile), _LONGEST_MINIBATCH_S / time_s
            slowdown = max(slowdown, min(longer))
    if scale is None:
        scale = max(1.0, load / slowdown)
    return Scaling(scale=_rounded_up(scale), slowdown=_rounded_up(slowdown))


def without_latency(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with new predictions, for links without latency.

    Pretend links have none. And if somebody has edited the file, it may hold another plan's predictions.
    """
    cluster = plan.cluster
    levels = tuple(replace(level, latency_s=0.0) for level in cluster.levels)
    pretended = plan.model_copy(update={"cluster": replace(cluster, levels=levels)})
    return plan.model_copy(update={"predicted": refresh(pretended, profile).predicted})


def scaling_warnings(plan: Plan, profile: Profile, scaling: Scaling) -> Iterator[str]:
    """Yield why emulated times would be too long with this scaling, which the user may have chosen."""
    time_s = scaling.slowdown * _time_per_minibatch_s(plan)
    if time_s < _SHORTEST_MINIBATCH_S:
        yield f"a minibatch takes only {format_seconds(time_s)}, which the workers' own 2 to 4 ms make much longer"
    if _core_s(plan, profile) / scaling.scale / time_s > (os.cpu_count() or 1):
        yield "sending and updating keep the cores busy"


def _time_per_minibatch_s(plan: Plan) -> float:
    return plan.predicted.time_s if plan.predicted else 0.0


def _shape(plan: Plan, profile: Profile) -> PipelineShape:
    """Return the shape that the workers build their schedule for: stages that share a parameter update together."""
    return plan.shape(tuple(tied_bytes(profile, tuple(map(tuple, plan.stage_nodes(profile))))))


def _core_s(plan: Plan, profile: Profile) -> float:
    """Core seconds of all workers' sending and updating for one minibatch, without scaling."""
    rounds = _shape(plan, profile).update_every
    updated = sum(
        profile.parameter_bytes(nodes) * stage.replicas / every
        for nodes, stage, every in zip(plan.stage_nodes(profile), plan.stages, rounds, strict=True)
    )
    sent = plan.predicted.traffic_bytes if plan.predicted else 0
    return sent / _SENT_BYTES_PER_CORE_S + updated / _UPDATED_BYTES_PER_CORE_S


def _scale_of_long_messages(plan: Plan, profile: Profile) -> float:
    """Return the largest scale at which messages between stages, and all-reduce chunks, are long for their links."""
    sizes = [_largest_message_bytes(plan, profile, Scaling()) / _LONG_MESSAGE_BYTES]
    for nodes, stage in zip(plan.stage_nodes(profile), plan.stages, strict=True):
        if stage.replicas > 1:  # gloo sends a bucket around the ring in two chunks for each worker
            bucket_bytes = min(profile.parameter_bytes(nodes), RunConfig.bucket_bytes)
            sizes.append(bucket_bytes / (2 * stage.replicas) / _LONG_CHUNK_BYTES)
    return max(1.0, min(filter(None, sizes), default=math.inf))


def _largest_message_bytes(plan: Plan, profile: Profile, scaling: Scaling) -> int:
    """Bytes of the largest message between stages; 0 with one stage."""
    _, *sent = sleeping_tensors(plan, profile, scaling)
    return max((tensor.sizes(1)[1] * 4 for tensor in sent), default=0)


def _rounded_up(factor: float) -> float:
    """Round to two digits."""
    digit = 10.0 ** (math.floor(math.log10(factor)) - 1)
    return max(1.0, round(math.ceil(factor / digit) * digit, 6))


def check_minibatches(plan: Plan, profile: Profile, minibatches: int | None) -> str:
    """Check that some of the minibatches asked for are in steady state; raises UsageError.

    Returns:
        Why their time may still be too short; "" if there are enough.
    """
    shape = _shape(plan, profile)
    steady, enough = len(steady_minibatches(minibatches or 0, shape)), steady_run(shape)
    if not minibatches or minibatches >= enough:
        return ""
    if not steady:
        what = f"--minibatches {minibatches} is too few for the steady state of {plan.config}"
        raise UsageError(what, f"pass {enough} or more, or leave it out")
    return (
        f"with --minibatches {minibatches}, only {steady} of {plan.config} are timed, which may be too fast because "
        f"their messages do not wait for each other yet; {enough} are enough"
    )


def minibatches_to_steady_state(plan: Plan, profile: Profile, slowdown: float = 1.0) -> int:
    """Return the minibatches of an epoch that is mostly in steady state and does not last for minutes."""
    shape = _shape(plan, profile)
    time_s = slowdown * _time_per_minibatch_s(plan)
    in_time = round(_STEADY_S / time_s) if time_s else _MOST_STEADY
    in_periods = min(_STEADY_PERIODS * math.lcm(*shape.update_every), _MOST_IN_PERIODS)
    in_rounds = _STEADY_ROUNDS * max(shape.update_every)
    return steady_run(shape, max(in_rounds, in_periods, min(in_time, _MOST_STEADY)))


def emulate(
    configs: Mapping[str, RunConfig], cluster: Cluster, scalings: Mapping[str, Scaling], notify: Callable[[str], None]
) -> dict[str, Report]:
    """Run each configuration on a pretend copy of the cluster.

    Args:
        scalings: the scaling of each configuration.
        notify: called with the name of each as it begins.

    Returns:
        The reports, with the emulation's own times (longer) and bytes (fewer).

    Raises:
        PdtoolError: the links cannot be made here, or the workers would not fit in memory.
        WorkerDiedError: a worker ended or did not answer.
    """
    for config in configs.values():
        _check_memory(config.plan)
    reports = {}
    for scaling, names in groupby(configs, key=lambda name: scalings[name]):
        with links_of(cluster.slower(scaling.scale * scaling.slowdown)) as run:
            for name in names:
                notify(name)
                run(configs[name])
                reports[name] = Report.load(RunDir(configs[name].out).report_file)
    return reports


def sleeping_config(plan: Plan, profile: Profile, folder: Path, scaling: Scaling, asked: EmulateOptions) -> RunConfig:
    """Write a model that sleeps in place of computing, and return the configuration of its run in `folder`.

    Raises:
        UsageError: a sleeping model cannot run the schedule, or the scale leaves nothing of the messages.
    """
    if plan.kind.splits_backward:
        what = f"schedule {plan.schedule} splits the backward of each operator, but sleeping operators cannot do that"
        raise UsageError(what, "emulate it with --compute real, or use another schedule")
    largest = _largest_message_bytes(plan, profile, scaling)
    if 0 < largest < _SMALLEST_MESSAGE_BYTES:
        unscaled = _largest_message_bytes(plan, profile, Scaling())
        if unscaled < _SMALLEST_MESSAGE_BYTES:
            what = f"messages between stages have at most {unscaled} bytes, too few for an emulated link to delay"
            raise UsageError(what, "simulate the plan instead, or profile with a larger --batch-size")
        what = f"with --scale {scaling.scale:g} the largest message between stages has {largest} bytes"
        most = unscaled // _SMALLEST_MESSAGE_BYTES
        raise UsageError(what, f"pass --scale {most} or less, or leave out --scale and --slowdown")
    minibatches = asked.minibatches or minibatches_to_steady_state(plan, profile, scaling.slowdown)
    stages = RunDir(folder).stages
    sleeping_plan, bundle = write_sleeping_model(stages, plan, profile, scaling, minibatches)
    return RunConfig(
        plan=sleeping_plan,
        bundle=bundle,
        bundle_dir=stages,
        model=ModelRef(source=str(stages / MODEL_FILE)),
        trusted=True,
        out=folder,
        epochs=asked.epochs_in_all,
        device="cpu",
        transport="gloo",
        threads=1,
        timeout_s=asked.timeout_s,
        bucket_bytes=max(1, round(RunConfig.bucket_bytes / scaling.scale)),
    )


def _check_memory(plan: Plan) -> None:
    """Refuse more workers than this machine has memory for; raises PdtoolError."""
    sizes = (size_bytes * stage.replicas for size_bytes, stage in zip(plan.memory_needed, plan.stages, strict=False))
    needed = _WORKER_BYTES * plan.workers + sum(sizes)
    for limit in memory_limits():
        if needed > limit.free_bytes:
            what = f"{plan.workers} workers of {plan.config} need about {format_bytes(needed)}, and {limit.name} has "
            what = f"{what}{format_bytes(limit.free_bytes)} left"
            raise PdtoolError(what, "pass a larger --scale, or simulate the plan")


def assemble_emulation(
    plans: Mapping[str, Plan], reports: Mapping[str, Report], scalings: Mapping[str, Scaling], asked: EmulateOptions
) -> Emulation:
    """Return the artifact, with times and bytes scaled back to the cluster itself.

    Args:
        plans: the plan, then its rivals, by name.
        reports, scalings: one of each per plan; the reports have the emulation's own times and bytes.
    """
    name, chosen = next(iter(plans.items()))
    return Emulation(
        plan=chosen.name,
        batch_size=chosen.batch_size,
        cluster=chosen.cluster,
        compute=asked.compute,
        scale=scalings[name].scale,
        slowdown=scalings[name].slowdown,
        cores=os.cpu_count() or 1,
        target=str(asked.target) if asked.target else None,
        plans=tuple(_emulated(name, plan, reports[name], scalings[name]) for name, plan in plans.items()),
        digests=dict(chosen.digests),
    )


def _emulated(name: str, plan: Plan, report: Report, scaling: Scaling) -> EmulatedPlan:
    time_s = report.measured.bottleneck_s / scaling.slowdown
    samples = plan.batch_size / report.batch_size  # a sleeping model's minibatch is one sample
    trained_s = report.epochs * report.minibatches * max(stage.time_s for stage in report.stages)
    return EmulatedPlan(
        name=name,
        config=plan.config,
        schedule=plan.schedule,
        workers=plan.workers,
        minibatches=report.minibatches,
        bottleneck_s=time_s,
        is_steady=report.measured.is_steady,
        throughput_samples_per_s=report.measured.throughput_samples_per_s * samples * scaling.slowdown,
        simulated_s=_time_per_minibatch_s(plan),
        sent_bytes=round(sum(stage.sent_bytes * stage.replicas for stage in report.stages) * scaling.scale),
        epochs=report.epochs,
        training_s=trained_s / scaling.slowdown,
        target_reached=report.target_reached,
        scale=scaling.scale,
        slowdown=scaling.slowdown,
    )
