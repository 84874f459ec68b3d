"""`make chaos`, in short: a few trials of each kind, drawn with a fixed seed."""

from __future__ import annotations

import pytest
from chaos.bench import Bench
from chaos.damages import damages
from chaos.kills import kills
from chaos.machines import can_make_namespaces, mistakes
from chaos.pairs import pairs


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("chaos"), epochs=6)


TRIALS = {
    "killed runs": lambda bench: (kills(bench, 2, seed=0), 2),
    "damaged checkpoints": lambda bench: (damages(bench, 2, seed=0), 2),
    "two runs in one folder": lambda bench: (pairs(bench, 1, seed=0), 1),
    "mistakes of machines": lambda bench: (mistakes(bench, 2), 2),
}


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("kind", TRIALS)
def test_nothing_hangs_or_is_left_or_lost_and_the_right_cause_is_named(kind: str, bench: Bench) -> None:
    if kind == "mistakes of machines" and not can_make_namespaces():
        pytest.skip("network namespaces need root")
    outcomes, trials = TRIALS[kind](bench)
    done = list(outcomes)
    assert len(done) == trials
    for outcome in done:
        assert outcome.hangs == outcome.orphans == outcome.losses == outcome.wrong_causes == []
