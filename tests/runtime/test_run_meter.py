"""Where a worker's time goes: the meter, its clocks, and the most memory."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdtool import host
from pdtool.artifacts.chrome_trace import MESSAGE_TRACKS, TraceEvent, chrome_trace
from pdtool.runtime import memory, meter
from pdtool.runtime import meter as timings
from pdtool.runtime.memory import PeakMemory
from pdtool.runtime.meter import MAX_UNREAD, TimeTotals, WorkerMeter
from pdtool.runtime.status import Status
from pdtool.schedule import Action

CPU = torch.device("cpu")
FORWARD, BACKWARD, UPDATE = (Action.parse(text) for text in ("1F0", "1B0", "1U0"))


class Told:
    """A clock that is told the time, and how far its device has come."""

    def __init__(self) -> None:
        self.now, self.done, self.waited = 0.0, math.inf, 0

    def record(self) -> float:
        return self.now

    def is_ready(self, timestamp: float) -> bool:
        return timestamp <= self.done

    def seconds(self, timestamp: float) -> float:
        assert self.is_ready(timestamp), "read before the device was there"
        return timestamp

    def synchronize(self) -> None:
        self.done = math.inf
        self.waited += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(meter, "timestamps_of", lambda device: told)
    monkeypatch.setattr(meter, "perf_counter", told.record)
    return told


def lane(found: WorkerMeter, name: str = "compute") -> list[tuple[str, float]]:
    """Name and length of each event."""
    return [(e.name, round(e.length_s, 4)) for e in found.events if e.track == name]


def test_what_an_action_waits_for_is_not_its_own_time(clock: Told) -> None:
    """And it is drawn in the parts that its waits cut it into."""
    found = WorkerMeter(CPU)
    with found.action(FORWARD):
        with found.waiting:
            clock.now = 2.0
        clock.now = 5.0
    with found.action(UPDATE):
        clock.now = 6.0
        with found.averaging:
            clock.now = 10.0
        clock.now = 10.5
    assert found.totals == TimeTotals(forward_s=3.0, update_s=1.5, wait_s=2.0, allreduce_s=4.0)
    assert lane(found) == [("wait", 2.0), ("1F0", 3.0), ("1U0", 1.0), ("wait", 4.0), ("1U0", 0.5)]


def test_loading_is_neither_computation_nor_a_wait_for_a_worker(clock: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an action or between two, as where a minibatch is loaded ahead; nobody else is to blame for it."""
    monkeypatch.setattr(Status.of_this_process, "wait_begins", lambda: pytest.fail("the status names a worker"))
    found = WorkerMeter(CPU)
    with found.action(FORWARD):
        clock.now = 1.0
        with found.loading:
            clock.now = 4.0
        clock.now = 6.0
    with found.loading:
        clock.now = 6.5
    assert found.totals == TimeTotals(forward_s=3.0, data_s=3.5)
    assert lane(found) == [("1F0", 1.0), ("data", 3.0), ("1F0", 2.0), ("data", 0.5)]


def test_a_wait_within_a_wait_counts_once_and_one_between_actions_too(clock: Told) -> None:
    found = WorkerMeter(CPU)
    with found.waiting:
        clock.now = 1.0
        with found.waiting:
            clock.now = 3.0
        clock.now = 4.0
    assert found.totals == TimeTotals(wait_s=4.0)
    assert lane(found) == [("wait", 4.0)]


def test_short_waits_do_not_cut_an_action(clock: Told) -> None:
    """They count all the same."""
    found = WorkerMeter(CPU)
    with found.action(BACKWARD):
        clock.now = 1.0
        with found.waiting:
            clock.now += timings.MIN_DRAWN_S / 2
        clock.now = 2.0
    assert lane(found) == [("1B0", 2.0)]
    assert found.totals.backward_s + found.totals.wait_s == pytest.approx(2.0)
    assert found.totals.wait_s == pytest.approx(timings.MIN_DRAWN_S / 2)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("F", "forward_s"), ("B", "backward_s"), ("I", "backward_s"), ("W", "backward_s"), ("U", "update_s")],
)
def test_every_kind_of_action_is_counted(clock: Told, kind: str, field: str) -> None:
    found = WorkerMeter(CPU)
    with found.action(Action.parse(f"0{kind}3")):
        clock.now = 1.0
    assert found.totals == TimeTotals(**{field: 1.0})
    assert lane(found) == [(f"0{kind}3", 1.0)]


def test_times_of_the_host_are_no_part_of_those_of_a_gpu(clock: Told) -> None:
    for device, send_s in ((CPU, 1.0), (torch.device("cuda"), 0.0)):
        found = WorkerMeter(device)
        found.message_sent("2F", 0, clock.now - 1.0, 8)
        assert (found.totals.send_s, found.totals.sent_bytes) == (send_s, 8)
    made = chrome_trace({"rank 0": found.events}, host_tracks=MESSAGE_TRACKS)["traceEvents"]
    assert [e["args"]["name"] for e in made if e["name"] == "thread_name"] == ["send (host)"]


def test_the_pace_is_that_of_the_device(clock: Told) -> None:
    """From the first loss in steady state to the last, which the host launches long before."""
    found = WorkerMeter(CPU)
    for epoch_s in (8.0, 16.0):
        found.epoch_begins(range(1, 6))
        for minibatch in (0, 1, 2, 5, 6):
            clock.now = epoch_s * minibatch / 16.0
            found.loss_computed(minibatch)
        found.epoch_ended(7, 56, epoch_s)
    assert (found.epochs.minibatches, found.epochs.samples, found.epochs.train_s) == (14, 112, 24.0)
    assert (found.epochs.intervals, found.epochs.time_per_minibatch_s) == (8, 0.75)
    found.epoch_begins(range(0))
    found.loss_computed(0)
    found.epoch_ended(1, 8, 1.0)
    assert found.epochs.intervals == 8
    found.restart()
    assert found.epochs.time_per_minibatch_s == 0.0


def test_validation_counts_for_nothing_and_warming_up_stays_in_the_trace(clock: Told) -> None:
    found = WorkerMeter(CPU)
    with found.action(FORWARD):
        clock.now = 1.0
    found.message_sent("2F", 0, 0.5, 7)
    with found.paused():
        for _ in range(MAX_UNREAD + 1):  # so many that some are read meanwhile
            with found.waiting:
                clock.now += 1.0
        found.message_sent("2F", 1, 0.5, 7)
    assert found.totals == TimeTotals(forward_s=1.0, send_s=0.5, sent_bytes=7)
    assert (lane(found), lane(found, "send")) == ([("1F0", 1.0)], [("for 2F0", 0.5)])
    found.restart()
    assert found.totals == TimeTotals()
    assert lane(found) == [("1F0", 1.0)]


def test_marks_are_read_when_the_device_has_come_so_far_and_never_waited_for(clock: Told) -> None:
    """While training nothing but `synchronize` waits for the device, however long it takes; then nothing is lost."""
    found = WorkerMeter(CPU)
    clock.done = 100.0
    for _ in range(3 * MAX_UNREAD):
        with found.action(FORWARD):
            clock.now += 1.0
    assert clock.waited == 0
    clock.done = clock.now
    with found.action(FORWARD):
        clock.now += 1.0
    assert len(found._unread) == 1, "what can be read is not kept"
    assert clock.waited == 0
    found.synchronize()
    assert clock.waited == 1
    assert found.totals.forward_s == 3 * MAX_UNREAD + 1
    assert len(found.events) == 3 * MAX_UNREAD + 1


def test_a_long_run_keeps_its_first_events_and_all_sums(clock: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "MAX_EVENTS", 5)
    found = WorkerMeter(CPU)
    for _ in range(2 * MAX_UNREAD):
        with found.action(FORWARD):
            clock.now += 1.0
        found.message_received("1F", 0, 0.0, [])
    assert (len(lane(found)), len(lane(found, "receive"))) == (5, 5)
    assert found.totals.forward_s == 2 * MAX_UNREAD


def test_an_action_costs_few_calls() -> None:
    """A microsecond or two; calls are counted, because a busy machine takes longer for them."""
    found, calls = WorkerMeter(CPU), Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        for _ in range(100):
            with found.action(FORWARD), found.waiting:
                pass
    finally:
        sys.setprofile(None)
    assert 100 <= calls["call"] <= 1_500, calls
    assert calls["c_call"] <= 2_000, calls


def test_profilers_see_actions_as_ranges() -> None:
    """Only while one looks."""
    found = WorkerMeter(CPU)
    with found.action(FORWARD):
        torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for action in (BACKWARD, UPDATE):
            with found.action(action):
                torch.ones(3)
    with found.action(FORWARD):
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
    found = PeakMemory(CPU)
    assert found.peak_bytes is None
    found.start([stage])
    torch.ones(60_000_000)
    assert found.peak_bytes == pytest.approx(320e6, rel=0.05)
    host.trim_heap()  # whatever glibc keeps
    found.restart()
    torch.ones(20_000_000)
    assert found.peak_bytes == pytest.approx(160e6, rel=0.05)  # the kernel counts in batches of pages
    assert held.sum() > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("mapped_later", [False, True])
def test_pages_of_files_that_the_system_takes_back_do_not_count(tmp_path: Path, mapped_later: bool) -> None:
    """It does so when memory is short: a run then seemed to need as much more as libraries had been resident."""

    def touched() -> mmap.mmap:
        with path.open("rb") as opened:
            file = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        assert sum(file[i] for i in range(0, len(file), mmap.PAGESIZE)) == 0
        return file

    path = tmp_path / "library"
    path.write_bytes(bytes(80_000_000))
    file = None if mapped_later else touched()
    found = PeakMemory(CPU)
    found.start([])
    file = file or touched()
    torch.ones(30_000_000)
    found.epoch_ended()
    file.close()
    assert found.peak_bytes == pytest.approx(120e6, rel=0.1)
    host.trim_heap()


def test_freed_memory_is_kept_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc reads the options of mallopt(3) itself."""
    for name in list(os.environ):
        if name.startswith(("MALLOC_", "GLIBC_TUNABLES")):
            monkeypatch.delenv(name)
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: asked.append(option))
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: library)
    host.keep_freed_memory()
    assert dict(asked) == {-1: -1, -2: 2**24, -4: 0, 1: 0}
    for name, value in (("MALLOC_MMAP_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")):
        asked.clear()
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            host.keep_freed_memory()
        assert asked == []


@pytest.mark.parametrize(("stages", "chosen"), [([], "keep"), ([1], "keep"), ([0], "return"), ([0, 1], "return")])
def test_freed_memory_is_kept_only_where_the_plan_leaves_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stages: list[int], chosen: str
) -> None:
    done: list[str] = []
    monkeypatch.setattr(host, "keep_freed_memory", lambda: done.append("keep"))
    monkeypatch.setattr(host, "return_freed_memory", lambda: done.append("return"))
    monkeypatch.setattr(memory, "assign_ranks", lambda _: [SimpleNamespace(stage=0), SimpleNamespace(stage=1)])
    cluster = SimpleNamespace(memory_bytes=100)
    plan = SimpleNamespace(cluster=cluster, memory_needed=[90, 80], stages_with_little_room=stages)
    memory.choose_heap(SimpleNamespace(plan=plan), 0)  # type: ignore[arg-type]
    assert done == [chosen]
    assert ("returns freed memory at once, which is slower" in capsys.readouterr().err) == (chosen == "return")


FREEING = """
import sys
import torch
from pdtool import host
from pdtool.runtime import memory

memory._LOOK_S = 0.0  # these actions are shorter
host.keep_freed_memory()
found, said, kept_mb = memory.PeakMemory(torch.device("cpu")), 0, 0.0
found.start([])
found.limit_bytes = int(sys.argv[1]) or None
before = host.heap_bytes()
for _ in range(3):
    freed = [torch.ones(2_500_000) for _ in range(30)]
    del freed
    said += bool(found.stay_within_limit())
    kept_mb = max(kept_mb, (host.heap_bytes() - before) / 1e6)
print(said, kept_mb)
"""


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(("limit", "is_kept"), [("0", True), ("1000000000", True), ("100000000", False)])
def test_freed_memory_is_kept_unless_that_comes_near_the_plans_limit(limit: str, is_kept: bool) -> None:
    """300 MB are freed after each action."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", FREEING, limit]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    said, kept_mb = map(float, done.stdout.split())
    assert said == (not is_kept), "it says so once"
    assert kept_mb > 200 if is_kept else kept_mb < 50


@pytest.mark.parametrize("text", ["", "VmHWM: 12 kB\n"])
def test_a_system_that_does_not_say_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "status").write_text(text)
    monkeypatch.setattr(host, "_STATUS", tmp_path / ("status" if text else "gone"))
    monkeypatch.setattr(host, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    found = PeakMemory(CPU)
    found.start([])
    assert found.peak_bytes is None


@pytest.mark.parametrize(
    ("given", "is_supported", "expected"),
    [
        (None, True, ["expandable_segments:True"]),
        (None, False, ["expandable_segments:True", "expandable_segments:False"]),
        ("max_split_size_mb:512", True, ["max_split_size_mb:512,expandable_segments:True"]),
        ("expandable_segments:False", True, []),
        ("backend:cudaMallocAsync", True, []),
    ],
)
def test_segments_of_gpu_memory_grow_unless_the_user_or_the_driver_decides_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, is_supported: bool, expected: list[str]
) -> None:
    found: list[str] = []

    def allocated(*sizes: int, **kwargs: object) -> None:
        if not is_supported:
            raise RuntimeError("CUDA driver error: operation not supported")

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(torch, "empty", allocated)
    for name in ("device", "stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    memory.expand_segments(CPU)
    assert found == []
    memory.expand_segments(torch.device("cuda", 0))
    assert found == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_is_asked_whether_segments_can_grow_although_memory_is_free() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1 << 22, dtype=torch.uint8, device=device)  # freed at once
    memory.expand_segments(device)
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_an_action_is_as_long_as_its_kernels() -> None:
    """And the worker goes on long before they are done; a wait is what the device waited."""
    device = torch.device("cuda")
    cycles = 200_000_000  # about a tenth of a second
    found = WorkerMeter(device)
    torch.cuda._sleep(1000)
    found.restart()
    found.memory.start([])
    start = time.perf_counter()
    for action in (FORWARD, BACKWARD):
        with found.action(action):
            torch.cuda._sleep(cycles)
    with found.action(UPDATE), found.averaging:
        pass  # the kernels are still at work
    started = time.perf_counter() - start
    found.synchronize()
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
    assert (found.memory.peak_reserved_bytes or 0) >= held.nbytes
