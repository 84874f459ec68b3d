"""Print how long the parts of the road take on this machine: `make bench-road`. Figures, no pass or fail."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pdtool.artifacts.device import Device
from pdtool.artifacts.profile import Node, Profile

ROOT = Path(__file__).parents[2]
PDTOOL = [sys.executable, "-m", "pdtool"]


def pdtool(folder: Path, *arguments: str) -> float:
    """Seconds of one command, in a folder that holds what earlier ones wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    done = subprocess.run([*PDTOOL, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pdtool {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return time.perf_counter() - start


def first_update(folder: Path, *arguments: str) -> float:
    """Seconds from starting `pdtool run` to the first line of its metrics.jsonl."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    metrics = folder / "runs" / "bench" / "metrics.jsonl"
    start = time.perf_counter()
    process = subprocess.Popen(
        [*PDTOOL, "run", *arguments, "-o", "runs/bench"], cwd=folder, env=environment, stderr=subprocess.DEVNULL
    )
    while not (metrics.is_file() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    if process.wait():
        raise SystemExit(f"pdtool run: exit code {process.returncode}")
    return seconds


def load_time(folder: Path, operators: int = 2000) -> float:
    """Seconds to read and check a profile of a chain of operators."""
    nodes = [Node(name="n0", op="input", module="")]
    for i in range(1, operators):
        nodes.append(
            Node(
                name=f"n{i}",
                op="Linear",
                module=f"layers.{i}",
                inputs=(f"n{i - 1}",),
                forward_s=1e-3,
                backward_s=2e-3,
                output_bytes=4096,
                parameter_bytes=65536,
            )
        )
    profile = Profile(
        name="chain",
        model=None,
        batch_size=1,
        device=Device(name="none", kind="estimated"),
        step_s=0.0,
        coverage=0.0,
        nodes=tuple(nodes),
    )
    profile.save(folder / "chain.json")
    start = time.perf_counter()
    Profile.load(folder / "chain.json")
    return time.perf_counter() - start


def help_cpu() -> float:
    """Processor seconds of `pdtool --help`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*PDTOOL, "--help"], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run everything in a temporary folder."""

    def tell(what: str, seconds: float, wanted: str) -> None:
        sys.stdout.write(f"{what:<58} {seconds:7.2f} s   (wanted: under {wanted})\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tell("pdtool --help, processor time", help_cpu(), "0.5 s")
        tell("load a profile of 2,000 operators", load_time(folder), "1 s")
        tell(
            "profile ResNet-50 at minibatch 8",
            pdtool(folder, "profile", "pdtool.zoo.resnet50", "--batch-size", "8"),
            "90 s",
        )
        pdtool(folder, "profile", "pdtool.zoo.vgg16", "--batch-size", "4")
        pdtool(folder, "partition", "profiles/vgg16.json", "--topology", "4", "--straight", "-o", "plans/vgg16-4.yaml")
        tell("codegen of VGG-16 with its proof", pdtool(folder, "codegen", "plans/vgg16-4.yaml"), "60 s")
        pdtool(folder, "profile", "pdtool.zoo.digits", "--threads", "1")
        pdtool(folder, "partition", "profiles/digits.json", "--topology", "3", "--straight")
        pdtool(folder, "codegen", "plans/digits-3.yaml")
        tell("pdtool run to the first update, 3 workers", first_update(folder, "plans/digits-3.yaml"), "15 s")


if __name__ == "__main__":
    main()
