"""What `pdtool run` may change in a plan, and what it advises where the plan cannot be changed so."""

from types import SimpleNamespace

import pytest

from pdtool.api.rescheduling import rescheduled
from pdtool.errors import UsageError
from pdtool.options.run_options import RunOptions


@pytest.mark.parametrize(
    ("planned", "chunks", "asked", "remedy"),
    [
        ("interleaved", 2, "1f1b", "partition with --schedule 1f1b"),
        ("1f1b", 1, "interleaved", "partition with --schedule interleaved"),
    ],
)
def test_stages_in_chunks_need_a_plan_of_their_own(planned, chunks, asked, remedy):
    plan = SimpleNamespace(schedule=planned, chunks=chunks, weights="flush", wire_dtype="fp32")
    with pytest.raises(UsageError, match=rf"schedule {asked} cannot have {chunks} stage.*; use .* or {remedy}"):
        rescheduled(SimpleNamespace(plan=plan), RunOptions(schedule=asked))
