"""Artifacts as tables and lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from pdtool import schedule
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.cluster import ClusterFile
from pdtool.artifacts.device import Devices
from pdtool.artifacts.plan import Plan, Predicted
from pdtool.artifacts.profile import Node, Profile
from pdtool.artifacts.report import Report
from pdtool.cli.tables import table as _table
from pdtool.errors import UsageError
from pdtool.units import format_bytes, format_rate, format_seconds

Parts = Iterable[Table | str]
_MOST_DRAWN = 32  # workers in a timeline


def profile_table(profile: Profile, *, largest: int | None = None) -> Table:
    """The operators, or only the `largest`, with the totals."""
    ranked = sorted(profile.nodes, key=_seconds, reverse=True)
    shown = ranked[:largest] if largest else profile.nodes
    rows = [_node(node) for node in shown]
    if len(shown) < len(profile.nodes):
        rest = ranked[len(shown) :]
        rows.append([f"({len(rest)} more)", "", *_costs(rest), ""])
    rows.append(
        ["total", "", *_costs(profile.nodes)[:-1], format_bytes(profile.parameter_bytes(set(profile.by_name))), ""]
    )
    title = f"{profile.name}: minibatch of {profile.batch_size}, {profile.device.kind} for {profile.device.name}"
    if profile.step_s:
        title += f"\nwhole step {format_seconds(profile.step_s)}, coverage {profile.coverage:.2f}"
    columns = ("operator", "kind", "forward", "backward", "update", "parameters", "output")
    return _table(columns, rows, names=2, title=title)


def _seconds(node: Node) -> float:
    return node.forward_s + node.backward_s + node.update_s


def _costs(nodes: Iterable[Node]) -> list[str]:
    nodes = list(nodes)
    seconds = [format_seconds(sum(getattr(n, f) for n in nodes)) for f in ("forward_s", "backward_s", "update_s")]
    return [*seconds, format_bytes(sum(n.parameter_bytes for n in nodes))]


def _node(node: Node) -> list[str]:
    return [node.name, node.op, *_costs([node]), format_bytes(node.output_bytes)]


def devices_view(table: Devices) -> Parts:
    """Each device's figures, and where they come from."""
    rows = [
        [
            key,
            d.name,
            ", ".join(f"{name} {peak / 1e12:g}" for name, peak in d.peak_flops_per_s.items()),
            format_rate(d.bandwidth_bytes_per_s),
            format_bytes(d.memory_bytes),
        ]
        for key, d in table.devices.items()
    ]
    yield _table(("--device", "device", "Tflop/s", "bandwidth", "memory"), rows, names=3)
    yield from dict.fromkeys(f"source: {d.source}" for d in table.devices.values())


def cluster_view(cluster: ClusterFile) -> Parts:
    """The levels, and what was measured at them."""
    columns = ["level", "size", "bandwidth", "latency"]
    rows: list[list[object]] = [
        [depth, level.size, format_rate(level.bandwidth_bytes_per_s), format_seconds(level.latency_s)]
        for depth, level in enumerate(cluster.levels)
    ]
    title = f"{cluster.name}: {cluster.cluster().workers} workers"
    if cluster.memory_bytes:
        title += f" of {format_bytes(cluster.memory_bytes)}"
    if found := cluster.measured:
        title += f", measured over {found.backend} (torch {found.torch})"
        columns += ["one pair alone", "all-reduce", "of the ring formula"]
        for row, level, measured in zip(rows, cluster.levels, found.levels, strict=True):
            share = measured.allreduce_bytes_per_s / level.bandwidth_bytes_per_s
            row += [*map(format_rate, (measured.pair_bytes_per_s, measured.allreduce_bytes_per_s)), f"{share:.0%}"]
    yield _table(columns, rows, title=title)
    yield "bandwidth: of one member's link to the others of its level, each way at once, shared by its workers"


def plan_view(plan: Plan) -> Parts:
    """The stages as a table, what bounds the plan, and its rivals."""
    predicted = None if plan.edited else plan.predicted
    rows = []
    for s, stage in enumerate(plan.stages):
        figures = ["?"] * 4
        if predicted:
            to_next = format_seconds(predicted.transfer_s[s]) if s < len(predicted.transfer_s) else ""
            seconds = map(format_seconds, (predicted.compute_s[s], predicted.allreduce_s[s]))
            figures = [*seconds, to_next, format_bytes(predicted.memory_bytes[s])]
        flight = f"{stage.in_flight}, recomputed" if stage.recompute else stage.in_flight
        rows.append([s, _brief(stage.nodes), _ranges(stage.workers), flight, *figures])
    levels = ", ".join(f"{v.size} at {format_rate(v.bandwidth_bytes_per_s)}" for v in plan.cluster.levels)
    title = f"{plan.name}: {plan.config} on {levels}, schedule {plan.schedule}"
    columns = ("stage", "holds", "workers", "in flight", "compute", "all-reduce", "to next", "memory")
    yield _table(columns, rows, names=3, title=title)
    if plan.edited:
        yield "edited by hand since its predictions were computed; run and codegen compute them again"
    if predicted:
        yield from _speed(plan.batch_size, predicted)
    if plan.why:
        yield f"bottleneck: {plan.why.bottleneck}"
        if plan.why.lower_bound_s is not None:
            yield (
                f"certificate: none takes less than {format_seconds(plan.why.lower_bound_s)}, this one is within "
                f"{plan.why.gap or 0:.1%} of that ({plan.why.proof})"
            )
        for rival in plan.why.rivals:
            yield f"rejected: {rival.plan}, {format_seconds(rival.bottleneck_s)} per minibatch ({rival.why})"


def _speed(batch_size: int, predicted: Predicted) -> Parts:
    """What the formulas say and what the simulation says; throughput and gain beside the figures they are of."""
    throughput = f" ({predicted.throughput_samples_per_s:.4g} samples/s)"
    gain = f", {predicted.gain_over_data_parallel:.3g} × data parallelism"
    pace, both = predicted.simulated_s, predicted.data_parallel_s is not None
    by_formulas = f"{throughput if pace is None else ''}{'' if both else gain}"
    yield f"predicted: {format_seconds(predicted.bottleneck_s)} per minibatch of {batch_size}{by_formulas}"
    if pace is not None:
        yield f"simulated: {format_seconds(pace)} per minibatch{throughput}{gain if both else ''}"


def timeline(plan: Plan) -> str:
    """The plan's schedule drawn in slots: forwards take one, backwards two."""
    shape = plan.shape()
    if sum(shape.replicas) > _MOST_DRAWN:
        return f"(the timeline of more than {_MOST_DRAWN} workers is not drawn)"
    minibatches = 2 * max(max(shape.update_every), sum(shape.replicas)) + 8
    return schedule.draw(schedule.build(plan.schedule, shape, minibatches))


def _brief(names: Sequence[str]) -> str:
    """`stem, block1`, or the first and the last of a long list."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-14` for contiguous numbers, `0,2,3` for others."""
    contiguous = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]}-{numbers[-1]}" if contiguous else ",".join(map(str, numbers))


def places_table(plan: Plan, nnodes: int) -> Table:
    """Which worker does what, on which host.

    Raises:
        UsageError: the machines cannot have equal shares of the workers.
    """
    cluster = plan.cluster.cluster()
    if cluster.workers % nnodes:
        raise UsageError(
            f"{nnodes} machines cannot share the {cluster.workers} workers of {cluster.topology} evenly",
            "give --nnodes that divides them",
        )
    each = cluster.workers // nnodes
    used = sorted((w, s, k) for s, stage in enumerate(plan.stages) for k, w in enumerate(stage.workers))
    ranks = {worker: rank for rank, worker in enumerate(dict.fromkeys(worker for worker, _, _ in used))}
    rows = [
        (
            ranks[worker],
            f"machine {worker // each}" if nnodes > 1 else "this machine",
            f"stage {s}, replica {k}",
            f"minibatches {k}, {k + r}, {k + 2 * r}, ...",
            _brief(plan.stages[s].nodes),
            worker,
        )
        for worker, s, k in used
        for r in (plan.stages[s].replicas,)
    ]
    return _table(("rank", "host", "does", "of", "holds", "worker"), rows, names=5)


def bundle_view(bundle: Bundle) -> Parts:
    """The stage files and the tensors between them."""
    rows = [
        (
            stage.file,
            ", ".join(stage.inputs),
            ", ".join(stage.outputs) or "the model's output",
            len(stage.parameters),
            len(stage.buffers),
        )
        for stage in bundle.stages
    ]
    title = f"{bundle.name}: minibatch of {bundle.batch_size}, proved by {bundle.proof}"
    yield _table(("file", "takes", "returns", "parameters", "buffers"), rows, names=3, title=title)
    wires = [
        (
            tensor.name,
            "data" if tensor.producer < 0 else f"stage {tensor.producer}",
            ", ".join(f"stage {s}" for s in tensor.consumers),
            "×".join(map(str, tensor.shape)),
            tensor.dtype,
            "yes" if tensor.gradient else "no",
        )
        for tensor in bundle.tensors
    ]
    yield _table(("tensor", "from", "to", "shape", "dtype", "gradient back"), wires, names=6)
    for tied in bundle.tied:
        yield f"tied: {', '.join(f'{n} (stage {s})' for s, n in zip(tied.stages, tied.names, strict=True))}"


def report_view(report: Report) -> Parts:
    """Where each stage's time went, and predicted beside measured."""
    yield _times(report)
    yield (
        "waits: for messages of other stages, on their way or not made yet; averaging: waits for gradients of other "
        "workers; rest: between actions"
    )
    yield _figures(report)
    measured = report.measured
    if report.predicted:
        yield f"per minibatch: {_beside(report.predicted, measured.bottleneck_s)}"
    else:
        yield f"per minibatch: measured {format_seconds(measured.bottleneck_s)}"
    yield f"throughput: {report.throughput_samples_per_s:.4g} samples/s, pipeline fill and drain included"
    yield "validation: " + ", ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
    if report.target:
        yield f"target {report.target}: {'reached' if report.target_reached else 'not reached'}"


def _times(report: Report) -> Table:
    """Shares of all the time there was."""
    rows = []
    for s, stage in enumerate(report.stages):
        parts = (stage.busy_s, stage.wait_s, stage.allreduce_s, stage.rest_s)
        shares = (f"{part / (stage.time_s or 1.0):.0%}" for part in parts)
        each = map(format_seconds, (stage.forward_s, stage.backward_s, stage.update_s, stage.send_s))
        rows.append([s, stage.replicas, *shares, *each])
    columns = ("stage", "replicas", "busy", "waits", "averaging", "rest", "forward", "backward", "update", "sending")
    title = (
        f"{report.plan}: {report.config}, schedule {report.schedule}, {report.epochs} epoch(s) of {report.minibatches} "
        f"minibatches of {report.batch_size}\nwhere the time went, and how long a minibatch took:"
    )
    return _table(columns, rows, title=title)


def _figures(report: Report) -> Table:
    """What each stage was predicted to need, and what it needed; a worker's chunks (interleaved) are one row."""
    predicted, places = report.predicted, len(report.stages)
    rows = []
    for s, stage in enumerate(report.stages):
        compute, memory = "?", "?"
        if predicted:
            compute = format_seconds(sum(predicted.compute_s[s::places]))
            memory = format_bytes(sum(predicted.memory_bytes[s::places]))
        held = "?" if stage.peak_memory_bytes is None else format_bytes(stage.peak_memory_bytes)
        rows.append(
            [
                s,
                compute,
                format_seconds(stage.busy_s),
                memory,
                held,
                stage.peak_versions,
                stage.peak_stashed,
                format_bytes(stage.sent_bytes),
            ]
        )
    columns = ("stage", "busy predicted", "measured", "memory predicted", "measured", "versions", "stashed", "sent")
    return _table(columns, rows, title="per minibatch, and at most:")


def _beside(predicted: Predicted, measured_s: float) -> str:
    """The measured seconds beside those of the simulation, or of the formulas where the plan was not simulated."""
    is_simulated = predicted.simulated_s is not None
    predicted_s = predicted.bottleneck_s if predicted.simulated_s is None else predicted.simulated_s
    ratio = f" ({measured_s / predicted_s - 1:+.0%})" if predicted_s else ""
    source = "simulated" if is_simulated else "predicted"
    return f"{source} {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}{ratio}"


def metrics_line(event: dict[str, Any]) -> str:
    """`epoch 3: loss 0.1234, accuracy 0.9810` for a validation line of metrics.jsonl."""
    figures = [f"{k} {v:.4f}" for k, v in event.items() if k not in ("split", "epoch", "step")]
    return f"epoch {event['epoch']}: {', '.join(figures)}"
