"""What the pages of a reproduction say of their figures."""

from __future__ import annotations

from typing import Any

from reproduction import depth, learning


def trained(method: str, *epochs: int | None, rate_factor: float = 1.0, diverged: bool = False) -> list[dict[str, Any]]:
    """Of as many seeds as there are epochs; None: the target was not reached."""
    common = {"task": "digits", "method": method, "rate_factor": rate_factor, "diverged": diverged, "curve": [0.5]}
    return [
        common | {"seed": seed, "epochs": reached, "updates": reached and 45 * reached}
        for seed, reached in enumerate(epochs)
    ]


def compared(method: str, equal: int) -> dict[str, Any]:
    return {
        "task": "digits",
        "method": method,
        "updates": 90,
        "equal": equal,
        "close": 20,
        "curve": [0.5, 0.75],
        "replayed_curve": [0.5, 0.875],
    }


def test_the_page_of_learning_says_what_was_reached_and_what_was_not() -> None:
    runs = [
        *trained("one-process", 4, 6, 5),
        *trained("one-process", 9, rate_factor=0.5),
        *trained("stash", 7, None, 8),
        *trained("no-stashing", None, None, 11, diverged=True),
        *trained("nesterov", 6, 6, 6),
        *trained("lr-discount", None, None, None),
    ]
    page = "\n".join(learning.page({"trained": runs, "compared": [compared("stash", 90), compared("2bw", 3)]}))
    rows = [
        "| one process | 5 (225), 4 to 6 |",
        "| one process, 0.5 × the learning rate (first seed) | 9 (405) |",
        "| 1F1B with weight stashing | 8 (360), 7 to never |",
        "| 1F1B without stashing | not in 12 (1 of 3 did), 3 diverged |",
        "| stashing, nesterov | 6 (270) |",
        "| stashing, lr-discount | not in 12 |",
        "- *digits*: weight stashing is **not** within one epoch of one process; with nesterov it is",
        "in 2 ways. In 1 of them every loss",
        "| 1F1B with weight stashing | 90 | 90 | 20 | 0.7500 | 0.8750 |",
        "| 2BW | 90 | 3 | 20 | 0.7500 | 0.8750 |",
    ]
    assert [row for row in rows if row not in page] == [], page


def test_the_page_of_learning_says_when_the_goal_is_met_or_cannot_be_told() -> None:
    def verdict(runs: list[dict[str, Any]]) -> str:
        return "\n".join(learning.page({"trained": runs, "compared": []}))

    assert "stashing is within one epoch" in verdict([*trained("one-process", 4), *trained("stash", 5)])
    assert "no correction closes" in verdict(
        [*trained("one-process", 4), *trained("stash", 6), *trained("nesterov", 9)]
    )
    assert "one process did not reach" in verdict([*trained("one-process", None), *trained("stash", 6)])


def test_the_page_of_depth_has_a_row_for_each_count() -> None:
    points = [{"throughput": 100.0 * n, "memory_bytes": 2e9 * n, "in_flight": 4} for n in (1, 2)]
    common = {"counts": (1, 2), "points": {"VGG-16": points}}
    figures = {
        "stages": common | {"epochs": [[3, 5, 4], [None, None, 4]]},
        "in_flight": common | {"epochs": [[3], [6]]},
    }
    page = "\n".join(depth.page(figures))
    for row in ("| 1 | 100 | 2 | 4 |", "| 2 | 200 | 4 | not in 12 |", "| 2 | 200 | 4 | 6 |", "takes 4 for VGG-16"):
        assert row in page
