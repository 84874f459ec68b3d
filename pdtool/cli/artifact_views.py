"""Views of profiles, plans, bundles, clusters and devices, and of the simulation of a plan, for people."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdtool import schedule
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.cluster import ClusterFile
from pdtool.artifacts.device import Devices
from pdtool.artifacts.plan import FasterPlan, Plan, Predicted, Why
from pdtool.artifacts.profile import Node, Profile
from pdtool.cli.table import Lines, Table, abbreviated
from pdtool.machines import check_even_shares
from pdtool.units import (
    counted,
    format_bits_rate,
    format_bytes,
    format_number,
    format_rate,
    format_ratio,
    format_seconds,
    format_speedup,
    format_throughput,
)

if TYPE_CHECKING:
    from pdtool.planner.choice.comparison import Comparison, SimulatedPlan, SweepPoint
    from pdtool.planner.simulator.result import SimulationResult

_RIVALS = (
    "times of rejected plans come from the formulas, except those marked simulated. GPipe and model parallelism have "
    "one stage on each worker. `pdtool simulate` simulates the best plan of each strategy"
)
_MAX_DRAWN_WORKERS, _MAX_DRAWN_MINIBATCHES = 32, 1000
_MIN_STEP_S = 1e-3  # much of a shorter step is Python's own time, which belongs to no operator
_MAX_LISTED_WORKERS = 64
_BAR_CHARACTERS = 30  # the widest bar of a plot


def bundle_view(bundle: Bundle) -> Lines:
    """List the stage files, the tensors between them, and tied parameters."""
    rows = []
    for stage in bundle.stages:
        takes, returns = ", ".join(stage.inputs), ", ".join(stage.outputs) or "the model's output"
        rows.append([stage.file, takes, returns, len(stage.parameters), len(stage.buffers)])
    title = f"{bundle.name}: minibatch of {bundle.batch_size}, checked: {bundle.proof}"
    columns = ("file", "takes", "returns", "parameters", "buffers")
    yield Table(columns, rows, names=3, title=title, drop=("buffers", "parameters"))
    tensors = []
    for tensor in bundle.tensors:
        producer = "data" if tensor.producer < 0 else f"stage {tensor.producer}"
        consumers, shape = ", ".join(f"stage {s}" for s in tensor.consumers), "×".join(map(str, tensor.shape))
        tensors.append([tensor.name, producer, consumers, shape, tensor.dtype, "yes" if tensor.gradient else "no"])
    tensor_columns = ("tensor", "from", "to", "shape", "dtype", "gradient back")
    yield Table(tensor_columns, tensors, names=6, drop=("dtype", "gradient back"))
    yield from (tied.sentence() for tied in bundle.tied)
    yield from (f"warning: {doubt}" for doubt in bundle.doubts)


def cluster_view(cluster: ClusterFile) -> Lines:
    """List the levels, outermost first."""
    columns = ["level", "size", "bandwidth", "latency"]
    rows: list[list[object]] = [
        [depth, level.size, format_rate(level.bandwidth_bytes_per_s), format_seconds(level.latency_s)]
        for depth, level in enumerate(cluster.levels)
    ]
    title = f"{cluster.name}: {counted(cluster.cluster().workers, 'worker')}"
    if cluster.memory_bytes:
        title += f" of {format_bytes(cluster.memory_bytes)}"
    if network := cluster.measured:
        title += f", measured over {network.backend} (torch {network.torch})"
        columns += ["one pair alone", "all-reduce", "of the ring formula"]
        for row, level, measured in zip(rows, cluster.levels, network.levels, strict=True):
            share = measured.allreduce_bytes_per_s / level.bandwidth_bytes_per_s
            row += [*map(format_rate, (measured.pair_bytes_per_s, measured.allreduce_bytes_per_s)), f"{share:.0%}"]
    yield Table(columns, rows, title=title, drop=("of the ring formula", "one pair alone"))
    yield "bandwidth: of the link between one server or worker and the others, each way. All its workers share it"


def plan_view(plan: Plan) -> Lines:
    """Show the stages as a table, the bottleneck, and the plans that it was compared with."""
    predicted = None if plan.edited else plan.predicted
    yield _stage_table(plan, predicted)
    if plan.edited:
        yield "?: the plan was edited, and the figures in its file belong to the earlier version"
    if predicted:
        yield from _speed(plan, predicted)
        yield from _lack_of_memory(plan, predicted)
    if remark := schedule.STRATEGIES[plan.strategy].remark(plan.shape()):
        yield remark
    if plan.why and not plan.edited:
        yield f"bottleneck: {plan.why.bottleneck}"
        for number, line in enumerate(plan.certificate_lines):
            yield line if number else f"certificate: {line}"
        yield from _passed_over(plan, plan.why.faster, predicted)
        yield from _rejected(plan.why)


def _passed_over(plan: Plan, faster: FasterPlan | None, predicted: Predicted | None) -> Lines:
    if faster and predicted and predicted.simulated_s:
        less = 1 - faster.simulated_s / predicted.simulated_s
        drawback = "has more stages" if len(faster.begins) >= len(plan.stages) else "divides more modules"
        begins = f", cut before {', '.join(faster.begins)}" if faster.begins else ""
        yield (
            f"passed over: {faster.config}{begins}. Simulated, it takes {format_seconds(faster.simulated_s)}, "
            f"{less:.1%} less, but {drawback} (a smaller --simplest may choose it)"
        )


def _rejected(why: Why) -> Lines:
    for rival in why.rivals:
        samples = f", {counted(rival.samples_per_update, 'sample')} per update" if rival.samples_per_update else ""
        yield f"rejected: {rival.plan}, {format_seconds(rival.bottleneck_s)} per minibatch{samples} ({rival.why})"
    if why.rivals:
        yield _RIVALS


def _stage_table(plan: Plan, predicted: Predicted | None) -> Table:
    rows = []
    for s, stage in enumerate(plan.stages):
        figures = _stage_figures(predicted, s) if predicted else ["?"] * 4
        in_flight = f"{stage.in_flight}, recomputed" if stage.recompute else stage.in_flight
        rows.append([s, abbreviated(stage.nodes), ranges(stage.workers), in_flight, *figures])
    levels = ", ".join(f"{v.size} at {format_rate(v.bandwidth_bytes_per_s)}" for v in plan.cluster.levels)
    title = f"{plan.name}: {plan.config} on {levels}, schedule {plan.schedule}"
    columns = ("stage", "holds", "workers", "in flight", "compute", "all-reduce", "to next", "memory")
    return Table(columns, rows, names=3, title=title, drop=("to next", "all-reduce", "in flight"))


def _stage_figures(predicted: Predicted, s: int) -> list[str]:
    to_next = format_seconds(predicted.transfer_s[s]) if s < len(predicted.transfer_s) else ""
    compute, allreduce = map(format_seconds, (predicted.compute_s[s], predicted.allreduce_s[s]))
    return [compute, allreduce, to_next, format_bytes(predicted.memory_bytes[s])]


def _speed(plan: Plan, predicted: Predicted) -> Lines:
    """Show the time per minibatch by the formulas and by simulation, with throughput and gain beside their source.

    It compares no plan with itself, nor one that is not for speed.
    """
    is_whole_model = len(plan.stages) == 1 and plan.workers == plan.cluster.workers
    is_data_parallel = is_whole_model and (not plan.has_gain or math.isclose(predicted.gain_over_data_parallel, 1))
    throughput = f" ({format_throughput(predicted.throughput_samples_per_s)})"
    gain = f", {format_speedup(predicted.gain_over_data_parallel)} times as fast as data parallelism"
    if plan.workers < plan.cluster.workers:
        gain += f" on {counted(plan.cluster.workers, 'worker')}"
    if is_whole_model and predicted.samples_per_update != predicted.data_parallel_samples_per_update:
        gain += f" with {predicted.data_parallel_samples_per_update} samples per update"
    if predicted.data_parallel_fits is False:
        gain += " (which does not fit)"
    if is_data_parallel:
        gain = " (this is data parallelism)"
    elif plan.workers == 1:
        gain += " (this is one worker alone)"
    own_s, one_worker_s = predicted.time_s, predicted.one_worker_s
    if one_worker_s and own_s and plan.workers > 1:
        gain += f", {format_speedup(one_worker_s / own_s)} times as fast as one worker"
    if not plan.has_gain:
        gain = ""
    simulated_s, both = predicted.simulated_s, predicted.data_parallel_s is not None
    by_formulas = f"{throughput if simulated_s is None else ''}{'' if both else gain}"
    has_formulas = plan.execution.has_formulas
    if has_formulas:
        yield f"predicted: {format_seconds(predicted.bottleneck_s)} per minibatch of {plan.batch_size}{by_formulas}"
    if simulated_s is not None:
        size = "" if has_formulas else f" of {plan.batch_size}"
        yield f"simulated: {format_seconds(simulated_s)} per minibatch{size}{throughput}{gain if both else ''}"
    yield from _samples_line(plan, is_data_parallel=is_data_parallel)


def _lack_of_memory(plan: Plan, predicted: Predicted) -> Lines:
    limit = plan.cluster.memory_bytes
    for s, needed in enumerate(predicted.memory_bytes):
        if limit is not None and needed > limit:
            yield f"does not fit: stage {s} needs {format_bytes(needed)}, a worker has {format_bytes(limit)}"


def _samples_line(plan: Plan, *, is_data_parallel: bool) -> Lines:
    """Say how many samples an update averages, if the plan says it, and how many with data parallelism."""
    samples = plan.predicted and plan.predicted.samples_per_update
    if not plan.predicted or not samples:
        return
    minibatches, kind = samples // plan.batch_size, "microbatches" if plan.kind.flushes else "minibatches"
    taken = f" ({minibatches} {kind} of {plan.batch_size})" if minibatches > 1 else ""
    other = plan.predicted.data_parallel_samples_per_update
    yield f"samples per update: {samples}{taken}" + (f"; data parallelism: {other}" if not is_data_parallel else "")


def timeline(plan: Plan, width: int) -> str:
    """Draw the plan's schedule in slots: forwards take one, backwards two; lines end after `width` characters."""
    shape = plan.shape()
    if sum(shape.replicas) > _MAX_DRAWN_WORKERS:
        return f"(the timeline of more than {_MAX_DRAWN_WORKERS} workers is not drawn)"
    minibatches = 2 * max(max(shape.update_every), sum(shape.replicas)) + 8
    if minibatches > _MAX_DRAWN_MINIBATCHES:
        return f"(the timeline of more than {_MAX_DRAWN_MINIBATCHES} minibatches is not drawn)"
    workers = [worker for stage in plan.stages[: plan.pipeline_depth] for worker in stage.workers]
    return schedule.draw(plan.kind.build(shape, minibatches), width=width, workers=workers)


def ranges(numbers: Sequence[int]) -> str:
    """Write contiguous numbers as `0-14`, others as `0,2,3`."""
    contiguous = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]}-{numbers[-1]}" if contiguous else ",".join(map(str, numbers))


def worker_table(plan: Plan, nnodes: int) -> Table:
    """List which worker does what, on which host.

    Raises:
        UsageError: the machines cannot have equal shares of the workers.
    """
    cluster = plan.cluster
    check_even_shares(cluster.workers, nnodes)
    per_machine = cluster.workers // nnodes
    used = sorted((w, s, k) for s, stage in enumerate(plan.stages) for k, w in enumerate(stage.workers))
    ranks = {worker: rank for rank, worker in enumerate(dict.fromkeys(worker for worker, _, _ in used))}
    rows = []
    for worker, s, k in used:
        machine = f"machine {worker // per_machine}" if nnodes > 1 else "this machine"
        minibatches = ", ".join(str(k + i * plan.stages[s].replicas) for i in range(3))
        stage, trained = f"{s}, replica {k}", f"{minibatches}, ..."
        rows.append([ranks[worker], machine, stage, trained, abbreviated(plan.stages[s].nodes), worker])
    columns = ("rank", "host", "stage", "minibatches", "holds", "worker")
    return Table(columns, rows, names=5, drop=("worker", "minibatches"))


def profile_table(profile: Profile, *, largest: int | None = None) -> Table:
    """List the operators, or only the `largest` by time, with the totals."""
    ranked = sorted(profile.nodes, key=lambda node: -(node.forward_s + node.backward_s + node.update_s))
    shown = ranked[:largest] if largest else profile.nodes
    rows = [[node.name, node.op, *_costs([node]), format_bytes(node.output_bytes)] for node in shown]
    if len(shown) < len(profile.nodes):
        rest = ranked[len(shown) :]
        rows.append([f"({len(rest)} more)", "", *_costs(rest), ""])
    parameters = format_bytes(profile.weight_bytes(set(profile.by_name)))
    rows.append(["total", "", *_costs(profile.nodes)[:-1], parameters, ""])
    title = f"{profile.name}: minibatch of {profile.batch_size}, {profile.device.kind} for {profile.device.name}"
    if profile.precision and profile.device.kind == "measured":  # an estimate's name includes it
        title += f", in {profile.precision}"
    if profile.compiled:
        title += f"\ntimes are shares of the times of {counted(len(profile.segments), 'compiled segment')}"
    if profile.step_s:
        title += f"\nwhole step {format_seconds(profile.step_s)}, coverage {profile.coverage:.2f} (0.9 to 1.1 is good)"
    if profile.loading_s is not None:
        title += f"\nloading: {format_seconds(profile.loading_s)} per minibatch"
    columns = ("operator", "kind", "forward", "backward", "update", "parameters", "output")
    return Table(columns, rows, names=2, title=title, drop=("output", "kind", "update", "parameters"))


def _costs(nodes: Collection[Node]) -> list[str]:
    """Sum forward, backward and update times and parameter bytes, as text."""
    seconds = [format_seconds(sum(getattr(n, f) for n in nodes)) for f in ("forward_s", "backward_s", "update_s")]
    return [*seconds, format_bytes(sum(n.parameter_bytes + n.frozen_bytes for n in nodes))]


def devices_view(devices: Devices) -> Lines:
    """List each device's figures, and their data sheets."""
    rows = []
    for key, device in devices.devices.items():
        peaks = ", ".join(f"{precision} {peak / 1e12:g}" for precision, peak in device.peak_flops_per_s.items())
        bandwidth, memory = format_rate(device.bandwidth_bytes_per_s), format_bytes(device.memory_bytes)
        rows.append([key, device.name, peaks, bandwidth, memory])
    yield Table(("--device", "device", "Tflop/s", "bandwidth", "memory"), rows, names=3)
    yield from dict.fromkeys(f"source: {d.source}" for d in devices.devices.values())


def measured_view(profile: Profile) -> Lines:
    """List the operators that cost most, the opaque modules, and warnings about doubtful figures."""
    return [profile_table(profile, largest=12), *_opaque_modules(profile), *_coverage_warnings(profile)]


def _opaque_modules(result: Profile) -> Iterator[str]:
    """Say which modules are opaque, and why."""
    reasons: dict[str, list[str]] = {}
    for path, why in result.opaque.items():
        reasons.setdefault(why, []).append(path)
    for why, paths in reasons.items():
        names = ", ".join(paths[:5]) + f" and {len(paths) - 5} more" * (len(paths) > 5)
        reason = "as HINTS says" if why == "HINTS" else f"because pdtool cannot see its operators ({why})"
        yield f"{names}: opaque, cannot be split, {reason}"


def _coverage_warnings(result: Profile) -> Iterator[str]:
    if result.launch_s > result.step_s:
        yield (
            f"warning: the kernels of a step take {format_seconds(result.step_s)}, but the host needs "
            f"{format_seconds(result.launch_s)} to launch them. A run will be slower than its plan: "
            "use a larger --batch-size"
        )
    is_long_enough = result.step_s >= _MIN_STEP_S
    if result.device.kind == "measured" and is_long_enough and not 0.9 <= result.coverage <= 1.1:
        why = "that torch.compile fuses less in segments than in the whole model, or " if result.compiled else ""
        yield (
            f"warning: the operators' times add up to {result.coverage:.2f} of a whole step (0.9 to 1.1 is good); "
            f"the usual cause is {why}another program on this machine"
        )


def simulation_view(plan: Plan, schedule: str, result: SimulationResult) -> Lines:
    """Show how each worker spent its time, and the time per minibatch beside the predicted one."""
    rows = []
    for usage in result.workers[:_MAX_LISTED_WORKERS]:
        parts = (usage.busy_s, usage.communication_s, usage.idle_s)
        shares = (f"{part / (result.makespan_s or 1.0):.0%}" for part in parts)
        memory, sent = format_bytes(usage.memory_bytes), format_bytes(usage.sent_bytes)
        rows.append([usage.worker, usage.stage, *shares, usage.peak_stashed, usage.versions, memory, sent])
    columns = ("worker", "stage", "busy", "communicating", "idle", "stashed", "versions", "memory", "sent")
    minibatches = f"{counted(result.minibatches, 'minibatch')} of {result.batch_size}"
    title = f"{plan.name}: {plan.config}, schedule {schedule}, {minibatches}"
    yield Table(columns, rows, names=0, title=title)
    if len(result.workers) > _MAX_LISTED_WORKERS:
        yield f"({len(result.workers) - _MAX_LISTED_WORKERS} more workers; --json has them all)"
    time_s = result.time_per_minibatch_s
    time = f"{format_seconds(time_s)} per minibatch ({format_throughput(result.throughput_samples_per_s)})"
    if result.steady:
        compared = ""
        if predicted := predicted_s(plan, schedule):
            compared = f"; predicted {format_seconds(predicted)}, simulated {time_s / predicted - 1:+z.1%}"
        yield f"steady state: {time}{compared}"
    else:
        yield f"no steady state, because there are too few minibatches: {time}, including fill and drain"
    total, fill, drain = map(format_seconds, (result.makespan_s, result.fill_s, result.drain_s))
    yield f"all minibatches: {total}. The last worker began after {fill} (fill). The first ended {drain} early (drain)"


def predicted_s(plan: Plan, schedule: str) -> float | None:
    """Return the seconds per minibatch by the formulas, if the plan has them for `schedule`."""
    has_formulas = plan.predicted and schedule == plan.schedule and plan.execution.has_formulas
    return plan.predicted.bottleneck_s if plan.predicted and has_formulas else None


def comparison_view(comparison: Comparison) -> Lines:
    """Compare the plan with its rivals in steady state, whatever number of minibatches was asked for."""
    plan_row, rows = comparison.plans[0], []
    for row in comparison.plans:
        speed, gain = format_number(row.throughput_samples_per_s), ""
        if row is not plan_row and plan_row.time_per_minibatch_s:
            gain = f"{format_ratio(row.time_per_minibatch_s / plan_row.time_per_minibatch_s)} ×"
        memory = format_bytes(row.memory_bytes) + ("" if row.fits else ": does not fit")
        sent = format_bytes(row.sent_bytes)
        rows.append([row.label, row.config, speed, gain, row.samples_per_update, memory, sent])
    columns = ("in steady state", "plan", "samples/s", "gain", "per update", "most memory", "sent")
    yield Table(columns, rows, names=2, drop=("sent", "samples/s", "per update"))
    yield (
        "gain: speedup of this plan over that one; per update: samples per update, at the stage with most; "
        "sent: bytes that all workers send for one minibatch"
    )
    yield from comparison.left_out


def sweep_view(points: Sequence[SweepPoint]) -> Lines:
    """Show the gain over data parallelism at each bandwidth, as figures and as bars; `|` is where they are equal."""
    from pdtool.planner.choice.comparison import crossings

    max_gain = max(1.0, *(point.gain for point in points))
    rows = []
    for p in points:
        times = map(format_seconds, (p.time_per_minibatch_s, p.data_parallel_s))
        bar = _bar(p.gain / max_gain, 1 / max_gain)
        rows.append([format_bits_rate(p.bandwidth_bytes_per_s), *times, f"{format_ratio(p.gain)} ×", bar])
    yield Table(("bandwidth", "this plan", "data parallelism", "gain", ""), rows, names=0)
    equal = crossings(points)
    if equal:
        yield f"as fast as data parallelism at {', '.join(map(format_bits_rate, equal))} (interpolated)"
    else:
        yield f"{'' if points[0].gain > 1 else 'never '}faster than data parallelism at these bandwidths"


def _bar(share: float, mark: float) -> str:
    cells = ("█" * round(share * _BAR_CHARACTERS)).ljust(_BAR_CHARACTERS, "·")
    position = min(_BAR_CHARACTERS - 1, math.floor(mark * _BAR_CHARACTERS))
    return cells[:position] + "|" + cells[position + 1 :]


def simulation_data(plan: Plan, simulation: SimulatedPlan) -> dict[str, Any]:
    """Return all figures, without the events, as `--json` prints them."""
    from pdtool.planner.choice.comparison import crossings

    schedule, result, points = simulation.schedule, simulation.result, simulation.sweep
    data: dict[str, Any] = {
        "plan": plan.name,
        "config": plan.config,
        "schedule": schedule,
        "batch_size": result.batch_size,
        "minibatches": result.minibatches,
        "steady_minibatches": result.steady,
        "predicted_bottleneck_s": predicted_s(plan, schedule),
        "bottleneck_s": result.time_per_minibatch_s,
        "throughput_samples_per_s": result.throughput_samples_per_s,
        "makespan_s": result.makespan_s,
        "fill_s": result.fill_s,
        "drain_s": result.drain_s,
        "sent_bytes": result.sent_bytes,
        "workers": [asdict(usage) for usage in result.workers],
        "compared": [_with_pace(asdict(compared)) for compared in simulation.comparison.plans],
    }
    if points:
        data["sweep"] = [{**_with_pace(asdict(point)), "gain": point.gain} for point in points]
        data["crossings_bytes_per_s"] = crossings(points)
    return data


def _with_pace(figures: dict[str, Any]) -> dict[str, Any]:
    """Name the seconds per minibatch `pace_s`, the name that scripts know."""
    return {"pace_s" if name == "time_per_minibatch_s" else name: value for name, value in figures.items()}
