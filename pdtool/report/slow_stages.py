"""Stages that compute longer than was profiled, in a sentence that asks for the cause."""

from __future__ import annotations

from pdtool.artifacts.report import Report, StageReport
from pdtool.units import format_seconds

_MUCH_SLOWER = 1.25  # times what was profiled: a stage that computes longer than that is named


def slowest_stage_sentence(report: Report) -> str | None:
    """Return `stage 0 computes 31 ms for 9.9 ms profiled: ...`, of the stage that computes longest.

    None where it computes about as long as was profiled, and where another reason is known: workers that share cores,
    or torch.compile at work.
    """
    if not report.predicted or not report.stages or report.is_crowded or report.includes_compilation:
        return None
    number = max(range(len(report.stages)), key=lambda s: report.stages[s].busy_s)
    profiled_s = sum(report.predicted.compute_s[number :: len(report.stages)])  # of all chunks, if interleaved
    is_slow = is_much_slower(report.stages[number], profiled_s)
    return slow_stage_sentence(report, number, profiled_s) if is_slow else None


def is_much_slower(stage: StageReport, profiled_s: float) -> bool:
    """Whether a stage computes a good deal longer than was profiled, in seconds per minibatch."""
    return 0 < profiled_s * _MUCH_SLOWER < stage.busy_s


def slow_stage_sentence(report: Report, number: int, profiled_s: float) -> str:
    """Say how much longer a stage computes than was profiled, and what to look for."""
    times = f"{format_seconds(report.stages[number].busy_s)} for {format_seconds(profiled_s)} profiled"
    what = f"stage {number} computes {times}"
    if report.cores is None:
        why = "was the GPU busy with something else, or is it another one than was profiled?"
    else:
        why = (
            "were the cores busy with something else, or had workers fewer threads than the profile "
            "(--threads, OMP_NUM_THREADS)?"
        )
    return f"{what}: {why}" + (" One epoch alone includes warming up" if report.epochs == 1 else "")
