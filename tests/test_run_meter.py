"""Where a worker's time goes: the meter, its clocks, and the most memory."""

from __future__ import annotations

import math
import os
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdtool import resident
from pdtool.artifacts.chrome_trace import TraceEvent, chrome_trace
from pdtool.run import ledger, meter
from pdtool.run.ledger import Totals
from pdtool.run.memory import Memory
from pdtool.run.meter import MOST_MARKED, Meter
from pdtool.schedule import Action

CPU = torch.device("cpu")
FORWARD, BACKWARD, UPDATE = (Action.parse(text) for text in ("1F0", "1B0", "1U0"))


class Told:
    """A clock that is told the time, and how far its device has come."""

    def __init__(self) -> None:
        self.now, self.done, self.finished = 0.0, math.inf, 0

    def mark(self) -> float:
        return self.now

    def ready(self, mark: float) -> bool:
        return mark <= self.done

    def seconds(self, mark: float) -> float:
        assert self.ready(mark), "read before the device was there"
        return mark

    def finish(self) -> None:
        self.done = math.inf
        self.finished += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(meter, "clock_of", lambda device: told)
    return told


def lane(found: Meter, name: str = "compute") -> list[tuple[str, float]]:
    """Name and length of each event."""
    return [(e.name, round(e.length_s, 4)) for e in found.events if e.track == name]


def test_what_an_action_waits_for_is_not_its_own_time(clock: Told) -> None:
    """And it is drawn in the parts that its waits cut it into."""
    found = Meter(CPU)
    with found.doing(FORWARD):
        with found.waiting():
            clock.now = 2.0
        clock.now = 5.0
    with found.doing(UPDATE):
        clock.now = 6.0
        with found.averaging():
            clock.now = 10.0
        clock.now = 10.5
    assert found.totals == Totals(forward_s=3.0, update_s=1.5, wait_s=2.0, allreduce_s=4.0)
    assert lane(found) == [("wait", 2.0), ("1F0", 3.0), ("1U0", 1.0), ("wait", 4.0), ("1U0", 0.5)]


def test_a_wait_within_a_wait_counts_once_and_one_between_actions_too(clock: Told) -> None:
    found = Meter(CPU)
    with found.waiting():
        clock.now = 1.0
        with found.waiting():
            clock.now = 3.0
        clock.now = 4.0
    assert found.totals == Totals(wait_s=4.0)
    assert lane(found) == [("wait", 4.0)]


def test_short_waits_do_not_cut_an_action(clock: Told) -> None:
    """They count all the same."""
    found = Meter(CPU)
    with found.doing(BACKWARD):
        clock.now = 1.0
        with found.waiting():
            clock.now += ledger.SHORT_S / 2
        clock.now = 2.0
    assert lane(found) == [("1B0", 2.0)]
    assert found.totals.backward_s + found.totals.wait_s == pytest.approx(2.0)
    assert found.totals.wait_s == pytest.approx(ledger.SHORT_S / 2)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("F", "forward_s"), ("B", "backward_s"), ("I", "backward_s"), ("W", "backward_s"), ("U", "update_s")],
)
def test_every_kind_of_action_is_counted(clock: Told, kind: str, field: str) -> None:
    found = Meter(CPU)
    with found.doing(Action.parse(f"0{kind}3")):
        clock.now = 1.0
    assert found.totals == Totals(**{field: 1.0})
    assert lane(found) == [(f"0{kind}3", 1.0)]


def test_validation_counts_for_nothing_and_warming_up_stays_in_the_trace(clock: Told) -> None:
    found = Meter(CPU)
    with found.doing(FORWARD):
        clock.now = 1.0
    found.message("send", "for 2F0", 0.0, 0.5, 7)
    found.sent(7)
    with found.paused():
        for _ in range(MOST_MARKED + 1):  # so many that some are read meanwhile
            with found.waiting():
                clock.now += 1.0
        found.message("send", "for 2F1", 0.0, 0.5, 7)
        found.sent(7)
    assert found.totals == Totals(forward_s=1.0, send_s=0.5, sent_bytes=7)
    assert (lane(found), lane(found, "send")) == ([("1F0", 1.0)], [("for 2F0", 0.5)])
    found.restart()
    assert found.totals == Totals()
    assert lane(found) == [("1F0", 1.0)]


def test_marks_are_read_when_the_device_has_come_so_far_and_never_waited_for(clock: Told) -> None:
    """While training nothing but `settle` waits for the device, however long it takes; then nothing is lost."""
    found = Meter(CPU)
    clock.done = 100.0
    for _ in range(3 * MOST_MARKED):
        with found.doing(FORWARD):
            clock.now += 1.0
    assert clock.finished == 0
    clock.done = clock.now
    with found.doing(FORWARD):
        clock.now += 1.0
    assert len(found._marked) == 1, "what can be read is not kept"
    assert clock.finished == 0
    found.settle()
    assert clock.finished == 1
    assert found.totals.forward_s == 3 * MOST_MARKED + 1
    assert len(found.events) == 3 * MOST_MARKED + 1


def test_a_long_run_keeps_its_first_events_and_all_sums(clock: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_EVENTS", 5)
    found = Meter(CPU)
    for _ in range(2 * MOST_MARKED):
        with found.doing(FORWARD):
            clock.now += 1.0
        found.message("receive", "for 1F0", 0.0, 1.0, 1)
    assert (len(lane(found)), len(lane(found, "receive"))) == (5, 5)
    assert found.totals.forward_s == 2 * MOST_MARKED


def test_an_action_costs_microseconds() -> None:
    """A tenth of what the issue allows (tens of microseconds), on a machine that may be busy."""
    found = Meter(CPU)

    def cost() -> float:
        start = time.perf_counter()
        for _ in range(1000):
            with found.doing(FORWARD), found.waiting():
                pass
        return (time.perf_counter() - start) / 1000

    assert min(cost() for _ in range(10)) < 10e-6


def test_profilers_see_actions_as_ranges() -> None:
    """Only while one looks."""
    found = Meter(CPU)
    with found.doing(FORWARD):
        torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for action in (BACKWARD, UPDATE):
            with found.doing(action):
                torch.ones(3)
    with found.doing(FORWARD):
        torch.ones(3)
    names = [event.name for event in seen.events() if event.name.startswith("stage")]
    assert names == ["stage 1 backward 0", "stage 1 update 0"]


def test_events_of_a_lane_that_overlap_stand_in_rows_of_their_own() -> None:
    events = [
        TraceEvent("receive", "for 0B0", "receive", 7.0, 2.0, 5),
        TraceEvent("receive", "for 0B1", "receive", 8.0, 2.0),
        TraceEvent("receive", "for 0B2", "receive", 9.0, 1.0),
        TraceEvent("compute", "0F0", "forward", 7.5, 1.0),
    ]
    made = chrome_trace({"rank 0": events})["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in made if e["name"] == "thread_name"}
    assert names == {0: "compute", 3000: "receive", 3001: "receive 2"}
    found = {(e["name"], e["tid"], e["ts"], e["dur"]) for e in made if e["ph"] == "X"}
    assert found == {
        ("for 0B0", 3000, 0.0, 2e6),
        ("for 0B1", 3001, 1e6, 2e6),
        ("for 0B2", 3000, 2e6, 1e6),
        ("0F0", 0, 5e5, 1e6),
    }
    assert [e["args"] for e in made if e["name"] == "for 0B0"] == [{"bytes": 5}]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_peak_of_memory_is_that_since_the_last_restart() -> None:
    """Also of what is free again when it is asked; of what was held before, only the stages count."""
    held, stage = torch.ones(10_000_000), torch.nn.Linear(10_000, 2_000)
    found = Memory(CPU)
    assert found.peak_bytes is None
    found.start([stage])
    torch.ones(60_000_000)
    assert found.peak_bytes == pytest.approx(320e6, rel=0.05)
    resident.trim()  # whatever glibc keeps
    found.restart()
    torch.ones(20_000_000)
    assert found.peak_bytes == pytest.approx(160e6, rel=0.05)  # the kernel counts in batches of pages
    assert held.sum() > 0


def test_freed_memory_is_kept_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of mallopt(3) that are set."""
    for name in list(os.environ):
        if name.startswith(("MALLOC_", "GLIBC_TUNABLES")):
            monkeypatch.delenv(name)
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: asked.append(option))
    monkeypatch.setattr(resident.ctypes, "CDLL", lambda _: library)
    resident.keep()
    assert dict(asked) == {-1: 2**31 - 1, -2: 2**24, -4: 0}
    asked.clear()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    resident.keep()
    assert asked == [(-3, 1_000_000)]
    asked.clear()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    resident.keep()
    assert asked == []


@pytest.mark.parametrize("text", ["", "VmHWM: 12 kB\n"])
def test_a_system_that_does_not_say_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "status").write_text(text)
    monkeypatch.setattr(resident, "_STATUS", tmp_path / ("status" if text else "gone"))
    monkeypatch.setattr(resident, "_CLEAR", tmp_path / "none" / "clear_refs")
    found = Memory(CPU)
    found.start([])
    assert found.peak_bytes is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_an_action_is_as_long_as_its_kernels() -> None:
    """And the worker goes on long before they are done; a wait is what the device waited."""
    device = torch.device("cuda")
    cycles = 200_000_000  # about a tenth of a second
    found = Meter(device)
    torch.cuda._sleep(1000)
    found.restart()
    found.memory.start([])
    start = time.perf_counter()
    for action in (FORWARD, BACKWARD):
        with found.doing(action):
            torch.cuda._sleep(cycles)
    with found.doing(UPDATE), found.averaging():
        pass  # the kernels are still at work
    started = time.perf_counter() - start
    found.settle()
    whole = time.perf_counter() - start
    totals = found.totals
    assert started < whole / 10
    assert totals.forward_s == pytest.approx(totals.backward_s, rel=0.2)
    assert totals.forward_s + totals.backward_s == pytest.approx(whole, rel=0.2)
    assert totals.update_s + totals.allreduce_s < whole / 20
    spans = [(e.start_s, e.start_s + e.length_s) for e in found.events]
    assert all(end <= later + 1e-4 for (_, end), (later, _) in pairwise(spans))
    held = torch.ones(1_000_000, device=device)
    assert (found.memory.peak_bytes or 0) >= held.nbytes
