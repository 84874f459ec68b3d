"""The configuration of a run, which each worker gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import BUCKET_BYTES, Plan
from pdtool.machines import Machines
from pdtool.options.run_options import WorkerOptions
from pdtool.runtime.corrections import DelayCompensation
from pdtool.schedule import PipelineShape


@dataclass(frozen=True, kw_only=True)
class RunConfig(WorkerOptions):
    """The options of a run, for one plan in one folder; each worker gets them.

    Attributes:
        bundle_dir: the user's folder of bundle.yaml and the stage files.
        stage_files: the folder of the run's own copy of them; None: read them from `bundle_dir`.
        trusted: whether the model was named on the command line, so that it may lie outside the current folder.
        out: the folder of the run, for checkpoints, metrics.jsonl, trace.json and report.json.
        threads: CPU threads of each worker; None divides the cores of a machine among its workers.
        threads_given: whether the user asked for `threads`; else OMP_NUM_THREADS has precedence, and the cores are the
            limit.
        loader_workers: processes that load for each replica of the first stage; 0: it loads itself.
        machines: the machines of the launch.
        check_stage_files: called on each machine with the traced model before a stage file is imported; raises
            StaleError if codegen would write something else. The caller passes it, because the runtime does not import
            the generator. None: trust the files.
        plan_path: path of the plan, which run.json records.
        asked: the options of the run, as run.json records them.
        bucket_bytes: gradients that replicas average in one message; the same on all machines.
    """

    plan: Plan
    bundle: Bundle
    bundle_dir: Path
    model: ModelRef
    out: Path
    trusted: bool = False
    threads_given: bool = False
    loader_workers: int = 0
    machines: Machines = field(default_factory=Machines)
    check_stage_files: Callable[[Any], None] | None = None
    bucket_bytes: int = BUCKET_BYTES
    stage_files: Path | None = None
    plan_path: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def delay_compensation(self) -> DelayCompensation | None:
        """How to correct late gradients; None: apply them unchanged. Raises UsageError."""
        return DelayCompensation.parse(self.correction) if self.correction else None

    @property
    def shape(self) -> PipelineShape:
        """The shape that the workers build their schedule for: stages that share a parameter update together."""
        return self.plan.shape(tuple(tied.stages for tied in self.bundle.tied))

    def with_absolute_paths(self) -> RunConfig:
        """Return the same with absolute paths, which hold when the current folder changes."""
        paths: dict[str, Any] = {name: each.absolute() for name, each in vars(self).items() if isinstance(each, Path)}
        return replace(self, **paths)
