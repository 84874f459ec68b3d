"""Train for 20,000 updates on two stages: `make bench-long-run`. Does it slow down, and what does the launcher cost?

The small VGG of the zoo, a validation and a checkpoint each epoch. What else the machine does changes a rate by more
than the 3 % looked for, so the last tenth of the run is not compared with its first. Beside the last tenth a second,
new run of the same job is started: both have the same machine at the same time, and the updates that the old run makes
for each one of the new run say what 18,000 updates have cost it (wanted: at least 0.97). Also printed: the launcher's
processor time over the time on the clock while the first run was alone (wanted: at most 0.05 of a core).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PDTOOL = [sys.executable, "-m", "pdtool"]
PER_EPOCH = 64  # minibatches of 64 digits
WARM_UP = 4 * PER_EPOCH  # updates of the new run that are not counted
POLL_S = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Run:
    """A run of the job, and how many updates its metrics tell of."""

    process: subprocess.Popen[bytes]
    out: Path
    updates: int = 0
    read: int = field(default=0, repr=False)  # bytes of metrics.jsonl

    def poll(self) -> bool:
        """Read what is new; True while the run goes on."""
        metrics = self.out / "metrics.jsonl"
        if metrics.is_file():
            with metrics.open("rb") as file:
                file.seek(self.read)
                new = file.read()
            self.read += len(new)
            self.updates += new.count(b'"train"')
        return self.process.poll() is None

    def launcher_s(self) -> float:
        """The launcher's own processor time so far, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> None:
    """The old run, and the new one beside its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20_000)
    epochs = -(-parser.parse_args().updates // PER_EPOCH)
    total = epochs * PER_EPOCH
    with tempfile.TemporaryDirectory() as name:
        plan = _plan(Path(name))
        old = _start(plan, Path(name) / "old", epochs)
        _until(old, 1)
        begin_s, begin_launcher_s = time.monotonic(), old.launcher_s()
        _until(old, total * 85 // 100)
        share = (old.launcher_s() - begin_launcher_s) / (time.monotonic() - begin_s)
        new = _start(plan, Path(name) / "new", epochs)
        _until(new, WARM_UP, beside=old)
        begin_old, begin_new = old.updates, new.updates
        _until(old, total * 99 // 100, beside=new)
        by_old, by_new = old.updates - begin_old, new.updates - begin_new
        new.process.terminate()
        new.process.wait()
        if old.process.wait():
            sys.exit(f"the run ended with exit code {old.process.returncode}")
    sys.stdout.write(
        f"updates {begin_old} to {begin_old + by_old} of the old run, beside {by_new} of the new run from its "
        f"{begin_new}th: {by_old / by_new:.3f} (wanted: at least 0.97)\n"
        f"launcher: {share:.4f} of a core (wanted: at most 0.05)\n"
    )


def _plan(folder: Path) -> Path:
    path = folder / "two.yaml"
    options = ["--topology", "2", "--straight", "--bandwidth", "10Gbit/s", "-o", str(path)]
    command = [*PDTOOL, "partition", str(ROOT / "profiles" / "mnist.json"), *options]
    subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    return path


def _start(plan: Path, out: Path, epochs: int) -> Run:
    command = [*PDTOOL, "run", str(plan), "-o", str(out), "--epochs", str(epochs)]
    return Run(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), out)


def _until(run: Run, updates: int, beside: Run | None = None) -> None:
    """Wait until a run has made so many updates."""
    while True:
        runs = [one for one in (run, beside) if one is not None]
        ended = [one for one in runs if not one.poll()]
        if run.updates >= updates:
            return
        for one in ended:
            sys.exit(f"the {one.out.name} run ended with exit code {one.process.returncode} after {one.updates}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
