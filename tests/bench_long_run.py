"""Train for 20,000 updates on two stages: `make bench-long-run`. Does it slow down, and what does the launcher cost?

The digits of scikit-learn, a validation and a checkpoint each epoch. Prints updates per second in each tenth of the
run, the last over the first (wanted: at least 0.97), and the launcher's processor time over the time on the clock
(wanted: at most 0.05 of a core). Rates are the upper quartile of windows of four epochs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).parent.parent
PDTOOL = [sys.executable, "-m", "pdtool"]
PER_EPOCH = 45  # minibatches of 32 digits
WINDOW = 4 * PER_EPOCH  # updates
POLL_S = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """How far a run was at one moment."""

    clock_s: float
    updates: int
    launcher_s: float


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20_000)
    updates = parser.parse_args().updates
    with tempfile.TemporaryDirectory() as name:
        samples = _train(_plan(Path(name)), Path(name) / "run", -(-updates // PER_EPOCH))
    first, last = samples[0], samples[-1]
    rates = [_rate(tenth) for tenth in _tenths(samples)]
    share = (last.launcher_s - first.launcher_s) / (last.clock_s - first.clock_s)
    sys.stdout.write(
        f"{last.updates} updates in {last.clock_s - first.clock_s:.0f} s\n"
        f"updates/s in each tenth, of its faster windows: {', '.join(f'{rate:.1f}' for rate in rates)}\n"
        f"last over first: {rates[-1] / rates[0]:.3f} (wanted: at least 0.97)\n"
        f"launcher: {share:.4f} of a core (wanted: at most 0.05)\n"
    )


def _tenths(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each tenth of the updates."""
    first, last = samples[0].updates, samples[-1].updates
    ends = [first + (last - first) * k // 10 for k in range(11)]
    return [[s for s in samples if low <= s.updates <= high] for low, high in pairwise(ends)]


def _rate(samples: Sequence[Sample]) -> float:
    """Updates per second in windows of WINDOW updates, the upper quartile: what else the machine does only slows."""
    rates, begin = [], samples[0]
    for sample in samples:
        if sample.updates >= begin.updates + WINDOW:
            rates.append((sample.updates - begin.updates) / (sample.clock_s - begin.clock_s))
            begin = sample
    return quantiles(rates, n=4)[-1]


def _plan(folder: Path) -> Path:
    path = folder / "two.yaml"
    options = ["--topology", "2", "--straight", "--bandwidth", "10Gbit/s", "-o", str(path)]
    command = [*PDTOOL, "partition", str(ROOT / "profiles" / "digits.json"), *options]
    subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    return path


def _train(plan: Path, out: Path, epochs: int) -> list[Sample]:
    """What was seen, from the first update to the last."""
    command = [*PDTOOL, "run", str(plan), "-o", str(out), "--epochs", str(epochs)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples: list[Sample] = []
    updates, place = 0, 0
    while process.poll() is None:
        time.sleep(POLL_S)
        if (out / "metrics.jsonl").is_file():
            with (out / "metrics.jsonl").open("rb") as file:
                file.seek(place)
                new = file.read()
            place += len(new)
            updates += new.count(b'"train"')
        if updates:
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                break
            samples.append(Sample(time.monotonic(), updates, (int(fields[11]) + int(fields[12])) / TICKS_PER_S))
    if process.wait():
        sys.exit(f"the run ended with exit code {process.returncode}")
    return [sample for sample in samples if sample.updates < updates or sample is samples[-1]]


if __name__ == "__main__":
    main()
