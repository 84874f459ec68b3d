"""Print how near the runtime comes to what is possible: `make bench-runtime`. Figures beside targets, no pass or fail.

    a  emulated compute against the pace of the slowest stage     runtime_bench/emulated.py
    b  real compute against one process, two, and others' ways    runtime_bench/real.py
    c  memory against the plan's prediction                       runtime_bench/memory.py
    d  pdtool's own time per action                               runtime_bench/overhead.py
    e  samples that are slow to load, with loader workers         runtime_bench/loading.py

Every figure is a ratio within one repeat, or a time; the median of the repeats counts. On a machine that others use
only the ratios mean something, and b's nothing; a and d compute little, so that `chrt -r 1` in front (root) keeps them
right even there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from runtime_bench import emulated, loading, memory, overhead, real
from runtime_bench.rows import heading

PARTS = {
    "a": (emulated, "emulated compute: throughput over what the slowest stage allows"),
    "b": (real, "real compute: samples/s over those of one process"),
    "c": (memory, "memory: peak of a worker over the plan's prediction"),
    "d": (overhead, "overhead: microseconds per action"),
    "e": (loading, "loading: throughput with slow samples over that with samples that take no time"),
}


def parts(text: str) -> str:
    """Return the letters of parts; raises ValueError where one is none."""
    if not text or set(text) - PARTS.keys():
        raise ValueError(text)
    return text


def main() -> None:
    """Run the parts asked for in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=parts, default="abcde", metavar="PARTS", help="Some of a, b, c, d, e: abd.")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Of each measurement.")
    parser.add_argument("--quick", action="store_true", help="Tiny sizes, to see that it works: figures mean nothing.")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/bench-runtime.json"), metavar="FILE", help="Where the figures go, too."
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Leave all runs there, with their traces.")
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    os.environ["OMP_NUM_THREADS"] = "1"  # as torch elastic has it for its workers
    rows, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = (arguments.keep or Path(name)).resolve()
        for part in arguments.only:
            module, title = PARTS[part]
            heading(f"{part}. {title}")
            for row in module.rows(folder / part, repeats, arguments.quick):
                row.show()
                rows.append(row)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "repeats": repeats,
        "quick": arguments.quick,
        "seconds": time.perf_counter() - start,
        "rows": [asdict(row) | {"value": row.value} for row in rows],
    }
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(f"\nwrote {arguments.json}; {content['seconds']:.0f} s, load {content['load'][0]:.1f}\n")


if __name__ == "__main__":
    main()
