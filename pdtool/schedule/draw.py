"""Action lists as a timeline in ASCII, for people."""

from __future__ import annotations

from collections.abc import Sequence

from pdtool.schedule.action import ActionKind, Actions
from pdtool.schedule.timeline import timeline


def draw(lists: Sequence[Actions], forward: int = 1, backward: int = 2, width: int = 100) -> str:
    """Draw an ASCII timeline in slots: `F3` forward, `B3 ==` backward, `.` idle.

    A split backward is `I3` and `W3`, of half its slots each. With several stages on a worker each box names its stage.

    Args:
        forward, backward: slots that each takes.
        width: characters after which a line is cut off.
    """
    starts = timeline(lists, forward, backward)
    slots = dict(zip(ActionKind, (forward, backward, backward // 2, backward // 2, 0), strict=True))
    chunked = any(len({a.stage for a in actions}) > 1 for actions in lists)
    names = [[str(a) if chunked else f"{a.kind}{a.minibatch}" for a in actions] for actions in lists]
    size = max((len(name) for row in names for name in row), default=2)
    labels = [f"stage {a[0].stage if a else 0} worker {worker}" for worker, a in enumerate(lists)]
    longest = max(map(len, labels), default=0)
    rows = []
    for worker, (actions, times) in enumerate(zip(lists, starts, strict=True)):
        cells: list[str] = []
        for action, name, start in zip(actions, names[worker], times, strict=True):
            if action.kind is not ActionKind.UPDATE:
                cells += ["."] * (int(start) - len(cells))
                cells += [name] + ["=" * size] * (slots[action.kind] - 1)
        text = f"{labels[worker].ljust(longest)} | " + " ".join(cell.ljust(size) for cell in cells)
        rows.append((text if len(text) <= width else text[: width - 1] + "…").rstrip())
    return "\n".join(rows)
