"""Why a run was slower than predicted: the parts of the difference, and their causes."""

from __future__ import annotations

import pytest
import samples

from pdtool.reports.slowness import differences, slowness_lines


def reported(compute_s=1.2e-3, simulated_s=2e-3, **changes):
    """The report of a run of two stages that were predicted to compute as long."""
    report = samples.report()
    figures = {"compute_s": (compute_s, compute_s), "simulated_s": simulated_s}
    return report.model_copy(update={"predicted": report.predicted.model_copy(update=figures), **changes})


def test_differences_add_up_to_all_that_was_not_predicted():
    report = reported()
    parts = differences(report)
    assert sum(part.more_s for part in parts) == pytest.approx(report.stages[0].time_s - 2e-3, rel=0.05)
    assert parts[0].what == "computing"
    assert parts[0].more_s == pytest.approx(3e-3 - 1.2e-3)


def test_crowded_workers_are_the_reason():
    report = reported(cores=2, local_workers=3)
    assert "3 workers share 2 cores" in differences(report)[0].cause
    assert not list(slowness_lines(report))


def test_a_stage_that_computes_longer_than_was_profiled_is_named():
    """On the page as in the terminal, with both figures."""
    report = reported(cores=4, local_workers=3)
    cause = "stage 0 computes for 3 ms, but the profile says 1.2 ms: the cores may have been busy with something else, "
    assert differences(report)[0].cause.startswith(cause)
    said = list(slowness_lines(report))
    more = "stage 0 took 3 ms more per minibatch than predicted (including the time to fill and drain the pipeline):"
    assert said[0] == more
    assert said[1].startswith(f"  1.8 ms (60%) computing: {cause}")
    quick = differences(reported(2.9e-3, cores=4, local_workers=3))
    assert not any("profiled" in part.cause for part in quick)


def test_stages_that_share_a_parameter_wait_for_each_other_and_not_for_replicas():
    report = reported()
    for replicas, others in ((2, "other replicas"), (1, "stages that share a parameter with it")):
        stages = tuple(stage.model_copy(update={"replicas": replicas}) for stage in report.stages)
        parts = differences(report.model_copy(update={"stages": stages}))
        [cause] = [part.cause for part in parts if part.what == "averaging gradients"]
        assert f"waiting for {others}, which" in cause


def test_a_slow_link_is_named_as_the_cause_where_no_stage_computes_all_the_time():
    """As two machines over 100 Mbit/s, planned for 1 Gbit/s: 94 of 111 ms are the link's."""
    report = reported(15.9e-3, 15.9e-3, cores=4, local_workers=1)
    stage = report.stages[0].model_copy(update={"busy_s": 33e-3, "wait_s": 94e-3, "allreduce_s": 0.0, "rest_s": 0.0})
    first, last = (stage.model_copy(update={"sent_bytes": size}) for size in (1_500_000, 1_400_000))
    slow = report.model_copy(update={"stages": tuple(s.model_copy(update={"replicas": 1}) for s in (first, last))})
    assert [part.what for part in differences(slow)] == ["waiting for other stages", "computing"]
    said = list(slowness_lines(slow))
    assert said[1].startswith("  94 ms (85%) waiting for other stages: no stage computes all the time, so messages")
    assert "messages set the pace: stage 0 sent 1.5 MB per minibatch, 94.5 Mbit/s" in said[1]
    assert "`pdtool probe`" in said[1]
    local = list(slowness_lines(slow.model_copy(update={"local_workers": 2})))
    assert "`pdtool probe --topology 2 -o cluster.yaml`" in local[1]
    assert said[2].startswith("  17.1 ms (15%) computing: stage 0 computes for 33 ms, but the profile says 15.9 ms")
    quick = slow.model_copy(update={"stages": tuple(s.model_copy(update={"busy_s": 5e-3}) for s in slow.stages)})
    assert {part.cause for part in differences(quick) if part.more_s < 0} == {"less than predicted"}
    once = list(slowness_lines(slow.model_copy(update={"epochs": 1})))
    assert once[1] == f"{said[1]}. A single epoch includes the warm-up"
    small = tuple(stage.model_copy(update={"sent_bytes": 8000}) for stage in slow.stages)
    [_, said, _] = slowness_lines(slow.model_copy(update={"stages": small}))
    assert "`pdtool probe" not in said, "a link's bandwidth is not the cause"
    assert "no stage sends more than 8 kB per minibatch. Run `pdtool profile`" in said
    tied = tuple(stage.model_copy(update={"allreduce_s": 1e-4}) for stage in slow.stages)
    tied_causes = [part.cause for part in differences(slow.model_copy(update={"stages": tied}))]
    assert "1.5 MB" not in "".join(tied_causes), "the bytes are also those of the gradients of a shared parameter"


def test_the_pauses_of_a_flush_are_not_taken_for_a_slow_link():
    """Stages that compute half of the time as planned, and twice as long as was profiled, wait twice as long, too."""
    stage = (
        samples.report()
        .stages[0]
        .model_copy(update={"busy_s": 20e-3, "wait_s": 20e-3, "allreduce_s": 0.0, "rest_s": 0.0, "replicas": 1})
    )
    report = reported(10e-3, 20e-3, cores=4, local_workers=1, stages=(stage, stage))
    assert not any("messages set the pace" in part.cause for part in differences(report))
