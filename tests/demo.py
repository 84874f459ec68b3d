"""`make demo`: pdtool's commands on a model that trains here, and of what they print the lines that tell its story.

With -v all that they print.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
WRITTEN = ("profiles/demo.json", "plans/demo-2.yaml", "plans/demo-2", "runs/demo", "runs/demo.html")


@dataclass(frozen=True)
class Step:
    """A command, what it is for, and the lines of its output that are shown: those that one of the patterns finds.

    Attributes:
        first: so many lines are shown in any case.
        file: of which `forward` is shown afterwards.
    """

    title: str
    command: str
    shown: str
    first: int = 0
    file: str = ""


STEPS = (
    Step(
        "What does each operator of the model cost? (a small VGG that learns MNIST, 64 images at once)",
        "pdtool profile pdtool/zoo/mnist.py --threads 1 --batch-size 64 -o profiles/demo.json",
        r"^total|^warning",
        first=6,
    ),
    Step(
        "How is it best divided over two machines with 100 Mbit/s between them? (1-1: two stages, one worker each)",
        "pdtool partition profiles/demo.json --topology 2 --bandwidth 100Mbit/s --memory 8GB -o plans/demo-2.yaml",
        r"^simulated|^certificate|^rejected: (data parallelism|one worker)",
        first=7,
    ),
    Step(
        "Each part is a file that reads like your own; outputs and gradients are checked against the model's.",
        "pdtool codegen plans/demo-2.yaml",
        r"^checked",
        file="plans/demo-2/stage_1.py",
    ),
    Step(
        "Two processes train it here, one on each core.",
        "pdtool run plans/demo-2.yaml -o runs/demo --epochs 12 --target 'accuracy>=0.97'",
        r"^epoch \d+/\d+:|^per minibatch|^target .*reached|^warning",
    ),
    Step(
        "And VGG-16 on four servers with a V100 each and 2.5 Gbit/s? No GPU is needed to plan for them.",
        "pdtool profile pdtool/zoo/vgg16.py --device v100 --batch-size 64 -o profiles/demo-vgg16.json",
        r"^$",
    ),
    Step(
        "",
        "pdtool partition profiles/demo-vgg16.json --topology 4 --bandwidth 2.5Gbit/s -o plans/demo-vgg16-4.yaml",
        r" on 4 at |^simulated",
    ),
    Step(
        "What was planned and measured, on one page: open it in a browser.",
        "pdtool report runs/demo -o runs/demo.html",
        r"^wrote",
    ),
)


def main() -> None:
    """Run the steps; the first that fails ends the demo with all that it printed."""
    begin_s = time.monotonic()
    for path in map(ROOT.joinpath, WRITTEN):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for step in STEPS:
        show(step, run(step))
    tell(f"\n(the demo took {time.monotonic() - begin_s:.0f} s; all of its output: .venv/bin/python tests/demo.py -v)")
    tell("for a model of your own: .venv/bin/pdtool init myproject")


def run(step: Step) -> str:
    """Return what a command prints."""
    command = [sys.executable, "-m", *shlex.split(step.command)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"$ {step.command}\n{done.stdout}")
    return done.stdout


def show(step: Step, output: str) -> None:
    """Print a step, with the lines of its output that are to be shown."""
    tell(f"\n# {step.title}\n$ {step.command}" if step.title else f"$ {step.command}")
    for line in output.splitlines() if "-v" in sys.argv[1:] else story(step, output):
        tell(line)
    if step.file:
        text = (ROOT / step.file).read_text(encoding="utf-8")
        tell(f"$ cat {step.file}\n…\n{text[text.index('    def forward') :].rstrip()}")


def tell(text: str) -> None:
    """Print a text at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def story(step: Step, output: str) -> list[str]:
    """Return the lines that are to be shown."""
    lines = [line for line in output.splitlines() if "still running" not in line]
    return [line for number, line in enumerate(lines) if number < step.first or re.search(step.shown, line)]


if __name__ == "__main__":
    main()
