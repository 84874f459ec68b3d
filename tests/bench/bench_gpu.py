"""Print how fast two workers train a GPT on one GPU, by CUDA IPC, beside one worker: a part of `make gpu-check`.

A GPU that two workers share has no more to give than to one: what is missing to 1 is what dividing the model costs. The
prediction for two workers is for a GPU each; the time for one GPU is the sum of what its stages compute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from pdtool.artifacts.report import Report

ROOT = Path(__file__).parents[2]
GPT = ("layers=12", "width=768", "heads=12", "hidden=2048", "vocabulary=8192", "dtype=float32")


def pdtool(folder: Path, *arguments: str) -> None:
    """Run a command in a folder that holds what earlier ones wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pdtool", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"pdtool {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")


def trained(folder: Path, workers: int) -> Report:
    """The report of 2 epochs of 60 minibatches, of which the second one is measured."""
    plan = f"plans/llm-{workers}.yaml"
    pdtool(folder, "partition", "profiles/llm.json", "--topology", str(workers), "--straight", "-o", plan)
    pdtool(folder, "codegen", plan)
    pdtool(folder, "run", plan, "--device", "cuda", "--epochs", "2", "--steps", "60", "-o", f"runs/{workers}")
    return Report.load(folder / f"runs/{workers}/report.json")


def main() -> None:
    """Profile on the GPU, train with one worker and with two, and print the figures."""
    if not torch.cuda.is_available():
        sys.stdout.write("no CUDA device here: nothing measured\n")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [part for setting in GPT for part in ("--set", setting)]
        pdtool(folder, "profile", "pdtool.zoo.llm", *settings, "--batch-size", "2", "--device", "cuda")
        one, two = trained(folder, 1), trained(folder, 2)
    for report in (one, two):
        assert report.predicted
        memory = [f"{(stage.peak_memory_bytes or 0) / 1e6:.0f}" for stage in report.stages]
        predicted = [f"{size / 1e6:.0f}" for size in report.predicted.memory_bytes]
        sys.stdout.write(
            f"{len(report.stages)} workers: {report.measured.bottleneck_s * 1e3:.1f} ms a minibatch (predicted for "
            f"computing alone: {sum(report.predicted.compute_s) * 1e3:.1f}); memory {' '.join(memory)} MB "
            f"(predicted {' '.join(predicted)})\n"
        )
    ratio = one.measured.bottleneck_s / two.measured.bottleneck_s
    sys.stdout.write(f"throughput of two workers on one GPU over one: {ratio:.3f} (wanted: 0.95)\n")


if __name__ == "__main__":
    main()
