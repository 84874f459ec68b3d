"""Plan a profiled model for a cluster, simulate a plan, check its claims; nothing here loads torch.

A worker may use the memory given by `--memory`, or else by the cluster file, or else that of the profiled device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdtool.api.caller import unchanged_caller
from pdtool.api.console import muted, note
from pdtool.api.inputs import (
    default_plan_path,
    located_plan,
    optional_text,
    path_of_profile,
    path_text,
    planned,
    read_plan,
    read_profile,
    strategies_text,
    was_made_from,
)
from pdtool.artifacts.cluster import Cluster, ClusterFile, make_cluster, parse_topology
from pdtool.artifacts.plan import LITTLE_ROOM, Plan, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.text_formats import has_comments
from pdtool.errors import ArtifactError, NoPlanError, UsageError
from pdtool.files import read_text
from pdtool.options.declaration import read_options
from pdtool.options.plan_options import INNER_BANDWIDTH, OUTER_BANDWIDTH, PartitionOptions
from pdtool.options.simulate_options import SimulateOptions
from pdtool.planner.choice.make_plan import make_plan, with_fastest_size
from pdtool.planner.choice.strategies import planner_asked_for
from pdtool.units import bytes_option, format_bytes, parse_bandwidth, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from pdtool.planner.choice.comparison import SimulatedPlan
    from pdtool.planner.choice.plan_check import Finding

_ALIKE = ("model", "graph_sha256", "device", "precision", "compiled")  # fields in which compared profiles must agree
NO_LIMIT = "none"  # value of --memory besides a size


@unchanged_caller()
def partition(
    profile: Profile | Path | str | Sequence[Profile | Path | str],
    *,
    topology: str | None = None,
    cluster: Path | str | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    memory: str | None = None,
    strategy: str = "auto",
    replicas: str | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    output: Path | str | None = None,
    **options: Any,
) -> Plan:
    """Find the fastest plan to train a profiled model on a cluster: a pipeline, data parallelism or one worker alone.

    Args:
        profile: the profile, or the path of its file; with `samples_per_update`, several with different batch sizes:
            the plan is for the fastest of these.
        topology: shape of the cluster: "4x4" is 4 servers with 4 devices each.
        cluster: a file from `pdtool probe`, instead of `topology`, `bandwidth` and `latency`.
        bandwidth: of one link of each level, in bits or bytes per second, such as "10Gbit/s,12GB/s".
        latency: of one message at each level, such as "50us,5us".
        memory: of each device, such as "16GB", or "none" for no limit; None: that of the profiled device.
        strategy: the kind of plan, such as "straight"; "auto" takes the fastest of any kind.
        replicas: workers of each stage, such as "15-1".
        schedule: the order of work, such as "1f1b" or "gpipe".
        microbatches: minibatches in one update of a flushing schedule.
        output: file to write; None: plans/NAME-TOPOLOGY.yaml.
        options: other options of `pdtool partition --help`, such as `workers=3` or `simplest="0%"`.

    Returns:
        The plan; `plan.predicted` has seconds per minibatch, and bytes of memory of each stage.

    Raises:
        UsageError: the options make no sense together or on this cluster, or the profiles cannot be compared.
        ArtifactError: a file cannot be read.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    given = {"topology": topology, "cluster": optional_text(cluster), "bandwidth": bandwidth, "latency": latency}
    given |= {"memory": memory, "strategy": strategy, "replicas": replicas, "schedule": schedule}
    asked = read_options("partition", PartitionOptions, given | {"microbatches": microbatches} | options)
    several = profile if isinstance(profile, Sequence) and not isinstance(profile, (str, bytes)) else [profile]
    for each in several:
        if isinstance(each, Profile):  # perhaps a changed copy, which path_of_profile() would write
            each.check_again(each.name)
    paths = [path_of_profile(each, "-") if isinstance(each, Profile) else path_text(each) for each in several]
    if not paths:
        raise UsageError("no profile is given", "pass the path of one, or of several of the same model")
    plan = planned_for(paths, asked)
    target = optional_text(output) or default_plan_path(plan.name)
    keep_edits(target)
    plan.save(target)
    plan.set_path(target)
    return plan


@unchanged_caller()
def simulate(
    plan: Plan | Path | str,
    *,
    schedule: str | None = None,
    minibatches: int | None = None,
    against: Sequence[str] = ("data-parallel",),
    bandwidths: Sequence[float] = (),
) -> SimulatedPlan:
    """Execute a plan on a simulated clock, beside its rivals.

    Args:
        plan: the plan, or the path of its file.
        schedule: a schedule other than the plan's; None: the plan's own.
        minibatches: length of the simulation; None: enough to fill the pipeline, run steadily and drain.
        against: rivals by strategy, as "gpipe".
        bandwidths: bytes per second of the outermost level, to compare the plan with data parallelism at each.

    Returns:
        Seconds per minibatch and samples per second of the plan (`.result`), its rivals (`.comparison`), and both over
        bandwidths (`.sweep`).

    Raises:
        ArtifactError: the plan or its profile cannot be read, or do not belong together.
        UsageError: the schedule does not suit the stages, or an option has no such value.
    """
    from pdtool.planner.choice.comparison import simulated

    rates = list(bandwidths) if isinstance(bandwidths, Iterable) and not isinstance(bandwidths, str) else [bandwidths]
    given = {"schedule": schedule, "minibatches": minibatches, "against": strategies_text(against)}
    asked = read_options("simulate", SimulateOptions, given)
    if wrong := [rate for rate in rates if not isinstance(rate, Real) or not 0 < rate < math.inf]:
        raise UsageError(f"bandwidth {wrong[0]} is not a rate in bytes per second", "pass one such as 1.25e9")
    chosen, profile = planned(plan)
    return simulated(chosen, profile, asked.schedule, asked.minibatches, asked.against, rates)


@unchanged_caller()
def check(plan: Plan | Path | str, *, fresh: bool = False) -> Sequence[Finding]:
    """Compute a plan's figures and certificate again.

    Args:
        plan: the plan, or the path of its file.
        fresh: instead, compare the current model with the profile, the plan and the stage files.

    Returns:
        A finding for each claim: `.holds` is True, False, or None if unknown; `.words` explains it.

    Raises:
        ArtifactError: the plan or its profile cannot be read, or do not belong together.
        ModelError: with `fresh`, the model cannot be traced.
    """
    if fresh:
        from pdtool.api.staleness import freshness_findings  # it traces the model, and loads torch for that

        chosen, path = located_plan(plan)
        return list(freshness_findings(path, chosen, read_profile(chosen, path)))
    from pdtool.planner.choice.plan_check import check_plan

    return list(check_plan(*read_plan(plan)[:2]))


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan, with defaults filled in.

    Attributes:
        path: path under which the plan finds its profile.
        cluster: with the memory of each worker.
    """

    path: str
    profile: Profile
    cluster: Cluster
    options: PlanOptions

    @classmethod
    def read(cls, path: str, asked: PartitionOptions) -> PlanRequest:
        """Read the profile in `path` (`-` is stdin) and the cluster, and note our assumptions about it.

        Raises:
            UsageError: the options make no sense together or on this cluster.
            ArtifactError: the profile or the cluster's file cannot be read.
        """
        cluster = cluster_asked_for(asked)
        return cls._of(path, Profile.load(path, may_be_pipe=True), cluster, asked)

    @classmethod
    def read_sizes(cls, paths: Sequence[str], asked: PartitionOptions) -> list[PlanRequest]:
        """Read profiles of one model with several batch sizes, and keep those that divide an update's samples.

        Raises:
            UsageError: as `read`; or the profiles differ in model or device, or none of their sizes divides the
                samples.
            ArtifactError: as `read`.
        """
        samples, cluster = asked.samples_per_update, cluster_asked_for(asked)
        if samples is None:
            what = f"comparing {len(paths)} profiles needs --samples-per-update"
            raise UsageError(what, "pass a multiple of their batch sizes, or name one profile")
        profiles = {path: Profile.load(path) for path in paths}
        first, of_size = profiles[paths[0]], {profile.batch_size: path for path, profile in profiles.items()}
        for path, profile in profiles.items():
            if (known := of_size[profile.batch_size]) != path:
                what = f"{path} and {known} were both made with --batch-size {profile.batch_size}"
                raise UsageError(what, "name one of them")
            unlike = [name for name in _ALIKE if getattr(profile, name) != getattr(first, name)]
            if unlike or profile.graph.names != first.graph.names:
                what = f"{path} and {paths[0]} cannot be compared: they differ in {(unlike or ['model'])[0]}"
                raise UsageError(what, "name profiles that differ only in --batch-size")
        if not (sizes := sorted(size for size in of_size if samples % size == 0)):
            what = f"none of the batch sizes {sorted(of_size)} divides --samples-per-update {samples}"
            raise UsageError(what, f"profile with a --batch-size that divides {samples}")
        if left_out := sorted(of_size.keys() - sizes):
            note(f"leaving out batch sizes {left_out}, which do not divide {samples} samples")
        requests = [cls._of(of_size[sizes[0]], profiles[of_size[sizes[0]]], cluster, asked)]
        with muted():  # the notes about memory
            return requests + [cls._of(of_size[size], profiles[of_size[size]], cluster, asked) for size in sizes[1:]]

    @classmethod
    def _of(cls, path: str, profile: Profile, cluster: Cluster, asked: PartitionOptions) -> PlanRequest:
        profile = profile.sent_as(asked.wire_dtype)
        search_options = planner_asked_for(asked).options(asked, cluster.workers, profile.batch_size)
        cluster = with_worker_memory(cluster, profile, asked.memory)
        return cls(path_of_profile(profile, path), profile, cluster, search_options)

    def plan(self) -> Plan:
        """Return the best plan; raises NoPlanError if none fits the memory, the pins or the number of operators."""
        plan = make_plan(self.profile, self.path, self.cluster, self.options)
        if self.profile.is_measured_on_cpu and (stages := plan.stages_with_little_room):
            needed = math.ceil(max(plan.memory_needed[s] for s in stages) / LITTLE_ROOM)
            enough = bytes_option(self.profile.memory_for(needed, self.cluster.levels[-1].size))
            note(
                f"a worker of stage {' or '.join(map(str, stages))} needs over {100 * LITTLE_ROOM:.0f} % of the memory "
                "left for tensors. So it will return freed memory to the system at once, which can double its time. If "
                f"each worker has more memory, pass --memory {enough}. This plan could then keep freed memory, but "
                "another plan may be chosen"
            )
        return plan


def planned_for(paths: Sequence[str], asked: PartitionOptions) -> Plan:
    """Return the best plan for a profile, or for the fastest of several with different batch sizes.

    Raises:
        UsageError, ArtifactError: see `PlanRequest.read` and `PlanRequest.read_sizes`.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    if len(paths) == 1:
        return PlanRequest.read(paths[0], asked).plan()
    plans, error = [], None
    for request in PlanRequest.read_sizes(paths, asked):
        try:
            plans.append(request.plan())
        except NoPlanError as failed:
            note(f"no plan for minibatches of {request.profile.batch_size}: {failed}")
            error = error or failed  # the error of the smallest, which is the last not to fit
    if not plans and error:
        raise error
    return with_fastest_size(plans)


def keep_edits(path: str) -> None:
    """Raise UsageError if this would overwrite a plan that someone has edited or commented."""
    if path == "-" or not Path(path).is_file():
        return
    try:
        is_edited = was_edited(path)
    except ArtifactError:  # a different file, which is refused, or an unusable one
        return
    if is_edited:
        raise UsageError(
            f"{path} was edited by hand and would be overwritten", "pass another path with -o, or delete it first"
        )


def was_edited(path: str) -> bool:
    """Return whether someone edited or commented the plan in a file, or the settings of its model.

    Raises:
        ArtifactError: it is not a plan, or cannot be read.
    """
    text = read_text(path)
    plan = Plan.parse(text, path)
    return plan.edited or has_comments(text) or _has_another_model(plan)


def _has_another_model(plan: Plan) -> bool:
    """Return whether a plan's model or its settings are not those of the profile that the plan was made from."""
    try:
        profile = Profile.load(plan.profile)
    except ArtifactError:  # it is gone, so nobody can tell
        return False
    return was_made_from(plan, profile) and plan.model != profile.model


def cluster_asked_for(asked: PartitionOptions) -> Cluster:
    """Read the cluster from its file, or make it from the given figures; raises UsageError for both or neither."""
    file, topology, bandwidth, latency = asked.cluster, asked.topology, asked.bandwidth, asked.latency
    if file:
        for name, figures in (("--topology", topology), ("--bandwidth", bandwidth), ("--latency", latency)):
            if figures:
                what = f"--cluster {file} cannot be combined with {name} {figures}"
                raise UsageError(what, "pass the file or the figures, not both")
        return ClusterFile.load(file, may_be_pipe=True).cluster()
    if topology is None:
        raise UsageError("no cluster is given", "pass --topology 4x4, or --cluster cluster.yaml from `pdtool probe`")
    sizes = parse_topology(topology)
    if bandwidth is None:
        bandwidth = ",".join([OUTER_BANDWIDTH, *[INNER_BANDWIDTH] * (len(sizes) - 1)])
        note(f"no --bandwidth given: assuming {bandwidth}")
    bandwidths = [parse_bandwidth(text) for text in bandwidth.split(",")]
    latencies = [parse_seconds(text) for text in latency.split(",")] if latency else None
    return make_cluster(sizes, bandwidths, latencies=latencies)


def with_worker_memory(cluster: Cluster, profile: Profile, given: str | None) -> Cluster:
    """Return the cluster with the memory for one worker's tensors, and note the source of the figure.

    Args:
        given: `--memory`, a size or NO_LIMIT; None: from the cluster's file, or else from the profiled device.

    Raises:
        UsageError: the size cannot be read, or the reserve of a GPU leaves nothing.
    """
    if given == NO_LIMIT:
        return replace(cluster, memory_bytes=None)
    if given:
        memory_bytes: int | None = parse_bytes(given)
    else:
        memory_bytes = cluster.memory_bytes or _profiled_bytes(cluster, profile)
    if memory_bytes is not None and profile.reserved_bytes:  # which no tensor gets
        tensor_bytes, is_cpu = profile.tensor_bytes(memory_bytes, cluster.levels[-1].size), profile.is_measured_on_cpu
        whole, reserved = format_bytes(memory_bytes), format_bytes(memory_bytes - tensor_bytes)
        of_gpu = "CUDA's context, communicators, workspaces and fragmentation"
        purpose = "the processes themselves and for fragmentation" if is_cpu else of_gpu
        if tensor_bytes <= 0 and not is_cpu:
            what = f"{whole} of memory is not enough: {reserved} is set aside for {purpose}"
            raise UsageError(what, "pass the memory of the whole device")
        is_enough = f"of each worker's {whole}, {reserved} is set aside for {purpose}"
        note(is_enough if tensor_bytes > 0 else f"{whole} of memory is not enough for {purpose}")
        memory_bytes = max(1, tensor_bytes)  # with 1, no plan fits, and the error says what would help
    return replace(cluster, memory_bytes=memory_bytes)


def _profiled_bytes(cluster: Cluster, profile: Profile) -> int | None:
    """Return the memory of the profiled device, or for a CPU a worker's share of the machine's memory.

    We assume that the members of an innermost level are on one machine, so a single level is one machine.
    """
    device = profile.device
    if device.memory_bytes is None:
        note("no --memory given, and the profile does not record its device's memory: planning without a limit")
        return None
    remedy = f"(for no limit, pass --memory {NO_LIMIT})"
    if not profile.is_measured_on_cpu:
        note(f"no --memory given: planning for the {format_bytes(device.memory_bytes)} of {device.name} {remedy}")
        return device.memory_bytes
    sharing = cluster.levels[-1].size
    share_bytes = max(1, device.memory_bytes // sharing)
    of_all = f": the machine's {format_bytes(device.memory_bytes)}, shared by {sharing} workers" if sharing > 1 else ""
    note(f"no --memory given: planning for {format_bytes(share_bytes)} per worker{of_all} {remedy}")
    return share_bytes
