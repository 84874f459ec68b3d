"""Print what `pdtool probe` finds between two network namespaces with a shaped link: `make bench-probe`. Needs root.

netns pd-a (machine 0)  veth, tbf RATE  <------>  veth, tbf RATE  netns pd-b (machine 1)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pdtool.artifacts.cluster import ClusterFile

ROOT = Path(__file__).parents[2]
SPACES = ("pd-a", "pd-b")
ALLOWED = 0.10  # of the link's rate; the headers of Ethernet, IP and TCP take 0.05 of it
HEADERS = 1448 / 1514


def sh(*command: str) -> None:
    """A command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def worker_environment(rate: str) -> Iterator[None]:
    """Both namespaces, joined by a link of `rate` each way, as tc writes it."""
    try:
        for space in SPACES:
            sh("ip", "netns", "add", space)
        sh("ip", "link", "add", "veth", "netns", SPACES[0], "type", "veth", "peer", "name", "veth", "netns", SPACES[1])
        for number, space in enumerate(SPACES, start=1):
            inside = ("ip", "netns", "exec", space)
            sh(*inside, "ip", "address", "add", f"10.98.76.{number}/24", "dev", "veth")
            sh(*inside, "ip", "link", "set", "veth", "up")
            sh(*inside, "ip", "link", "set", "lo", "up")
            sh(
                *inside,
                "tc",
                "qdisc",
                "add",
                "dev",
                "veth",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256k",
                "latency",
                "20ms",
            )
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def probed(topology: str, folder: Path) -> ClusterFile:
    """`pdtool probe` on both machines."""
    path = folder / f"{topology}.yaml"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "veth"}
    processes = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                space,
                sys.executable,
                "-m",
                "pdtool",
                "probe",
                "--topology",
                topology,
                "-o",
                str(path),
                "--device",
                "cpu",
                "--nnodes",
                "2",
                "--node-rank",
                str(number),
                "--rdzv-endpoint",
                "10.98.76.1:29511",
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, space in enumerate(SPACES)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        if process.returncode:
            raise SystemExit(errors)
    return ClusterFile.load(path)


def main() -> None:
    """Two rates, one and two workers a machine."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        sys.stdout.write("skipped: needs root, ip and tc to make network namespaces\n")
        return
    missed = []
    for rate, bits in (("100mbit", 1e8), ("1gbit", 1e9)):
        for topology in ("2", "2x2"):
            with worker_environment(rate), tempfile.TemporaryDirectory() as name:
                found = probed(topology, Path(name))
            assert found.measured
            link, level = found.levels[0], found.measured.levels[0]
            share = link.bandwidth_bytes_per_s * 8 / bits
            sys.stdout.write(
                f"{rate:>8} {topology:>4}: {share:6.1%} of the rate ({share / HEADERS:6.1%} of what headers leave), "
                f"latency {link.latency_s * 1e6:5.0f} µs, all-reduce at "
                f"{level.allreduce_bytes_per_s / link.bandwidth_bytes_per_s:.0%} of the ring formula\n"
            )
            sys.stdout.flush()
            if abs(share - 1) > ALLOWED:
                missed.append(f"{rate} {topology}")
    if missed:
        raise SystemExit(f"more than {ALLOWED:.0%} off: {', '.join(missed)}")


if __name__ == "__main__":
    main()
