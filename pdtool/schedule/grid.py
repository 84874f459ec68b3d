"""Action lists as a grid of text, for errors."""

from __future__ import annotations

from collections.abc import Sequence

from pdtool.schedule.action import Actions


def grid(lists: Sequence[Actions], mark: tuple[int, int] | None = None, around: int = 12) -> str:
    """Write the lists, one worker a line.

    Args:
        mark: (worker, position) of an action that is written as >0F3<, with `around` actions on each side.
    """
    first = max(0, mark[1] - around) if mark else 0
    rows = []
    for worker, actions in enumerate(lists):
        cells = [
            f">{a}<" if mark == (worker, i) else str(a)
            for i, a in enumerate(actions[first : first + 2 * around], start=first)
        ]
        rows.append(f"worker {worker:>2} | {'... ' if first else ''}{' '.join(cells)}")
    return "\n".join(rows)
