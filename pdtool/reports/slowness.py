"""Why a run was slower than predicted: the parts of the difference, and the likely cause of each.

The report page lists them, and the terminal prints the largest ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdtool.artifacts.plan import Predicted
from pdtool.artifacts.report import Report, StageReport
from pdtool.units import counted, format_bits_rate, format_bytes, format_seconds

_NOTABLE = 0.01  # fraction of the predicted time per minibatch; smaller parts are not explained
_MUCH_SLOWER = 1.25  # factor on the profiled time; name stages that compute longer
_BUSY = 0.7  # fraction of its predicted share; if no stage computes that much of the time, messages set the pace
_SLOWER = 1.1  # factor on the predicted time; the terminal explains larger times
_MUCH_LOADING = 0.1  # fraction of the first stage's time; above it, say that loading slows a run
_SMALL_MESSAGES_BYTES = 64_000  # per minibatch; for so few the bandwidth of a link matters little
_LARGE_SHARE = 0.1  # fraction of the whole difference; the terminal names larger parts


@dataclass(frozen=True)
class ExtraTime:
    """One part of the busiest stage's extra seconds per minibatch over the prediction, and its likely cause."""

    what: str
    more_s: float
    cause: str


def differences(report: Report) -> list[ExtraTime]:
    """Divide the difference between measured and predicted time per minibatch, at the stage that computes longest.

    The parts add up to the whole difference; the largest comes first. There are none without a prediction.
    """
    predicted, stages = report.predicted, report.stages
    if not predicted or not stages:
        return []
    number = busiest_stage(report)
    stage, predicted_s = stages[number], predicted.time_s
    profiled_s = sum(predicted.compute_s[number :: len(stages)])  # of all its chunks
    parts = [
        ExtraTime("computing", stage.busy_s - profiled_s, _computing_cause(report, number, profiled_s)),
        ExtraTime(
            "waiting for other stages",
            stage.wait_s - (predicted_s - profiled_s),
            _waiting_cause(report, predicted) + _warm_up(report),
        ),
        ExtraTime("averaging gradients", stage.allreduce_s, _averaging_cause(stage)),
        ExtraTime("loading", stage.data_s, f"not predicted; {_loading_remedy(report)}"),
        ExtraTime("between actions", stage.rest_s, "Python's overhead, and times when the core ran other processes"),
    ]
    parts = [part if part.more_s > 0 else replace(part, cause="less than predicted") for part in parts]
    notable = [part for part in parts if abs(part.more_s) >= _NOTABLE * max(predicted_s, 1e-12)]
    return sorted(notable, key=lambda part: -abs(part.more_s))


def slowness_lines(report: Report) -> Iterator[str]:
    """Say which parts of the difference are large, and why. If a run is about as fast as predicted, say only whether
    loading slows it.

    The difference is not explained either if its reason is known: workers share cores, or torch.compile was at work.
    """
    parts = differences(report)
    predicted_s = report.predicted.time_s if report.predicted else 0.0
    number = busiest_stage(report) if parts else 0
    measured_s = report.stages[number].time_s if parts else 0.0
    if not parts or report.is_crowded or report.includes_compilation or measured_s < _SLOWER * predicted_s:
        yield from _loading_limit(report)
        return
    more_s = measured_s - predicted_s
    with_fill = " (including the time to fill and drain the pipeline)"
    yield f"stage {number} took {format_seconds(more_s)} more per minibatch than predicted{with_fill}:"
    for part in parts:
        if part.more_s >= _LARGE_SHARE * more_s:
            yield f"  {format_seconds(part.more_s)} ({part.more_s / more_s:.0%}) {part.what}: {part.cause}"


def _loading_limit(report: Report) -> Iterator[str]:
    """Say that loading slows a run if without it the first stage would not be as slow as the slowest."""
    if not report.stages:
        return
    first, *others = report.stages
    share = first.data_s / (first.time_s or 1.0)
    if share >= _MUCH_LOADING and first.busy_s + first.data_s > max((other.busy_s for other in others), default=0.0):
        yield f"loading slows this run: stage 0 spends {share:.0%} of its time on data, and {_loading_remedy(report)}"


def _loading_remedy(report: Report) -> str:
    """Return the remedy for slow loading: one loader worker more, if there is a core for it."""
    used, replicas = report.loader_workers or 0, report.stages[0].replicas
    loaded = f"{counted(used, 'loader worker')} loaded for each replica" if used else "no loader worker loaded ahead"
    taken = (report.local_workers or 0) + used * replicas
    if report.cores is None or taken + replicas <= report.cores:
        return f"{loaded}: pass --loader-workers {used + 1}"
    return f"{loaded}, and no core is free. Make samples cheaper to load, or use more cores"


def busiest_stage(report: Report) -> int:
    """Return the stage that computes and loads longest."""
    return max(range(len(report.stages)), key=lambda s: report.stages[s].busy_s + report.stages[s].data_s)


def _waiting_cause(report: Report, predicted: Predicted) -> str:
    """Name the link that all stages wait for, or say that another stage is slower."""
    measured_s, depth = max(stage.time_s for stage in report.stages), len(report.stages)
    longest_s = max(sum(predicted.compute_s[s::depth]) for s in range(depth))  # less than the whole time, with a flush
    busy_s = _BUSY * min(1.0, longest_s / max(predicted.time_s, 1e-12)) * measured_s
    if depth < 2 or any(stage.time_s - stage.wait_s > busy_s for stage in report.stages):
        return "another stage, or the link to it, is slower"
    seen = ""
    averages = any(stage.replicas > 1 or stage.allreduce_s for stage in report.stages)
    if measured_s and not averages:  # the bytes are those of the messages
        most = max(range(depth), key=lambda s: report.stages[s].sent_bytes)
        sent_bytes = report.stages[most].sent_bytes
        size, rate = format_bytes(sent_bytes), format_bits_rate(sent_bytes / measured_s)
        if sent_bytes < _SMALL_MESSAGES_BYTES:
            return (
                f"no stage computes all the time. Even a small message takes some time, and no stage sends more than "
                f"{size} per minibatch. Run `pdtool profile` with a larger --batch-size to get fewer, larger messages"
            )
        seen = f": stage {most} sent {size} per minibatch, {rate}"
    workers = sum(stage.replicas for stage in report.stages)
    command = (
        f"pdtool probe --topology {workers} -o cluster.yaml" if workers == report.local_workers else "pdtool probe"
    )
    return (
        f"no stage computes all the time, so messages set the pace{seen}. Measure your links with `{command}`, and "
        "plan for them with `pdtool partition --cluster cluster.yaml`"
    )


def _averaging_cause(stage: StageReport) -> str:
    """Name the workers that a stage waits for when it averages gradients."""
    others = "other replicas" if stage.replicas > 1 else "stages that share a parameter with it"
    return f"this includes waiting for {others}, which the prediction counts as waiting for stages"


def _computing_cause(report: Report, number: int, profiled_s: float) -> str:
    """Say how much longer a stage computes than profiled, and what to check."""
    stage = report.stages[number]
    if report.is_crowded:
        cores = counted(report.cores or 1, "core")
        return f"{report.local_workers} workers share {cores}, but the profile had one core to itself"
    if not 0 < profiled_s * _MUCH_SLOWER < stage.busy_s:
        sending = f". {format_seconds(stage.send_s)} of this is handing over messages" if stage.send_s else ""
        causes = "other threads, memory bandwidth or temperature"
        return f"operators ran slower than in the profile, perhaps because of {causes}{sending}"
    if report.cores is None:
        why = (
            "the host may need longer to launch the kernels than the GPU to run them (if so, profile with a larger "
            "--batch-size), the GPU may have been busy with something else, or it is not the GPU that was profiled"
        )
    else:
        why = (
            "the cores may have been busy with something else, the workers may have had fewer threads than the profile "
            "(--threads, OMP_NUM_THREADS), or the profile is of another device"
        )
    what = (
        f"stage {number} computes for {format_seconds(stage.busy_s)}, but the profile says {format_seconds(profiled_s)}"
    )
    return f"{what}: {why}{_warm_up(report)}"


def _warm_up(report: Report) -> str:
    """Say that the times include the warm-up, which the measurement of several epochs leaves out."""
    return ". A single epoch includes the warm-up" if report.epochs - report.resumed_after == 1 else ""
