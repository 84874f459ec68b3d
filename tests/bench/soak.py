"""Train for thousands of updates on four workers, twice: `make soak`. Memory must stay flat and the results be equal.

The small VGG of the zoo on a 2-1-1 plan: a replicated stage, uneven rounds at the end of each epoch, weight stashing,
shared memory between the workers, a validation and a checkpoint each epoch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from pdtool.artifacts.plan import Plan
from pdtool.runtime.status import read_status

ROOT = Path(__file__).parents[2]
PDTOOL = [sys.executable, "-m", "pdtool"]
PER_EPOCH = 64  # minibatches of 64 digits
MOST_GROWTH = 0.02  # of the memory of all workers, from the second quarter of a run to the last


def main() -> None:
    """Two runs; exits with 1 when they differ or grow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=2000, help="of the last stage, at least")
    epochs = -(-parser.parse_args().updates // PER_EPOCH)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = _plan(folder)
        growths = [_train(plan, folder / run, epochs) for run in ("first", "second")]
        states = [_state(folder / run) for run in ("first", "second")]
    equal = all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    sys.stdout.write(f"the two runs end with {'the same' if equal else 'OTHER'} weights, to the last bit\n")
    sys.exit(not equal or max(growths) > MOST_GROWTH)


def _plan(folder: Path) -> Path:
    """The checked-in profile of MNIST on four workers, its first stage replicated."""
    path = folder / "soak.yaml"
    profile = ROOT / "profiles" / "mnist.json"
    options = ["--topology", "4", "--workers", "3", "--straight", "--bandwidth", "10Gbit/s", "-o", str(path)]
    subprocess.run([*PDTOOL, "partition", str(profile), *options], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    plan = Plan.load(path)
    first, second, third = plan.stages
    stages = (
        first.model_copy(update={"replicas": 2, "workers": (0, 1), "in_flight": 3}),
        second.model_copy(update={"workers": (2,), "in_flight": 2}),
        third.model_copy(update={"workers": (3,), "in_flight": 1}),
    )
    plan.model_copy(update={"stages": stages}).save(path)
    return path


def _train(plan: Path, out: Path, epochs: int) -> float:
    """One run; prints and returns by how much its memory grew."""
    command = [*PDTOOL, "run", str(plan), "-o", str(out), "--epochs", str(epochs)]
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sizes: list[int] = []
    while process.poll() is None:
        time.sleep(0.5)
        size = sum(_bytes(out, rank) for rank in range(4))
        if (out / "metrics.jsonl").exists() and size:
            sizes.append(size)
    if process.returncode:
        sys.exit(f"the run ended with exit code {process.returncode}")
    quarter = len(sizes) // 4
    if quarter < 2:
        sys.exit(f"{out.name} was over before its memory could be seen; pass more --updates")
    early, late = median(sizes[quarter : 2 * quarter]), median(sizes[-quarter:])
    updates = sum('"train"' in line for line in (out / "metrics.jsonl").read_text().splitlines())
    sys.stdout.write(
        f"{updates} updates in {time.monotonic() - start:.0f} s; all workers together held {early / 1e6:.1f} MB in the "
        f"second quarter, {late / 1e6:.1f} MB in the last ({late / early - 1:+.2%})\n"
    )
    return late / early - 1


def _bytes(out: Path, rank: int) -> int:
    """Resident memory of a worker. Not its share of what workers have in common (PSS): that grows as pages of the fork
    server, which all begin with, are written to and become the worker's own."""
    try:
        lines = Path(f"/proc/{read_status(out, rank).pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def _state(out: Path) -> dict[str, torch.Tensor]:
    path = out / "model.pt"
    subprocess.run([*PDTOOL, "export", str(out), "-o", str(path)], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    return dict(torch.load(path))


if __name__ == "__main__":
    main()
