"""Say which worker failed first, and why, from what the workers left behind."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from pdtool.errors import PdtoolError, ScheduleError, UsageError, WorkerDiedError
from pdtool.run import checkpoint
from pdtool.run.config import RankAssignment, RunConfig, assign_ranks
from pdtool.run.processes.status import OWN_ERROR, read_failure, read_status

# An error crosses the process border as its text and exit code.
_ERRORS = {1: PdtoolError, 2: UsageError, 3: ScheduleError}


def diagnose(config: RunConfig, local: Sequence[RankAssignment], exit_codes: Mapping[int, int]) -> PdtoolError:
    """Return the error to raise: the failure that the others follow from.

    A worker that loses its peer says whom it lost; following these leads to one that failed by itself, or that said
    nothing because it was killed.

    Args:
        local: the workers that this machine started.
        exit_codes: of the ranks that torch elastic saw fail, negative for a signal.
    """
    assignments = {assignment.rank: assignment for assignment in assign_ranks(config.plan)}
    failures = {rank: failure for rank in assignments if (failure := read_failure(config.out, rank))}
    for rank, failure in failures.items():
        if failure.peer == OWN_ERROR:
            kind = _ERRORS.get(failure.exit_code, WorkerDiedError)
            return kind(f"{assignments[rank]}, at {read_status(config.out, rank)}: {failure.what}", failure.remedy)
    silent = [rank for rank in exit_codes if rank not in failures]
    pointing = [rank for rank, failure in failures.items() if failure.peer in assignments]
    unheard = [assignment.rank for assignment in local if assignment.rank not in failures]
    rank = [*silent, *pointing, *unheard, *exit_codes][0]
    followed = {rank}
    while rank in failures and (peer := failures[rank].peer) in assignments and peer not in followed:
        followed.add(rank := peer)
    messages = "; ".join(f"{assignments[r]}: {failure.what}" for r, failure in failures.items())
    code = exit_codes.get(rank, 0)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "died"
    if rank not in exit_codes and "Timed out" in messages:
        how = "did not answer"
    has_checkpoint = bool(checkpoint.complete_checkpoints(config.out))
    return WorkerDiedError(
        f"{assignments[rank]} {how}; it was last at {read_status(config.out, rank)}"
        + (f". {messages}" if messages else ""),
        "go on from the last checkpoint with --resume" if has_checkpoint else "start it again",
    )
