"""Each decision has one owner: nobody else compares the name of a schedule, or spells that of a run's file."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdtool.schedule import SCHEDULES, STRATEGIES

ROOT = Path(__file__).parents[2] / "pdtool"
Trees = Mapping[Path, ast.AST]

STRATEGY_FILES = ("schedule/strategies.py", "planner/choice/strategies.py")
POLICY_NAMES = {policy.name for kind in SCHEDULES.values() for policy in kind.policies}
RUN_FILES = ("run.json", "plan.yaml", "metrics.jsonl", "report.json", "trace.json", "checkpoint.json", "emulation.json")
RUN_FILES += ("failure.txt", "checkpoints", ".lock", ".token")


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The code of pdtool, which only the process that runs these tests parses."""
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


@pytest.fixture(scope="module")
def places_of_texts(trees: Trees) -> Mapping[str, list[str]]:
    """Where each constant text stands: `file:line`."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                places[node.value].append(f"{path}:{node.lineno}")
    return places


def compared_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each constant that something is compared with, by an operator or a pattern."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        for side in sides:
            for inner in ast.walk(side) if not isinstance(side, ast.Call) else ():
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.lineno, inner.value


def offences(trees: Trees, names: set[str], owners: tuple[str, ...]) -> list[str]:
    return [
        f"{path}:{line}: {text}"
        for path, tree in trees.items()
        if not str(path).startswith(owners)
        for line, text in compared_texts(tree)
        if text in names
    ]


def test_only_the_schedules_compare_their_names(trees: Trees) -> None:
    assert offences(trees, set(SCHEDULES) | POLICY_NAMES - {"none"}, ("schedule/",)) == []


def test_only_the_strategies_compare_their_names(trees: Trees) -> None:
    assert offences(trees, set(STRATEGIES) - {"auto"} - set(SCHEDULES), STRATEGY_FILES) == []


@pytest.mark.parametrize("name", RUN_FILES)
def test_only_the_run_folder_spells_the_names_of_its_files(places_of_texts: Mapping[str, list[str]], name: str) -> None:
    spelled = places_of_texts.get(name, [])
    assert [place for place in spelled if not place.startswith("artifacts/run_dir.py:")] == []
    assert spelled
