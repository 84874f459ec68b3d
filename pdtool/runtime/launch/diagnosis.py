"""Say which worker failed first, and why, from the records that the workers left.

A worker that loses its peer says whom it lost. A worker that was killed, or that hangs, says nothing. So the root cause
is, in this order:

1. a worker's own error,
2. the fork server, if it has ended; else a worker that a signal killed, or that ended silently;
   that includes one whose connections were closed: on another machine, or before we saw its end here,
3. a worker that others waited for until their timeout: one that was stopped; else the one that has computed longest
   without waiting for anybody; else, if all wait for each other, the one that the first to give up waited for. That one
   may not be to blame: over a slow link a message takes long.

NCCL does not report a lost peer: at the timeout its watchdog aborts the process. So a worker that ended by SIGABRT
comes last in 2. If it had not moved for long before, it counts in 3 as one that waited.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from copy import copy

import torch

from pdtool import host
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import PdtoolError, WorkerDiedError
from pdtool.files import quoted, write_atomically
from pdtool.runtime.config import RunConfig
from pdtool.runtime.out_of_memory import killed_for_memory_error
from pdtool.runtime.ranks import RankAssignment, assign_ranks
from pdtool.runtime.status import ANY_PEER, LastStatus, WorkerFailure, read_failure, read_status
from pdtool.runtime.worker_end import describe_end
from pdtool.units import format_seconds

_LOST_FORK_SERVER = 255  # multiprocessing's exit code for a process whose fork server has ended
_BY_WATCHDOG = -signal.SIGABRT  # how NCCL's watchdog ends a process


def diagnose(
    config: RunConfig, local: Sequence[RankAssignment], exit_codes: Mapping[int, int], paused_s: float = 0.0
) -> PdtoolError:
    """Return the error of the root cause, and write all failures to the run's folder.

    Args:
        local: the workers that this machine started.
        exit_codes: exit codes of this machine's ranks that ended without a report; negative for a signal.
        paused_s: how long the launcher was stopped.
    """
    workers = WorkersLeft(config, local, exit_codes, paused_s)
    error = workers.own_error() or workers.silent_death() or workers.no_answer()
    remedies = [error.remedy] if error.remedy else []
    has_died = isinstance(error, WorkerDiedError)
    if has_died or type(error) is PdtoolError:  # such as a full disk, or a loss that is no number
        remedies += _how_to_go_on(config, is_needed=has_died and not remedies)
    if workers.write_story(error):
        remedies.append(f"see {RunDir(config.out).failure_file} for what each worker did")
    error.remedy = "; ".join(remedies)
    return error


class WorkersLeft:
    """The records of a failed run's workers; arguments as of `diagnose`."""

    def __init__(
        self, config: RunConfig, local: Sequence[RankAssignment], exit_codes: Mapping[int, int], paused_s: float
    ) -> None:
        self._config, self._exit_codes, self._paused_s = config, exit_codes, paused_s
        self._local = {assignment.rank for assignment in local}
        self._assignments = {assignment.rank: assignment for assignment in assign_ranks(config.plan)}
        failures = ((rank, read_failure(config.out, rank)) for rank in self._assignments)
        self._failures = {rank: failure for rank, failure in failures if failure}
        self._statuses = {rank: read_status(config.out, rank) for rank in self._assignments}

    def own_error(self) -> PdtoolError | None:
        """Return the first error that no other worker caused."""
        own = [rank for rank, failure in self._failures.items() if failure.peer is None]
        if not own:
            return None
        rank = min(own, key=lambda rank: self._failures[rank].at_s)
        error = copy(self._failures[rank].error)
        error.what = f"{self._assignments[rank]}, at {self._statuses[rank].text}: {error.what}"
        return error

    def silent_death(self) -> PdtoolError | None:
        """Return the error of a worker that ended and left no failure."""
        explained = self._failures.keys() | self._hung_until_aborted()
        ended = [rank for rank in (*self._exit_codes, *self._lost()) if rank not in explained]
        if not ended:
            return None
        silent = sorted(ended, key=self._is_aborted)
        rank, place = silent[0], self._assignments[silent[0]]
        code = self._exit_codes.get(rank)
        if {*self._exit_codes.values()} == {_LOST_FORK_SERVER}:
            return WorkerDiedError("the fork server, which starts all workers, has ended")
        what = f"{place} {describe_end(code)}; {self._last_seen(rank)}"
        guess = self._memory_guess(rank, code) if rank in self._local else ""
        if guess:
            return killed_for_memory_error(f"{what}; {guess}", self._config.plan, place)
        if self._uses_cuda and self._is_aborted(rank):
            what += (
                "; NCCL's watchdog ends a worker if another worker is lost, perhaps on another machine, or if its GPU "
                "reports an error, which is printed above"
            )
        is_exit = code is not None and code >= 0
        return WorkerDiedError(what, "if the model file calls os._exit, raise an error instead" if is_exit else "")

    def no_answer(self) -> PdtoolError:
        """Return the error of a worker that others waited for in vain."""
        rank, first = self._hung_rank(), self._first_failure
        place, last_seen = self._assignments[rank], self._last_seen(rank)
        is_stopped = first is not None and rank in first.stopped
        has_timed_out = first is not None and (first.is_timeout or is_stopped)  # others may see the end of one that did
        if not self._hung_until_aborted() and not has_timed_out:
            return WorkerDiedError(f"{place} closed its connections; {last_seen}")
        timeout = format_seconds(self._config.timeout_s)
        if self._paused_s >= self._config.timeout_s:  # nobody is to blame: all were stopped, and then gave up
            paused = f"the run was stopped for {format_seconds(self._paused_s)} and then continued"
            what = f"{paused} (Ctrl-Z, a paused container, a suspended job), longer than its timeout of {timeout}"
            return WorkerDiedError(what, "to pause a run for that long, pass a longer --timeout")
        if not is_stopped and all(status.is_waiting for status in self._statuses.values()):
            what = f"no message from {place} arrived within {timeout}, and all workers waited for messages"
            return WorkerDiedError(
                f"{what}: a message is lost or still on its way; {last_seen}",
                "check whether the links are too slow for these messages, or pass a longer --timeout",
            )
        what = f"{place} {'is stopped (SIGSTOP)' if is_stopped else f'did not answer for {timeout}'}; {last_seen}"
        return WorkerDiedError(what, "if it is only slow, pass a longer --timeout")

    def write_story(self, error: PdtoolError) -> bool:
        """Write how every worker ended to the run's folder; return whether that worked."""
        stories = [self._story(rank) for rank in self._assignments]
        try:
            text = "\n\n".join([str(error), *stories]) + "\n"
            write_atomically(RunDir(self._config.out).failure_file, text.encode(errors="backslashreplace").decode())
        except (OSError, PdtoolError):
            return False
        return True

    @property
    def _first_failure(self) -> WorkerFailure | None:
        return min(self._failures.values(), key=lambda failure: failure.at_s, default=None)

    def _lost(self) -> list[int]:
        """The ranks that had ended when the first worker failed: it saw their end, or they closed its connection."""
        first = self._first_failure
        if first is None or first.is_timeout:
            return []
        return [rank for rank in (*first.gone, first.peer) if rank in self._assignments]

    def _is_aborted(self, rank: int) -> bool:
        return self._exit_codes.get(rank) == _BY_WATCHDOG

    @property
    def _uses_cuda(self) -> bool:
        device = self._config.device
        return device == "cuda" or (device == "auto" and torch.cuda.is_available())

    def _hung_until_aborted(self) -> set[int]:
        """The ranks that NCCL's watchdog killed after they had not moved for half of the timeout.

        The watchdog counts from when an operation was issued, and the host may have gone on a little after that.
        """
        if not self._uses_cuda:
            return set()
        last_s = time.time() - self._config.timeout_s / 2
        return {rank for rank in self._assignments if self._is_aborted(rank) and self._statuses[rank].since_s <= last_s}

    def _hung_rank(self) -> int:
        """See point 3 above."""
        by_age = sorted(self._assignments, key=lambda rank: self._statuses[rank].since_s)
        aborted = self._hung_until_aborted()
        unheard = [rank for rank in self._assignments if rank not in self._failures and rank not in aborted]
        by_silence = [rank for rank in by_age if rank in unheard and not self._statuses[rank].is_waiting]
        by_time = sorted(self._failures.values(), key=lambda failure: failure.at_s)
        waited_for = [failure.peer for failure in by_time if failure.peer in self._assignments]
        stopped = by_time[0].stopped if by_time else []
        return [*stopped, *by_silence, *waited_for, *unheard, *by_age][0]

    def _last_seen(self, rank: int) -> str:
        status = self._statuses[rank]
        if not status.pid:
            return "it left no record here"
        waiting = f", where it waited for {_peer(status.waits_for)}" if status.is_waiting else ""
        return f"it was last at {status.text}{waiting}"

    def _memory_guess(self, rank: int, code: int | None) -> str:
        """Why a worker of this machine may have run out of memory; "" if nothing suggests it.

        Args:
            code: its exit code; None: unknown.
        """
        kills, before = host.oom_kills(), self._statuses[rank].oom_kills
        if code not in (None, -signal.SIGKILL) or (kills is not None and kills <= before):
            return ""
        if kills is None:
            return "the kernel does this when memory runs out" if code else ""
        return f"most likely memory ran out: the kernel has killed {kills - before} process(es) since the run began"

    def _story(self, rank: int) -> str:
        status, failure = self._statuses[rank], self._failures.get(rank)
        lines = [f"{self._assignments[rank]}: last at {status.text}{_state(status)}"]
        if rank in self._exit_codes:
            lines.append(f"  its launcher saw it end with {self._exit_codes[rank]}")
        if failure:
            lines.append(f"  it said: {failure.error.what}")
            lines += [f"  {line}" for line in failure.traceback.splitlines()]
        return "\n".join(lines)


def _how_to_go_on(config: RunConfig, *, is_needed: bool) -> list[str]:
    """The remedy after training has ended early; [] if it would only be to start again and not `is_needed`."""
    done = RunDir(config.out).checkpoints()
    if done and max(done) >= config.epochs:
        return [f"all epochs were trained: `pdtool export {quoted(config.out)}` writes the weights"]
    if done:
        return [f"continue from the last checkpoint with `{RunDir(config.out).resume_command(config.machines)}`"]
    return ["start it again"] if is_needed else []


def _state(status: LastStatus) -> str:
    if not status.pid:
        return ", it has not started"
    doing = f"waiting for {_peer(status.waits_for)}" if status.is_waiting else "computing"
    return f", process {status.pid}, {doing} for the last {format_seconds(max(0.0, time.time() - status.since_s))}"


def _peer(rank: int) -> str:
    return "other workers" if rank == ANY_PEER else f"rank {rank}"
