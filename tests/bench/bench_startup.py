"""Print what memory each worker of a large GPT has when its training begins, and had at most until then.

`make bench-startup`: 1.5 billion parameters in 4 stages, in single precision. Figures beside a target, no pass or fail:
its own stage and 300 MB. Counted is resident memory without pages of files, as /proc tells it, torch included. The run
is ended as soon as all workers have begun, for gradients and Adam's moments would take three times as much again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime_bench.road import MODELS, ROOT, pdtool

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.runtime.status import read_status

STAGES, ALLOWED_BYTES = 4, 300e6
ROW = "{:>5} {:>10} {:>10} {:>12} {:>10} {:>12}\n"


@dataclass
class Memory:
    """Bytes of one worker, as far as they have been seen."""

    peak: int = 0
    at_start: int = 0


def main() -> None:
    """Plan, generate, start, and look at the workers until all have begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=49, metavar="N", help="Of the model.")
    parser.add_argument("--width", type=int, default=1600, metavar="N", help="Of the model.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), str(MODELS / "gpt.py")
        sizes = ("--set", f"layers={arguments.layers}", "--set", f"width={arguments.width}")
        pdtool(folder, "profile", model, *sizes, "--batch-size", "1", "--device", "a100-80gb", "-o", "profile.json")
        pdtool(folder, "partition", "profile.json", "--topology", str(STAGES), "--straight", "-o", "plan.yaml")
        pdtool(folder, "codegen", "plan.yaml", "--model", model)
        start = time.perf_counter()
        workers = watched(folder, model)
        seconds = time.perf_counter() - start
        own = stage_bytes(folder)
    sys.stdout.write(f"{sum(own) / 4e9:.2f} billion parameters; training began after {seconds:.0f} s; in MB:\n")
    sys.stdout.write(ROW.format("stage", "its own", "at start", "over its own", "at most", "over its own"))
    for s, worker in enumerate(workers):
        over = [each - own[s] for each in (worker.at_start, worker.peak)]
        figures = (own[s], worker.at_start, over[0], worker.peak, over[1])
        sys.stdout.write(ROW.format(s, *(f"{figure / 1e6:.0f}" for figure in figures)))
    sys.stdout.write(f"wanted over its own: at most {ALLOWED_BYTES / 1e6:.0f}\n")


def stage_bytes(folder: Path) -> list[int]:
    """Return the bytes of the parameters of each stage."""
    profile = Profile.load(folder / "profile.json")
    nodes = {node.name: node for node in profile.nodes}
    stages = Plan.load(folder / "plan.yaml").stage_nodes(profile)
    return [sum(nodes[name].parameter_bytes for name in names) for names in stages]


def watched(folder: Path, model: str) -> list[Memory]:
    """Run the plan until all workers have begun to train, and return what memory was seen of each."""
    command = [sys.executable, "-m", "pdtool", "run", "plan.yaml", "--model", model, "--epochs", "1", "-o", "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [Memory() for _ in range(STAGES)]
    with (folder / "run.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        while not all(worker.at_start for worker in workers):
            if process.poll() is not None:
                log.seek(0)
                raise SystemExit(f"pdtool run: exit code {process.returncode}\n{log.read()}")
            for rank, worker in enumerate(workers):
                with suppress(OSError, KeyError):
                    look(folder / "run", rank, worker)
            time.sleep(0.01)
        process.terminate()
        process.wait()
    return workers


def look(out: Path, rank: int, worker: Memory) -> None:
    """Note what a worker that has not begun to train has resident; raises OSError or KeyError where it is not there."""
    if worker.at_start:
        return
    doing = read_status(out, rank)
    has_begun = " of epoch " in doing.text
    lines = Path(f"/proc/{doing.pid}/status").read_text().splitlines()
    status = {
        key: 1024 * int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines) if " kB" in value
    }
    now = status["RssAnon"] + status["RssShmem"]
    worker.peak = max(worker.peak, now)
    worker.at_start = now if has_begun else 0


if __name__ == "__main__":
    main()
