"""Kill, stop and interrupt processes of a run at random moments."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from chaos.bench import WORKERS, Bench, Command, Outcome, kill
from pdtool.artifacts.run_dir import RunDir
from pdtool.runtime.status import read_status

_RESUME_EACH = 5  # trials; the others are compared with the undisturbed run only
_STARTS_WITHIN_S = 20.0
_SIGNALS = {
    "worker": (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV),
    "command": (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    "fork server": (signal.SIGKILL,),
}


def kills(bench: Bench, trials: int, seed: int) -> Iterator[Outcome]:
    """Yield the outcome of each trial: most hit a worker, some the command itself or its fork server."""
    draw = random.Random(seed)
    for trial in range(trials):
        target = draw.choice(["worker"] * 5 + ["command"] * 3 + ["fork server"])
        number = draw.choice(_SIGNALS[target])
        delay_s = draw.choice((draw.uniform(0, 2.5), draw.uniform(0, 0.3)))
        # The others are hit while they start. Python starts another fork server before there are workers.
        is_training = draw.random() < 0.8 or target == "fork server"
        rank = draw.randrange(WORKERS)
        yield _kill(bench, trial, target, rank, number, delay_s, is_training)


def _kill(
    bench: Bench, trial: int, target: str, rank: int, number: signal.Signals, delay_s: float, is_training: bool
) -> Outcome:
    who = f"rank {rank}" if target == "worker" else f"the {target}"
    moment = "while it trains" if is_training else "as it starts"
    outcome, out = Outcome(f"{number.name} to {who} {moment}"), f"runs/kill-{trial}"
    folder = bench.folder / out
    command = bench.start(*bench.run(out, 1000))
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while not _is_there(command, folder, target, rank, is_training) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(delay_s)
    pid = _pid(command, folder, target, rank)
    before = RunDir(folder).checkpoints()
    if pid is None:
        outcome.wrong_causes.append(f"{outcome.name}: there was no such process")
        kill(command.process.pid, signal.SIGKILL)
        command.ended()
        return outcome
    kill(pid, number)
    codes, words = _expected(target, rank, number)
    outcome.add(command.ended(), codes, words if is_training or target != "command" else "")
    outcome.losses += bench.losses(out, outcome.name, before)
    if trial % _RESUME_EACH == 0 and RunDir(folder).checkpoints():
        epochs = max(RunDir(folder).checkpoints()) + 2
        outcome.add(bench.start(*bench.run(out, epochs, "--resume")).ended(), [0])
        outcome.losses += bench.losses(out, f"{outcome.name}, resumed", before)
    return outcome


def _expected(target: str, rank: int, number: signal.Signals) -> tuple[list[int], str]:
    """Exit codes and words."""
    if target == "worker":
        words = r"is stopped \(SIGSTOP\)" if number == signal.SIGSTOP else f"(was killed by {number.name}|died)"
        return [5], rf"rank {rank} \(stage {rank}, replica 0\) {words}"
    if target == "fork server":
        return [5], "could not be started|the fork server, which starts all workers, has ended"
    if number == signal.SIGKILL:
        return [-signal.SIGKILL], ""
    return [-number, 128 + number], "" if number == signal.SIGQUIT else "--resume|start it again|interrupted|stopped"


def _is_there(command: Command, folder: Path, target: str, rank: int, is_training: bool) -> bool:
    if is_training:
        metrics = folder / "metrics.jsonl"
        return metrics.is_file() and metrics.stat().st_size > 0
    return _pid(command, folder, target, rank) is not None


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _pid(command: Command, folder: Path, target: str, rank: int) -> int | None:
    if target == "command":
        return command.process.pid
    if target == "fork server":
        servers = [pid for pid, text in command.processes().items() if "forkserver" in text]  # and their workers
        return next((pid for pid in servers if _parent(pid) == command.process.pid), None)
    return read_status(folder, rank).pid or None
