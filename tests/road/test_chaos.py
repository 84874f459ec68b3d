"""`make chaos`, in short: a few trials of each kind, drawn with a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos.bench import Bench, Outcome
from chaos.damages import damages
from chaos.kills import kills
from chaos.machines import can_make_namespaces, mistakes
from chaos.pairs import pairs


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("chaos"), epochs=6)


def check(outcomes: Iterator[Outcome], trials: int) -> None:
    """Nothing hangs, nothing is left, nothing is lost, and the right cause is named."""
    done = list(outcomes)
    assert len(done) == trials
    for outcome in done:
        assert outcome.hangs == outcome.orphans == outcome.losses == outcome.wrong_causes == []


def test_killed_runs(bench: Bench) -> None:
    check(kills(bench, 2, seed=0), 2)


def test_damaged_checkpoints(bench: Bench) -> None:
    check(damages(bench, 2, seed=0), 2)


def test_two_runs_in_one_folder(bench: Bench) -> None:
    check(pairs(bench, 1, seed=0), 1)


def test_mistakes_of_machines(bench: Bench) -> None:
    if not can_make_namespaces():
        pytest.skip("network namespaces need root")
    check(mistakes(bench, 2), 2)
