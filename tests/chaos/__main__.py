"""Run all trials and print what happened; exits with 1 if anything was wrong.

kills      signals to workers, the command and its fork server, at random moments
machines   mistakes of two machines, in network namespaces, where root allows
damages    checkpoints that are not as they were written
pairs      two runs in one folder
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.bench import Bench, Outcome
from chaos.damages import damages
from chaos.kills import kills
from chaos.machines import MISTAKES, mistakes
from chaos.pairs import pairs

ROW = "{:<10} {:>7} {:>6} {:>8} {:>7} {:>13} {:>15}\n"


def main() -> None:
    """All trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--machines", type=int, default=len(MISTAKES))
    parser.add_argument("--damages", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # what starts this with `&` or nohup ignores them
        signal.signal(number, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="pdtool-chaos-") as name:
        bench = Bench(Path(name))
        kinds = {
            "kills": kills(bench, options.kills, options.seed),
            "machines": mistakes(bench, options.machines),
            "damages": damages(bench, options.damages, options.seed),
            "pairs": pairs(bench, options.pairs, options.seed),
        }
        rows = {kind: _all(kind, outcomes) for kind, outcomes in kinds.items()}
    sys.stdout.write(ROW.format("", "trials", "hangs", "orphans", "losses", "wrong causes", "longest, s"))
    for kind, outcomes in rows.items():
        counts = [sum(map(bool, faults)) for faults in zip(*map(_faults, outcomes), strict=True)] or [0] * 4
        longest_s = max((outcome.seconds for outcome in outcomes), default=0)
        sys.stdout.write(ROW.format(kind, len(outcomes), *counts, f"{longest_s:.1f}"))
    sys.exit(any(any(_faults(outcome)) for outcomes in rows.values() for outcome in outcomes))


def _all(kind: str, outcomes: Iterator[Outcome]) -> list[Outcome]:
    done = []
    for outcome in outcomes:
        done.append(outcome)
        sys.stderr.write(f"{kind} {len(done)}: {outcome.name}, {outcome.seconds:.1f} s\n")
        for fault in (fault for faults in _faults(outcome) for fault in faults):
            sys.stderr.write(f"    {fault}\n")
    return done


def _faults(outcome: Outcome) -> tuple[list[str], ...]:
    return outcome.hangs, outcome.orphans, outcome.losses, outcome.wrong_causes


if __name__ == "__main__":
    main()
