"""Compare predicted and measured memory: `make bench-memory`. The aim is 0.91 to 1.10 for the fullest stage.

Each model is profiled, planned in several ways, and trained for some minibatches by real workers; measured is the peak
of a worker's memory beside what it held before, as `pdtool run` reports it.

    --env NAME=VALUE ...   an environment for `pdtool run`, such as MALLOC_MMAP_THRESHOLD_=65536
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent / "memory_bench"
PDTOOL = (sys.executable, "-m", "pdtool")
# Name -> its file, and options of `profile`.
MODELS = {
    "MLP 8 × 2048, Adam": ("mlp.py", "--batch-size", "64"),
    "GPT 8 × 512, AdamW": ("pdtool.zoo.gpt2", "--set", "layers=8", "--set", "width=512", "--batch-size", "8"),
    "residual CNN": ("cnn.py", "--batch-size", "32"),
    "LSTM 4 × 512": ("pdtool.zoo.lstm_lm", "--set", "width=512", "--set", "layers=4", "--batch-size", "16"),
    "MNIST": ("pdtool.zoo.mnist", "--batch-size", "64"),
}
# Name -> options of `partition`.
PLANS = {
    "1-1": ("--topology", "2", "--strategy", "straight"),
    "1-1-1": ("--topology", "3", "--strategy", "straight"),
    "1-1, flush": ("--topology", "2", "--strategy", "straight", "--schedule", "1f1b-flush", "--microbatches", "4"),
    "2": ("--topology", "2", "--strategy", "data-parallel"),
}


def main() -> None:
    """Print a table, a line for each stage of each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", default="24")
    asked = parser.parse_args()
    environment = dict(pair.split("=", 1) for pair in asked.env)
    tell("| model | plan | stage | predicted MB | measured MB | measured ÷ predicted | samples/s |")
    tell("|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(shutil.copytree(HERE, Path(folder, "bench")))
        for model in asked.only:
            file, *options = MODELS[model]
            pdtool("profile", file, *options, "--threads", "1", "--device", "cpu", "-o", "profile.json")
            for plan, chosen in PLANS.items():
                given = (*chosen, "--bandwidth", "10GB/s", "--memory", "none")
                pdtool("partition", "profile.json", *given, "-o", "plan.yaml")
                for line in trained(f"| {model} | {plan}", asked.steps, environment):
                    tell(line)


def trained(begin: str, steps: str, environment: dict[str, str]) -> Iterator[str]:
    """Train the plan, and say for each stage what was predicted and measured."""
    pdtool("codegen", "plan.yaml")
    pdtool("run", "plan.yaml", "-o", "run", "--steps", steps, "--threads", "1", "--device", "cpu", **environment)
    report = json.loads(Path("run/report.json").read_text(encoding="utf-8"))
    subprocess.run(["rm", "-rf", "run", "plan"], check=True)
    for number, stage in enumerate(report["stages"]):
        predicted, measured = report["predicted"]["memory_bytes"][number], stage["peak_memory_bytes"]
        figures = f"{predicted / 1e6:.4g} | {measured / 1e6:.4g} | {measured / predicted:.2f}"
        yield f"{begin} | {number} | {figures} | {report['throughput_samples_per_s']:.4g} |"


def tell(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pdtool(*arguments: str, **environment: str) -> None:
    """Run a command, which must succeed."""
    done = subprocess.run([*PDTOOL, *arguments], env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pdtool {' '.join(arguments)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
