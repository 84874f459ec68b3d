"""Mistakes of machines, in two network namespaces that a cable joins."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos.bench import Bench, Outcome

_ADDRESSES = ("10.211.77.1", "10.211.77.2")
_LATER_S = 3.0  # into the training, for what happens then


@dataclass(frozen=True)
class Mistake:
    """What one machine, or both, were told wrongly, and how each should end.

    Attributes:
        options: of `pdtool run` on each machine, after the right ones; None: the machine does not come.
        expected: exit codes and words, of each machine.
        event: `cut` the cable or `kill` machine 1's command while they train; `` nothing.
        model: text that is added to model.py on machine 1, which then has a folder of its own.
    """

    name: str
    options: tuple[Sequence[str] | None, Sequence[str] | None]
    expected: tuple[tuple[Sequence[int], str], tuple[Sequence[int], str]]
    event: str = ""
    model: str = ""


_NOBODY: tuple[Sequence[int], str] = ((0,), "")
_DIFFER = (2,)
MISTAKES = (
    Mistake("machine 1 does not come", ((), None), (((5,), "machine 1"), _NOBODY)),
    Mistake("machine 0 does not come", (None, ()), (_NOBODY, ((5,), "machine 0"))),
    Mistake(
        "another address",
        ((), ("--rdzv-endpoint", "10.211.78.9:29400")),
        (((5,), "machine 1"), ((5,), r"10\.211\.78\.9")),
    ),
    Mistake(
        "a name that is not known",
        ((), ("--rdzv-endpoint", "no-such-host.invalid:29400")),
        (((5,), "machine 1"), ((1, 2, 5), r"no-such-host\.invalid")),
    ),
    Mistake("two machines 0", ((), ("--node-rank", "0")), (((2, 5), "machine 1|in use"), ((2, 5), "machine 1|in use"))),
    Mistake("another --nnodes", ((), ("--nnodes", "3")), (((5,), "machine 1"), ((2,), "nnodes"))),
    Mistake("another seed", ((), ("--seed", "1")), ((_DIFFER, "--seed is 0 on machine 0"), (_DIFFER, "--seed"))),
    Mistake(
        "another schedule",
        ((), ("--schedule", "1f1b-flush")),
        ((_DIFFER, "--schedule is 1f1b on machine 0"), (_DIFFER, "--schedule")),
    ),
    Mistake(
        "another model.py",
        ((), ()),
        ((_DIFFER, "the model's file is"), (_DIFFER, "the model's file is")),
        model="\n# another learning rate\n",
    ),
    Mistake(
        "a folder that they do not share",
        ((), ("-o", "runs/elsewhere")),
        ((_DIFFER, "is not one folder"), (_DIFFER, "is not one folder")),
    ),
    Mistake("the cable is cut", ((), ()), (((5,), "rank [0-3]"), ((5,), "rank [0-3]")), event="cut"),
    Mistake("machine 1's command is killed", ((), ()), (((5,), "rank [23]"), ((-9,), "")), event="kill"),
)


def can_make_namespaces() -> bool:
    """Whether this process may make network namespaces: it needs root, and `ip`."""
    if not shutil.which("ip"):
        return False
    name = f"pdtool-{os.getpid()}-probe"
    commands = [["ip", "netns", "add", name], ["ip", "netns", "del", name]]
    return all(subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in commands)


def mistakes(bench: Bench, trials: int) -> Iterator[Outcome]:
    """Yield the outcome of each mistake; none where namespaces cannot be made, which needs root."""
    if not can_make_namespaces():
        return
    with _namespaces() as (names, devices):
        for trial, mistake in enumerate(MISTAKES[:trials]):
            yield _try(bench, trial, mistake, names, devices)


def _try(bench: Bench, trial: int, mistake: Mistake, names: Sequence[str], devices: Sequence[str]) -> Outcome:
    outcome, out = Outcome(mistake.name), str(bench.folder / f"runs/machines-{trial}")
    commands = []
    for k, (name, device, options) in enumerate(zip(names, devices, mistake.options, strict=True)):
        if options is None:
            continue
        folder = _folder_of_its_own(bench, trial, mistake.model) if mistake.model and k else bench.folder
        endpoint = f"{_ADDRESSES[0]}:29400"
        nodes = ["--nnodes", "2", "--node-rank", str(k), "--rdzv-endpoint", endpoint]
        epochs = 1000 if mistake.event else 2
        arguments = bench.run(out, epochs, *nodes, *options)
        prefix = ["ip", "netns", "exec", name]
        commands.append((k, bench.start(*arguments, prefix=prefix, folder=folder, GLOO_SOCKET_IFNAME=device)))
    if mistake.event:
        _wait_for_training(Path(out))
        if mistake.event == "kill":
            commands[1][1].process.kill()
        else:
            subprocess.run(["ip", "netns", "exec", names[1], "ip", "link", "set", devices[1], "down"], check=True)
    for k, command in commands:
        outcome.add(command.ended(), *mistake.expected[k])
    outcome.losses += bench.losses(out, outcome.name)
    if mistake.event == "cut":
        subprocess.run(["ip", "netns", "exec", names[1], "ip", "link", "set", devices[1], "up"], check=True)
    return outcome


def _folder_of_its_own(bench: Bench, trial: int, added: str) -> Path:
    folder = bench.folder / f"machine-{trial}"
    folder.mkdir()
    for name in ("plans", "profiles"):
        shutil.copytree(bench.folder / name, folder / name)
    (folder / "model.py").write_text((bench.folder / "model.py").read_text() + added)
    return folder


def _wait_for_training(out: Path) -> None:
    deadline = time.monotonic() + 30
    while not (out / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(_LATER_S)


@contextmanager
def _namespaces() -> Iterator[tuple[list[str], list[str]]]:
    """Two namespaces with an address each, and a cable between them; yields their names and devices."""
    names = [f"pdtool-{os.getpid()}-{k}" for k in (0, 1)]
    devices = [f"pd{os.getpid() % 10**6}{'ab'[k]}" for k in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, address in zip(names, devices, _ADDRESSES, strict=True):
            _ip("link", "set", device, "netns", name)
            for command in (["addr", "add", f"{address}/24", "dev", device], ["link", "set", device, "up"]):
                _ip("-n", name, *command)
            _ip("-n", name, "link", "set", "lo", "up")
        yield names, devices
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
