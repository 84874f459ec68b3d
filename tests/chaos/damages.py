"""Damage checkpoints at random places, and use them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from chaos.bench import Bench, Outcome
from pdtool.artifacts.run_dir import RunDir

_WAYS = ("a flipped bit", "cut off", "made longer", "removed", "zeros", "of another epoch")


def damages(bench: Bench, trials: int, seed: int) -> Iterator[Outcome]:
    """Yield the outcome of each trial: export and --resume must refuse the file, and the checkpoint before it hold."""
    draw = random.Random(seed)
    for trial in range(trials):
        out = f"runs/damage-{trial}"
        _copy(bench, out)
        folder = RunDir(bench.folder / out).latest_checkpoint().path
        path, how = draw.choice(sorted(folder.iterdir())), draw.choice(_WAYS)
        if path.name == "checkpoint.json" and how in ("removed", "of another epoch"):
            how = "a flipped bit"  # without it a checkpoint is not complete, and another's names other files
        if how == "of another epoch" and path.read_bytes() == _of_epoch_2(path):
            how = "a flipped bit"  # a stage without parameters has the same file in each epoch
        _damage(path, how, draw)
        outcome = Outcome(f"{path.name} {how}")
        command = ("export", out, "-o", f"{out}.pt") if trial % 2 else tuple(bench.run(out, 4, "--resume"))
        ended = bench.start(*command).ended()
        outcome.add(ended, [3], rf"{path.name}: is (damaged|missing).*--resume \S*{out}/checkpoints/epoch-2")
        if ended.code == 0:
            outcome.losses.append(f"{outcome.name}: it was used")
        shutil.rmtree(folder)
        outcome.losses += bench.losses(out, outcome.name)
        yield outcome


def _copy(bench: Bench, out: str) -> None:
    """A run of three epochs."""
    for epoch in (1, 2, 3):
        name = f"checkpoints/epoch-{epoch}"
        shutil.copytree(bench.folder / "runs/reference" / name, bench.folder / out / name)


def _damage(path: Path, how: str, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    match how:
        case "a flipped bit":
            content[place] ^= 1 << draw.randrange(8)
        case "cut off":
            del content[place:]
        case "made longer":
            content += b"\0"
        case "zeros":
            content = bytearray(len(content))
        case "of another epoch":
            content = bytearray(_of_epoch_2(path))
    path.unlink()
    if how != "removed":
        path.write_bytes(content)


def _of_epoch_2(path: Path) -> bytes:
    return (path.parent.parent / "epoch-2" / path.name).read_bytes()
