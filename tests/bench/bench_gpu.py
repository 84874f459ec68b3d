"""Print how fast two workers train a GPT on one GPU, and the GPU memory of five models: a part of `make gpu-check`.

A GPU that two workers share has no more to give than to one: what is missing to 1 is what dividing the model costs. The
prediction for two workers is for a GPU each; the time for one GPU is the sum of what its stages compute.

Memory is that of each stage over its prediction: that of tensors, and what torch's allocator reserved for them, first
as pdtool sets it, then without segments that grow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir
from typing import Any

import torch
from runtime_bench import memory
from runtime_bench.road import MODELS

import pdtool
from pdtool.artifacts.report import Report

GPT: Mapping[str, Any] = {"layers": 12, "width": 768, "heads": 12, "hidden": 2048, "vocabulary": 8192}
FIXED = "expandable_segments:False"


def trained(profile: str, source: str, workers: int, name: str, steps: int, **options: Any) -> Report:
    """The report of 2 epochs, of which the second one is measured."""
    pdtool.partition(profile, topology=str(workers), output=f"{name}.yaml", **options)
    pdtool.codegen(f"{name}.yaml", model=source)
    return pdtool.run(f"{name}.yaml", device="cuda", epochs=2, steps=steps, output=f"runs/{name}")


def throughput() -> Iterator[str]:
    """A line for one worker, one for two that share the GPU, and the ratio."""
    pdtool.profile("pdtool.zoo.llm", settings={**GPT, "dtype": "float32"}, batch_size=2, device="cuda", output="p.json")
    reports = [trained("p.json", "pdtool.zoo.llm", n, f"gpt-{n}", 60, strategy="straight") for n in (1, 2)]
    for report in reports:
        assert report.predicted
        yield (
            f"{len(report.stages)} workers: {report.measured.bottleneck_s * 1e3:.1f} ms a minibatch (predicted for "
            f"computing alone: {sum(report.predicted.compute_s) * 1e3:.1f})"
        )
    one_s, two_s = (report.measured.bottleneck_s for report in reports)
    yield f"throughput of two workers on one GPU over one: {one_s / two_s:.3f} (wanted: 0.95)"


def memory_of(name: str) -> Iterator[str]:
    """A line for each way of running a model: measured and reserved memory of its stages over the prediction."""
    batch_size, settings = memory.MODELS[name]
    source = shutil.copy(MODELS / f"{name}.py", ".")
    pdtool.profile(source, settings=settings, batch_size=batch_size, device="cuda", output="p.json")
    for replicas, options in (("1-1", {}), ("1-1", {"schedule": "1f1b-flush", "microbatches": 4}), ("1", {})):
        schedule = options or {"schedule": "1f1b"}
        way = f"{replicas}-{schedule['schedule']}"
        report = trained(
            "p.json", source, len(replicas.split("-")), way, 8, memory="none", replicas=replicas, **schedule
        )
        assert report.predicted
        figures = []
        for stage, predicted in zip(report.stages, report.predicted.memory_bytes, strict=True):
            peak, reserved = ((size or 0) / predicted for size in (stage.peak_memory_bytes, stage.peak_reserved_bytes))
            figures.append(f"{peak:.2f} (reserved {reserved:.2f}) of {predicted / 1e6:.0f} MB")
        yield f"{name}, {way}: {', '.join(figures)}"


def main() -> None:
    """Print all figures; with the name of a model, those of its memory."""
    if not torch.cuda.is_available():
        sys.stdout.write("no CUDA device here: nothing measured\n")
        return
    names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for line in memory_of(names[0]) if names else throughput():
            sys.stdout.write(line + "\n")
    if names:
        return
    for segments, variables in (("segments that grow", {}), ("fixed segments", {"PYTORCH_CUDA_ALLOC_CONF": FIXED})):
        sys.stdout.write(f"memory over its prediction, {segments}:\n")
        sys.stdout.flush()
        command = [sys.executable, __file__]
        environment = {**os.environ, **variables}
        started = [
            subprocess.Popen([*command, name], env=environment, stderr=subprocess.PIPE) for name in memory.MODELS
        ]
        for process in started:  # memory is the same beside others
            _, error = process.communicate()
            if process.returncode:
                sys.stdout.write(error.decode())


if __name__ == "__main__":
    main()
