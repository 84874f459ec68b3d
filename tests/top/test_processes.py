"""Workers in processes of their own: what they send, how they end, and that none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pdtool import processes
from pdtool.processes import WorkerProcesses, describe_exit


def answer(pipe: Connection, size: int) -> None:
    """Send more than a pipe holds, and end."""
    pipe.send("x" * size)


def fail(pipe: Connection, code: int) -> None:
    pipe.send("failing")
    sys.exit(code)


def die_in_a_message(pipe: Connection) -> None:
    pipe.send("reporting")
    os.write(pipe.fileno(), (1000).to_bytes(4, "big") + b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_a_child(pipe: Connection, seconds: float) -> None:
    """Its child holds the pipe open."""
    if os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)
    pipe.send("done")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_each_message_is_heard_however_long_and_all_end(method: str) -> None:
    with WorkerProcesses(method) as workers:
        pids = [workers.start(rank, answer, 10**6 * rank) for rank in range(3)]
        assert sorted((rank, len(text)) for rank, text in workers.listen()) == [(0, 0), (1, 10**6), (2, 2 * 10**6)]
        assert workers.exit_codes == {0: 0, 1: 0, 2: 0}
    assert all(map(is_gone, pids))


def test_after_a_failure_the_others_have_a_moment_and_are_killed_even_if_they_are_stopped() -> None:
    begin = time.monotonic()
    with WorkerProcesses("fork") as workers:
        pids = [workers.start(0, hang), workers.start(3, fail, 4)]
        assert list(workers.listen()) == [(3, "failing")]
        assert workers.exit_codes == {3: 4}
    assert all(map(is_gone, pids))
    assert time.monotonic() - begin < 10


def test_a_failure_that_only_the_caller_sees_ends_the_wait() -> None:
    with WorkerProcesses("fork") as workers:
        pid = workers.start(0, hang)
        assert list(workers.listen(lambda: True)) == []
        assert workers.exit_codes == {}
    assert is_gone(pid)


def test_a_worker_killed_in_the_middle_of_a_message_has_ended() -> None:
    with WorkerProcesses("fork") as workers:
        workers.start(0, die_in_a_message)
        assert list(workers.listen()) == [(0, "reporting")]
        assert workers.exit_codes == {0: -signal.SIGKILL}


def test_a_worker_has_ended_even_if_a_child_of_its_own_goes_on() -> None:
    begin = time.monotonic()
    with WorkerProcesses("fork") as workers:
        workers.start(0, leave_a_child, 20.0)
        assert list(workers.listen()) == [(0, "done")]
    assert time.monotonic() - begin < 10


def test_nobody_waits_for_an_end_that_a_stopped_fork_server_does_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_END_S", 0.5)
    begin = time.monotonic()
    with WorkerProcesses("forkserver") as workers:
        workers.start(0, hang)
        worker = workers.processes[0]
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(server, signal.SIGSTOP)
    try:
        assert worker not in multiprocessing.active_children()  # Python would wait for these at its end
        assert time.monotonic() - begin < 10
    finally:
        os.kill(server, signal.SIGCONT)


def test_an_end_is_described() -> None:
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-50) == "was killed by signal 50"
    assert describe_exit(3) == "ended with exit status 3"
