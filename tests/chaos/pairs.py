"""Start two runs in one folder."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from chaos.bench import Bench, Outcome

_EPOCHS = 3


def pairs(bench: Bench, trials: int, seed: int) -> Iterator[Outcome]:
    """Yield the outcome of each pair: one trains, the other is refused, and the checkpoints are of the first alone."""
    draw = random.Random(seed)
    for trial in range(trials):
        delay_s, out = draw.choice((0.0, draw.uniform(0, 3))), f"runs/pair-{trial}"
        outcome = Outcome(f"a second run {delay_s:.1f} s after the first")
        commands = []
        for _ in range(2):
            commands.append(bench.start(*bench.run(out, _EPOCHS)))
            time.sleep(delay_s)
        both = sorted((command.ended() for command in commands), key=lambda ended: ended.code or 0)
        outcome.add(both[0], [0])
        outcome.add(both[1], [2], "is in use by a run|already contains a run")
        outcome.losses += bench.losses(out, outcome.name)
        if not (bench.folder / out / "checkpoints" / f"epoch-{_EPOCHS}").is_dir():
            outcome.losses.append(f"{outcome.name}: the last epoch is not there")
        yield outcome
