"""From a model file to a job that can be run in several ways, by the real road: profile, partition, codegen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.planner.choice.without_formulas import reschedule
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch.launcher import launch

ROOT = Path(__file__).parents[3]
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Job:
    """A model in straight stages, planned for PipeDream's 1F1B at a minibatch of plan.batch_size samples."""

    name: str
    plan: Plan
    profile: Profile
    bundle: Bundle
    bundle_dir: Path
    folder: Path

    def variant(self, *, batch_size: int | None = None, **changes: Any) -> Plan:
        """The same stages run in another way; predictions are those for the profile's minibatch."""
        plan = reschedule(self.plan, self.profile, changes) if changes else self.plan
        return plan.model_copy(update={"batch_size": batch_size or plan.batch_size})

    def run(self, name: str, plan: Plan, steps: int) -> Report:
        """Two epochs of `steps` minibatches, the first to warm up; measured is the second."""
        assert plan.model
        return launch(
            RunConfig(
                plan=plan,
                bundle=self.bundle,
                bundle_dir=self.bundle_dir,
                model=plan.model,
                trusted=True,
                out=self.folder / "runs" / name,
                epochs=2,
                steps=steps,
                device="cpu",
            )
        )


def make(folder: Path, name: str, batch_size: int, *, stages: int = 2, settings: Mapping[str, Any]) -> Job:
    """Profile with one thread, partition, generate."""
    profile(folder, name, batch_size, settings)
    options = ("--topology", str(stages), "--straight", "--simplest", "0%")
    job = planned(folder, name, "plan", "--bandwidth", "16Gbit/s", *options)
    if len(job.plan.stages) != stages:
        raise SystemExit(f"{name}: planned {len(job.plan.stages)} stages, wanted {stages}")
    return job


def profile(folder: Path, name: str, batch_size: int, settings: Mapping[str, Any]) -> None:
    """Profile with one thread, into a new folder."""
    folder.mkdir(parents=True)
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    model = str(MODELS / f"{name}.py")
    pdtool(folder, "profile", model, "--batch-size", str(batch_size), "--threads", "1", *sets, "-o", "profile.json")


def planned(folder: Path, name: str, plan: str, *options: str) -> Job:
    """Partition what `profile` has profiled, and generate; `plan` names the files."""
    pdtool(folder, "partition", "profile.json", *options, "-o", f"{plan}.yaml")
    pdtool(folder, "codegen", f"{plan}.yaml", "--model", str(MODELS / f"{name}.py"))
    bundle = Bundle.load(folder / plan / "bundle.yaml")
    return Job(
        name, Plan.load(folder / f"{plan}.yaml"), Profile.load(folder / "profile.json"), bundle, folder / plan, folder
    )


def pdtool(folder: Path, *arguments: str) -> None:
    """One command, in a folder that holds what earlier ones wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "pdtool", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise SystemExit(f"pdtool {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
