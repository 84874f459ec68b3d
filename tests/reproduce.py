"""Answer the claims of PipeDream, each by commands of pdtool: `make reproduce`, which writes docs/reproduction.md.

What was measured is kept in the folder of --keep; a reproduction that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

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
from reproduction.results import ROOT, Results

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
    results = Results(arguments.keep.resolve() / ("quick" if arguments.quick else "full"))
    lines = list(head())
    for name in arguments.only:
        section = SECTIONS[name]
        results.commits.clear()
        results.seconds.clear()
        figures = section.measure(results, quick=arguments.quick)
        lines += section.page(figures)
        if hasattr(section, "PICTURE"):
            file, words = section.PICTURE
            section.plot(figures, str(arguments.output.with_name(file)))
            lines.append(f"![{words}]({file})\n")
        minutes = sum(results.seconds) / 60
        lines.append(f"Measured at {', '.join(sorted(results.commits))}, in {minutes:.0f} min.\n")
    arguments.output.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    sys.stderr.write(f"wrote {arguments.output}\n")


def head() -> Iterator[str]:
    """What stands above all sections."""
    yield "# The claims of PipeDream, answered by commands\n"
    yield (
        f"Written by `make reproduce` on {os.cpu_count()} cores; each section ends with the commits that it was "
        "measured at, and with the time that they took (of those side by side, the sum). Where a GPU is named, "
        "profiles are estimated (`pdtool profile --device`). Emulated times are those of real worker processes that "
        "sleep the times of the profile and send their messages over shaped links (`pdtool emulate`).\n"
    )


if __name__ == "__main__":
    main()
