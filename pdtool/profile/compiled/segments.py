"""Cut a model's operators into segments, each to be compiled as a whole, and share out what these take.

What torch.compile has fused has no times of its own. So the seconds of a segment are measured, and only how they are
split between its operators is not: each gets its share in proportion to what it takes when operators run one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, takewhile

from pdtool.frontend.operators import Operator, Value

Seconds = Mapping[str, float]  # by name of an operator, or of a segment


def cut_into_segments(
    operators: Sequence[Operator], outputs: Sequence[Value], seconds: Seconds, shortest_s: float
) -> list[list[Operator]]:
    """Cut operators into contiguous segments of `shortest_s` to four times that, or of one longer operator.

    Among the borders that this allows the one is taken that the fewest tensors cross; among these one between modules
    rather than inside of one, and one before a long operator rather than before a short one, which is likelier to be
    fused with what comes before it.

    Args:
        operators: in topological order.
        outputs: the tensors that the model returns.
        seconds: of each operator; one that is missing takes none.
    """
    crossing = _crossing_tensors(operators, outputs)

    def cost(border: int) -> tuple[int, int, float]:
        before, after = operators[border - 1], operators[border]
        return crossing[border], _common_depth(before.module, after.module), -seconds.get(after.name, 0.0)

    elapsed_s = [0.0, *accumulate(seconds.get(op.name, 0.0) for op in operators)]
    borders = [0]
    while candidates := list(_candidates(elapsed_s, borders[-1], shortest_s)):
        borders.append(min(candidates, key=cost))
    return [list(operators[start:end]) for start, end in pairwise([*borders, len(operators)])]


def _candidates(elapsed_s: Sequence[float], start: int, shortest_s: float) -> Iterator[int]:
    """Yield where the segment that begins at `start` may end, and leave enough for another one."""
    last_s = elapsed_s[-1] - shortest_s
    ends = [i for i in range(start + 1, len(elapsed_s) - 1) if elapsed_s[start] + shortest_s <= elapsed_s[i] <= last_s]
    yield from ends[:1]
    yield from (end for end in ends[1:] if elapsed_s[end] <= elapsed_s[start] + 4 * shortest_s)


def _common_depth(path: str, other: str) -> int:
    """Count the modules around both of two modules: 2 for `layer.0.conv` and `layer.0.norm`."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _crossing_tensors(operators: Sequence[Operator], outputs: Sequence[Value]) -> list[int]:
    """Count for each position in `operators` the tensors that are made before it, and taken at it or after it."""
    last_use = {value: index for index, op in enumerate(operators) for value in op.values}
    last_use.update(dict.fromkeys(outputs, len(operators)))
    changes = [0] * (len(operators) + 2)
    for index, op in enumerate(operators):
        for value in op.outputs:
            if value in last_use:
                changes[index + 1] += 1
                changes[last_use[value] + 1] -= 1
    return list(accumulate(changes))


def apportion(measured: Seconds, segments: Mapping[str, Sequence[str]], one_by_one: Seconds) -> dict[str, float]:
    """Give each operator of a segment its share of the seconds that were measured of the segment.

    The shares of a segment's operators add up to its seconds. What is in no segment keeps what was measured of it.

    Args:
        measured: seconds of segments, and of operators that are in none.
        segments: name of a segment -> its operators.
        one_by_one: seconds of the operators when each runs alone, to which the shares are proportional.
    """
    shares: dict[str, float] = {}
    for name, seconds in measured.items():
        shares |= _shares(seconds, segments.get(name, (name,)), one_by_one)
    return shares


def _shares(seconds: float, operators: Sequence[str], one_by_one: Seconds) -> dict[str, float]:
    total_s = sum(one_by_one.get(name, 0.0) for name in operators)
    if not total_s:
        return dict.fromkeys(operators, seconds / len(operators))
    return {name: seconds * one_by_one.get(name, 0.0) / total_s for name in operators}
