"""The simulator: formulas of the literature to the last digit, and laws that any simulation obeys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtool.artifacts.cluster import Cluster, make_cluster
from pdtool.errors import ScheduleError
from pdtool.planner.formulas import StageMemory
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob, StageWork
from pdtool.planner.simulator.network import EventQueue, Flow, Network
from pdtool.planner.simulator.result import SimulationResult
from pdtool.planner.stage_costs import StageEdge
from pdtool.schedule import SCHEDULES, Action, ActionKind, ExecutionConfig
from pdtool.schedule.execution import timeline


def seconds(forward=1.0, inputs=1.0, weights=1.0, update=0.0, chunks=1):
    """Durations of one of `chunks` equal parts of a stage."""
    whole = (forward, inputs + weights, inputs, weights, update)
    return {kind: time / chunks for kind, time in zip(ActionKind, whole, strict=True)}


def straight(name, p, m, *, n=None, chunks=1, times=None, latency=0.0, size=0, bandwidth=1e9):
    """p workers in a row; `m` microbatches in one update of a flushing schedule, `n` minibatches."""
    shape = ExecutionConfig.of_schedule(name, m, chunks).shape((1,) * p)
    stages = p * chunks
    return SimulationJob(
        shape=shape,
        lists=SCHEDULES[name].build(shape, n or m),
        workers=range(p),
        cluster=make_cluster((p,), (bandwidth,), latencies=[latency]),
        stages=[StageWork(seconds=times or seconds(chunks=chunks))] * stages,
        edges=[
            StageEdge(source=s, destination=s + 1, forward_bytes=size, backward_bytes=size) for s in range(stages - 1)
        ],
    )


# --- the table of FACTS.md: F = I = W = 1, so B = 2 -------------------------------------------------------------------


def idle(found: SimulationResult):
    """Of each worker, until the last has ended."""
    return [found.makespan_s - usage.busy_s for usage in found.workers]


@pytest.mark.parametrize("p", range(2, 9))
def test_gpipe_and_1f1b_with_flush(p):
    """Idle (p-1)(F+B), everywhere; GPipe keeps m minibatches, 1F1B p - r; one version of the weights."""
    for m in range(1, 33):
        for name in ("gpipe", "1f1b-flush"):
            found = simulate(straight(name, p, m))
            assert idle(found) == [(p - 1) * 3] * p
            assert [usage.versions for usage in found.workers] == [1] * p
            kept = [m if name == "gpipe" else min(m, p - r) for r in range(p)]
            assert [usage.peak_stashed for usage in found.workers] == kept


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("name", [kind.name for kind in SCHEDULES.values() if kind.chunked])
def test_chunks(name, p, v):
    """Idle (p-1)(F+B)/v where p divides m; F + B of a chunk is 3 here. Interleaved keeps (2(p-r-1) + (v-1)p + 1)/v
    minibatches, breadth-first all."""
    for m in range(p, 33, p):
        found = simulate(straight(name, p, m, chunks=v, times=seconds()))
        assert idle(found) == [(p - 1) * (3 * v) / v] * p
        warm_up = [2 * (p - r - 1) + (v - 1) * p for r in range(p)]
        kept = [min(m * v, w + 1) if name == "interleaved" else m * v for w in warm_up]
        assert [usage.peak_stashed for usage in found.workers] == kept


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 1, 1), (3, 2, 1), (1, 3, 1), (2, 1, 2)])
def test_zb_h1(p, times):
    """Inside its own span worker r idles (p-1-r)(F+I-W), so the first (p-1)(F+I-W), wherever m >= p and W <= F; every
    worker keeps p. With W <= I as well it is the idle time of the whole: the makespan is that much over m(F+I+W)."""
    f, i, w = times
    for m in range(p, 33, 3):
        found = simulate(straight("zb-h1", p, m, times=seconds(f, i, w)))
        computing = [[event for event in events if event.track == "compute"] for events in found.events]
        spans = [events[-1].start_s + events[-1].length_s - events[0].start_s for events in computing]
        own = [span - usage.busy_s for span, usage in zip(spans, found.workers, strict=True)]
        assert own == [(p - 1 - r) * (f + i - w) for r in range(p)]
        assert [usage.peak_stashed for usage in found.workers] == [p] * p
        if w <= i:
            assert idle(found) == [(p - 1) * (f + i - w)] * p


@pytest.mark.parametrize("p", range(2, 9))
def test_pipedream_and_2bw_never_stop(p):
    """No idle time in steady state. PipeDream: p - r stashed, p - r versions, p - 1 - r updates late; 2BW: two, one."""
    for n in (4 * p, 5 * p + 1, 60):
        pipedream, bw2 = (simulate(straight(name, p, 1, n=n)) for name in ("1f1b", "2bw"))
        assert (pipedream.time_per_minibatch_s, bw2.time_per_minibatch_s) == (3, 3)
        assert [(s.peak_stashed, s.versions, s.delay) for s in pipedream.workers] == [
            (p - r, p - r, p - 1 - r) for r in range(p)
        ]
        assert [(s.versions, s.delay) for s in bw2.workers] == [(2, 1)] * p


def test_1f1b_loses_to_gpipe_when_latency_is_not_hidden():
    """F = 1, B = 2, c = 0.5: with p - r in flight stage r waits for its round trip; GPipe pays once."""
    found = {name: simulate(straight(name, 4, 32, latency=0.5)).makespan_s for name in ("1f1b-flush", "gpipe")}
    assert found == {"1f1b-flush": 131, "gpipe": 108}
    more = straight("1f1b-flush", 4, 32, latency=0.5)
    shape = replace(more.shape, in_flight=(7, 5, 3, 1))
    assert simulate(replace(more, shape=shape, lists=SCHEDULES["1f1b-flush"].build(shape, 32))).makespan_s == 108


# --- laws -------------------------------------------------------------------------------------------------------------


@st.composite
def jobs(draw, *, costly=True):
    """Any schedule on any cluster, with skips between stages; bytes, latency and averages cost time if `costly`."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    kind = SCHEDULES[name]
    chunks = draw(st.integers(1, 3)) if kind.chunked else 1
    replicas = tuple(draw(st.lists(st.integers(1, 1 if kind.equal_replicas else 3), min_size=1, max_size=4)))
    shape = ExecutionConfig.of_schedule(name, draw(st.integers(1, 6)), chunks).shape(replicas)
    sizes = draw(st.sampled_from([(sum(replicas),), (sum(replicas), 2), (2, sum(replicas))]))
    count = st.integers(0, 50) if costly else st.just(0)
    cluster = make_cluster(
        sizes, [draw(st.integers(1, 20)) for _ in sizes], latencies=[draw(count) / 16 for _ in sizes]
    )
    stages = [
        StageWork(
            seconds={kind: draw(st.integers(0, 8)) / 4 for kind in ActionKind},
            memory=StageMemory(fixed_bytes=draw(count), version_bytes=draw(count), minibatch_bytes=draw(count)),
            averaged_bytes=draw(count),
        )
        for _ in shape.replicas
    ]
    ends = [(s, s + 1) for s in range(len(stages) - 1)]
    ends += [(s, t) for s in range(len(stages)) for t in range(s + 2, len(stages)) if costly and draw(st.booleans())]
    edges = [StageEdge(source=s, destination=t, forward_bytes=draw(count), backward_bytes=draw(count)) for s, t in ends]
    workers = draw(st.permutations(range(cluster.workers)))[: sum(replicas)]
    return SimulationJob(
        shape=shape,
        lists=SCHEDULES[name].build(shape, draw(st.integers(1, 15))),
        workers=workers,
        cluster=cluster,
        stages=stages,
        edges=edges,
    )


@settings(max_examples=100)
@given(jobs(costly=False))
def test_when_nothing_is_sent_it_is_the_timeline_of_the_schedule(job):
    """Two implementations of one execution; the schedule's own knows neither links nor averages."""
    even = replace(job, stages=[StageWork(seconds=seconds())] * len(job.stages))
    found = simulate(even)
    starts = [[e.start_s for e in events if e.track == "compute" and e.kind != "wait"] for events in found.events]
    assert starts == timeline(job.lists, 1, 2)


@settings(max_examples=150)
@given(jobs())
def test_a_worker_does_one_thing_at_a_time_in_the_order_of_its_list(job):
    """Busy is the sum of its durations; busy, communicating and idle are all of the time."""
    found = simulate(job)
    for w, (actions, usage) in enumerate(zip(job.lists, found.workers, strict=True)):
        mine = [e for e in found.events[w] if e.track == "compute"]
        assert all(a.start_s + a.length_s <= b.start_s + 1e-9 for a, b in pairwise(mine))
        assert [e.name for e in mine if e.kind != "wait"] == [str(a) for a in actions]
        assert usage.busy_s == pytest.approx(sum(job.stages[a.stage].seconds[a.kind] for a in actions))
        assert usage.busy_s + usage.communication_s + usage.idle_s == pytest.approx(found.makespan_s)
        assert min(usage.communication_s, usage.idle_s) >= -1e-9


@settings(max_examples=150)
@given(jobs())
def test_nothing_is_used_before_it_is_there(job):
    """Tensors are taken after they were made and their bytes have gone; updates follow the gradients of all."""
    found = simulate(job)
    computing = [(e, w) for w, events in enumerate(found.events) for e in events if e.track == "compute"]
    spans = {(e.name, w): (e.start_s, e.start_s + e.length_s) for e, w in computing}
    at = {(a, w): spans[str(a), w] for w, actions in enumerate(job.lists) for a in actions}
    slot_of = {(a.stage, a.minibatch): w for w, actions in enumerate(job.lists) for a in actions if a.kind != "U"}
    split = any(a.kind is ActionKind.BACKWARD_INPUT for a, _ in at)
    back = ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD
    fastest = max(level.bandwidth_bytes_per_s for level in job.cluster.levels)
    for border in job.edges:
        for (stage, i), w in slot_of.items():
            if stage != border.destination:
                continue
            source = slot_of[border.source, i]
            for kind, a, b, size in (
                (ActionKind.FORWARD, border.source, stage, border.forward_bytes),
                (back, stage, border.source, border.backward_bytes),
            ):
                sender, taker = (source, w) if kind is ActionKind.FORWARD else (w, source)
                soonest = at[Action(a, kind, i), sender][1] + (size / fastest if sender != taker else 0)
                assert at[Action(b, kind, i), taker][0] >= soonest - 1e-9
    for (action, _), (start, _) in at.items():
        if action.kind is ActionKind.UPDATE:
            every = job.shape.update_every[action.stage]
            last = ActionKind.BACKWARD_WEIGHT if split else ActionKind.BACKWARD
            ends = [
                end
                for (a, _), (_, end) in at.items()
                if a.stage == action.stage and a.kind is last and a.minibatch // every == action.minibatch
            ]
            assert start >= max(ends, default=0.0) - 1e-9


def ways(cluster: Cluster, a: int, b: int):
    """The links between two workers, worked out anew."""
    crossed = [depth for depth, below in enumerate(cluster.below) if a // below != b // below]
    return [
        *(("up", d, a // cluster.below[d]) for d in crossed),
        *(("down", d, b // cluster.below[d]) for d in crossed),
    ]


@settings(max_examples=100)
@given(st.sampled_from([(4,), (2, 2), (2, 2, 2)]), st.data())
def test_a_link_is_never_above_its_bandwidth(sizes, data):
    """Whatever lies inside a stretch of time, on one link: no more bytes than the link can carry in it."""
    cluster = make_cluster(sizes, [data.draw(st.integers(1, 9)) for _ in sizes])
    ends = st.tuples(st.integers(0, cluster.workers - 1), st.integers(0, cluster.workers - 1)).filter(
        lambda e: e[0] != e[1]
    )
    sent = data.draw(st.lists(st.tuples(ends, st.integers(0, 20), st.integers(0, 60)), min_size=1, max_size=12))
    clock = EventQueue()
    links = Network(cluster, clock)
    flows = []
    for (a, b), start, size in sent:
        path, _ = links.path(a, b)
        assert sorted((link.direction, link.level, link.member) for link in path) == sorted(ways(cluster, a, b))
        flow = Flow(channel=(a, b), size_bytes=size, links=dict.fromkeys(path, 1), ended=lambda flow: None)
        flows.append((flow, set(path)))
        clock.at(start, lambda flow=flow: links.send(flow))
    clock.run()
    for link in {link for _, path in flows for link in path}:
        mine = [flow for flow, path in flows if link in path]
        bandwidth = cluster.levels[link.level].bandwidth_bytes_per_s
        for start in {flow.started_s for flow in mine}:
            for end in {flow.ended_s for flow in mine}:
                inside = sum(f.size_bytes for f in mine if f.started_s >= start and f.ended_s <= end)
                assert inside <= bandwidth * (end - start) + 1e-6 or end < start
    for flow, _ in flows:
        assert flow.ended_s >= flow.started_s


def test_messages_share_links_fairly_and_those_of_one_channel_queue():
    """Two servers of two at 10 and 100 bytes/s. Messages of 60 bytes leave server 0, two of them on one channel."""
    clock = EventQueue()
    links = Network(make_cluster((2, 2), (10.0, 100.0)), clock)
    ended = []
    for a, b, size in [(0, 2, 60), (0, 2, 60), (1, 3, 60), (0, 1, 1140)]:
        path, _ = links.path(a, b)
        links.send(
            Flow(
                channel=(a, b),
                size_bytes=size,
                links=dict.fromkeys(path, 1),
                ended=lambda flow: ended.append((flow.channel, clock.now)),
            )
        )
    clock.run()
    # until 12 the first of 0 -> 2 and that of 1 -> 3 have 5 bytes/s each and 0 -> 1 has what they leave: 95; then the
    # second of 0 -> 2 has 10
    assert ended == [((0, 2), 12), ((1, 3), 12), ((0, 1), 12), ((0, 2), 18)]


@settings(max_examples=100)
@given(jobs())
def test_free_messages_are_never_slower(job):
    """With every action in its place, a message that arrives sooner delays nothing."""
    levels = tuple(replace(level, bandwidth_bytes_per_s=1e15, latency_s=0.0) for level in job.cluster.levels)
    free = replace(job, cluster=replace(job.cluster, levels=levels))
    assert simulate(free).makespan_s <= simulate(job).makespan_s + 1e-6


@settings(max_examples=150, derandomize=True)
@given(jobs(), st.floats(1.0, 9.0))
def test_more_bandwidth_is_never_slower_on_a_flat_cluster(job, more):
    """Where all links are alike. It is seen, not proved: a message that starts sooner takes its share from another, as
    in Graham's anomalies of scheduling, and across levels of their own bandwidths that can cost more than it gains."""

    def flat(bandwidth):
        return replace(job, workers=range(len(job.workers)), cluster=make_cluster((len(job.workers),), (bandwidth,)))

    assert simulate(flat(10.0 * more)).makespan_s <= simulate(flat(10.0)).makespan_s + 1e-9


@settings(max_examples=30)
@given(jobs())
def test_the_same_job_gives_the_same_simulation(job):
    assert simulate(job) == simulate(job)


def test_a_job_that_cannot_end_names_who_waits():
    shape = replace(ExecutionConfig.of_schedule("1f1b").shape((1, 1)), in_flight=(1, 2))
    job = straight("1f1b", 2, 1, n=3)
    with pytest.raises(ScheduleError, match=r"worker 0 waits forever in 0B0\n.*>0B0<"):
        simulate(replace(job, shape=shape, lists=SCHEDULES["1f1b"].build(shape, 3)))
