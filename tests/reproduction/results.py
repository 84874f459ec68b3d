"""Results that are kept, so that a reproduction goes on where it was stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIDE_BY_SIDE = 2  # processes, where nothing is timed


def real_time_priority() -> list[str]:
    """Return the words before a command that give it real-time priority; none where that is not allowed.

    Emulated workers sleep for the most part, and are late when they do not get a core at once.
    """
    command = ["chrt", "--rr", "50"]
    is_allowed = (
        shutil.which("chrt") and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    )
    return command if is_allowed else []


def commit() -> str:
    """Return the commit of this tree, marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=, changed"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Results:
    """The figures of a reproduction, one file for each, with the commit that they were measured at.

    Attributes:
        folder: of the files, and in `work/`, by commit, of profiles, plans and runs.
        commits: of the figures that were asked for.
        seconds: that measuring each of them took.
    """

    folder: Path
    commits: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)

    @property
    def work(self) -> Path:
        """Where the commands are run."""
        path = self.folder / "work" / commit().replace(", ", "-")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the figures of this name, measured now if no earlier reproduction did."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            sys.stderr.write(f"measuring {name}\n")
            began_s = time.monotonic()
            figures = measure()
            content = {"commit": commit(), "seconds": round(time.monotonic() - began_s, 1), "figures": figures}
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        kept = json.loads(path.read_text(encoding="utf-8"))
        self.commits.add(kept["commit"])
        self.seconds.append(kept["seconds"])
        return kept["figures"]

    def pdtool(self, *arguments: str, before: Sequence[str] = ()) -> str:
        """Run a command of pdtool in the work folder; return what it writes on stdout.

        Args:
            before: words that stand before the command.

        Raises:
            RuntimeError: it failed.
        """
        command = [*before, sys.executable, "-m", "pdtool", *arguments]
        ended = subprocess.run(command, cwd=self.work, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"pdtool {' '.join(arguments)}: exit code {ended.returncode}\n{ended.stderr}")
        return ended.stdout

    def profile(self, model: str, device: str, batch_size: int, *settings: str) -> str:
        """Return the path of an estimated profile of a model of the zoo, made unless it is there."""
        name = "-".join([model, *(setting.replace("=", "") for setting in settings), device, str(batch_size)])
        path = f"profiles/{name}.json"
        if not (self.work / path).exists():
            source = str(ROOT / "pdtool" / "zoo" / f"{model}.py")
            options = [option for setting in settings for option in ("--set", setting)]
            self.pdtool("profile", source, "--device", device, "--batch-size", str(batch_size), *options, "-o", path)
        return path

    def plan(self, profile: str, topology: str, bandwidth: str, *options: str, name: str) -> str:
        """Return the path of a plan, made unless it is there.

        Args:
            options: of `pdtool partition`.
        """
        path = f"plans/{name}.yaml"
        if not (self.work / path).exists():
            cluster = ("--topology", topology, "--bandwidth", bandwidth)
            self.pdtool("partition", profile, *cluster, *options, "-o", path)
        return path

    def emulation(self, plan: str, against: str = "") -> dict[str, Any]:
        """Return the emulation of a plan and its rivals."""
        out = self.work / "runs" / Path(plan).stem
        if not (out / "emulation.json").exists():
            self.pdtool("emulate", plan, "--against", against, "-o", str(out), before=real_time_priority())
        content: dict[str, Any] = json.loads((out / "emulation.json").read_text(encoding="utf-8"))
        return content
