"""Answer the claims of PipeDream, each by commands of pdtool: `make reproduce`, which writes docs/reproduction.md.

What was measured is kept in the folder of --keep; a reproduction that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
from reproduction import (
    bandwidth,
    depth,
    learning,
    prediction,
    real_computing,
    rivals,
    slow_links,
    table1,
    time_to_accuracy,
)
from reproduction.results import ROOT, Results, real_time_priority

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST = 19  # of nice

SECTIONS = {
    "time-to-accuracy": time_to_accuracy,
    "slow-links": slow_links,
    "learning": learning,
    "table1": table1,
    "bandwidth": bandwidth,
    "rivals": rivals,
    "depth": depth,
    "prediction": prediction,
    "real-computing": real_computing,
}
COMPUTING = ("time-to-accuracy", "real-computing")  # they are timed, and need the cores for themselves
EMULATED = ("slow-links", "prediction", "rivals", "table1", "bandwidth")  # they are timed, and sleep most of the time
UNTIMED = {"bandwidth": bandwidth.plan, "learning": learning.measure, "depth": depth.measure}
KEPT = ROOT / "runs" / "reproduction"


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="A few cases of each section, in five minutes.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="Some of the sections.")
    parser.add_argument(
        "--keep", type=Path, default=KEPT, metavar="FOLDER", help="Of what was measured.  [default: runs/reproduction]"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="The page.  [docs/reproduction.md; needed for a part]"
    )
    arguments = parser.parse_args()
    if not arguments.output:
        if arguments.quick or len(arguments.only) < len(SECTIONS):
            parser.error("a part of the sections, or of their cases: name its page with -o")
        arguments.output = ROOT / "docs" / "reproduction.md"
    os.environ["PYTHONPATH"] = str(ROOT)
    folder = arguments.keep.resolve() / ("quick" if arguments.quick else "full")
    measure(folder, arguments.only, quick=arguments.quick)
    lines = list(head())
    for name in arguments.only:
        lines += section_lines(name, Results(folder), arguments.output, quick=arguments.quick)
    arguments.output.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    sys.stderr.write(f"wrote {arguments.output}\n")


def measure(folder: Path, names: Sequence[str], *, quick: bool) -> None:
    """Measure what is missing of some sections.

    Emulated workers sleep most of the time. Where they may have real-time priority, they get a core whenever they wake,
    and what is not timed is measured beside them.
    """
    results = Results(folder)
    for name in [name for name in COMPUTING if name in names]:
        SECTIONS[name].measure(results, quick=quick)
    untimed = multiprocessing.get_context("spawn").Process(target=measure_untimed, args=(folder, names, quick))
    untimed.start()
    try:
        if not real_time_priority():
            untimed.join()
        for name in [name for name in EMULATED if name in names]:
            SECTIONS[name].measure(results, quick=quick)
        untimed.join()
    except BaseException:
        untimed.terminate()
        raise
    if untimed.exitcode:
        sys.exit("stopped: what is not timed could not be measured, see above")


def measure_untimed(folder: Path, names: Sequence[str], quick: bool) -> None:
    """Measure what is missing, and not timed, of some sections; in a process that lets all others go first."""
    os.nice(LAST)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what it has started is ended with it
    for name in [name for name in UNTIMED if name in names]:
        UNTIMED[name](Results(folder), quick=quick)


def section_lines(name: str, results: Results, output: Path, *, quick: bool) -> Iterator[str]:
    """Yield the lines of a section, whose figures are there, and draw its picture beside the page."""
    section = SECTIONS[name]
    figures = section.measure(results, quick=quick)
    yield from section.page(figures)
    if hasattr(section, "PICTURE"):
        file, words = section.PICTURE
        save(section.plot(figures), output.with_name(file))
        yield f"![{words}]({file})\n"
    minutes = sum(results.seconds) / 60
    yield f"Measured at {', '.join(sorted(results.commits))}, in {minutes:.0f} min.\n"


def save(picture: Figure, path: Path) -> None:
    """Write a picture as SVG; the same picture is the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        picture.savefig(path, metadata={"Date": None})


def head() -> Iterator[str]:
    """What stands above all sections."""
    yield "# The claims of PipeDream, answered by commands\n"
    yield (
        f"`make reproduce` writes this page, here on {os.cpu_count()} cores. Each section ends with the commits at "
        "which it was measured, and the time that this took (for measurements side by side, the sum). If a GPU is "
        "named, its profile is estimated (`pdtool profile --device`). Emulated times come from real worker processes, "
        "which sleep for the times in the profile and send their messages over shaped links (`pdtool emulate`).\n"
    )


if __name__ == "__main__":
    main()
