"""The options of `pdtool run`: those for each worker, and those for the launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pdtool.machines import Machines
from pdtool.options import values
from pdtool.options.declaration import again, option
from pdtool.options.plan_options import (
    MAX_MINIBATCHES,
    MICROBATCHES,
    ORDER_OF_WORK,
    WIRE_BYTES,
    PartitionOptions,
    ProfileOptions,
)
from pdtool.options.target import Target
from pdtool.options.values import Choice, Count, Flag, Text
from pdtool.schedule import ONE_F_ONE_B, SCHEDULES

SAME_FOLDER = Path("the folder of -o")  # value of --resume without a folder
PLANNED = "what the plan says"
_POLICIES = [f"{policy.words} ({policy.name})" for policy in ONE_F_ONE_B.policies]
_MAX_LOADER_WORKERS = 1000  # more is a slip

_training = partial(option, section="Training")
_computing = partial(option, section="Computing")
_machines = partial(option, section="Machines")
_plan = partial(option, section="Plan", of_plan=True, same=True)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class WorkerOptions:
    """How a plan is trained: the options for each worker, which `RunConfig` holds."""

    epochs: int = _training(
        "--epochs N", Count(default=1), "Total number of epochs, including those of a resumed run.", same=True
    )
    steps: int | None = _training(
        "--steps N",
        Count(unset="the whole training set"),
        "End each epoch after at most N minibatches. You need this for an IterableDataset without a length.",
        same=True,
    )
    target: Target | None = _training(  # noqa: RUF009
        "--target METRIC<=VALUE",
        Text(lambda name, text: None if text == "none" else Target.parse(text)),
        "Stop when the validation reaches 'nll<=4' or 'accuracy>=0.98', for example. You can also use <, > and =. With "
        "=, the value is an upper limit for loss and perplexity, and a lower limit for every other metric. Exit code 6 "
        "means that it was never reached. A resumed run keeps its target, unless you pass --target none.",
        same=True,
    )
    seed: int = _training("--seed N", Count(0, 2**63 - 1, default=0), "Seed of all random numbers.", same=True)
    resume: Path | None = _training(  # noqa: RUF009
        "--resume [RUN_DIR]",
        Text(lambda name, text: Path(text) if text else None, without=str(SAME_FOLDER)),
        "Continue from the last checkpoint of RUN_DIR, with its plan and options unless you pass others. Any plan of "
        "the same model works.  [without RUN_DIR: the folder of -o, where it begins a run if there is none]",
        in_file=False,
    )
    correction: str | None = _training(
        "--correction NAME[=VALUE]",
        Text(lambda name, text: None if text == "none" else text, unset="none"),
        "Correct for stale gradients in schedules without a flush: lr-discount (or lr-discount=K, only in the first K "
        "updates), weight-prediction, or nesterov (or nesterov=G, with momentum G instead of 0.9). lr-discount changes "
        "only stages whose gradients are two or more updates late.",
        same=True,
    )
    device: Literal["auto", "cpu", "cuda"] = _computing(
        "--device",
        Choice(("auto", "cpu", "cuda"), default="auto"),
        "Device to train on. auto uses a GPU if there is one.",
    )
    timeout_s: float = _computing(
        "--timeout TIME",
        Text(values.timeout, default="300s"),
        "How long a worker or machine waits for another before the run fails.",
        keyword="timeout",
    )
    precision: Literal["fp32", "bf16"] = _computing(
        "--precision",
        Choice(("fp32", "bf16"), default="fp32"),
        "Precision of the computation. bf16 is autocast: weights stay fp32.",
        same=True,
    )
    transport: Literal["auto", "gloo", "shared"] = _computing(
        "--transport",
        Choice(("auto", "gloo", "shared"), default="auto"),
        "How workers exchange tensors. auto shares memory within a machine, including between GPUs. shared fails if "
        "workers cannot share memory. gloo never shares it, and does not use NCCL between stages.",
        same=True,
    )
    loader_workers: int | None = _computing(
        "--loader-workers N",
        Count(
            0,
            _MAX_LOADER_WORKERS,
            unset="as many as the profile's loading time needs, but no more than there are cores; "
            "0 if loading takes under 1 ms or 2 % of a minibatch",
        ),
        "Processes that load data for each replica of the first stage. With 0, the training process loads it.",
    )
    threads: int | None = _computing(
        "--threads N",
        Count(unset="OMP_NUM_THREADS, else as in the profile, but no more than there are cores"),
        "CPU threads of each worker.",
    )
    compiled: bool = _computing(
        "--compile/--no-compile",
        Flag(default=False),
        "Compile each stage with torch.compile.",
        keyword="compile",
        same=True,
    )
    trust: bool = _computing(
        "--trust",
        Flag(default=False),
        "Run stage files that you edited or got from elsewhere, without checking that codegen would write the same.",
        in_file=False,
        same=True,
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LaunchOptions:
    """The machines of a launch; each starts its own workers."""

    nnodes: int = _machines("--nnodes N", Count(default=1), "Number of machines.")
    node_rank: int = _machines("--node-rank K", Count(0, default=0), "Rank of this machine, from 0.")
    rdzv_endpoint: str = _machines(
        "--rdzv-endpoint HOST:PORT",
        Text(values.endpoint, default=""),
        "Name and port of machine 0, where the machines meet.",
        in_file=False,
    )

    @property
    def machines(self) -> Machines:
        """The machines of the launch."""
        return Machines(self.nnodes, self.node_rank, self.rdzv_endpoint)


def excluded_by(schedule: str) -> set[str]:
    """Return the options that have no effect with a schedule. If the user names the schedule, values of pdtool.toml and
    of a resumed run are left out."""
    of_kind = {"update_every", "correction"} if SCHEDULES[schedule].flushes else {"microbatches"}
    return of_kind if len(SCHEDULES[schedule].policies) > 1 else of_kind | {"weights"}


def not_replaced(earlier: Iterable[str], later: Iterable[str]) -> list[str]:
    """Return the settings `NAME=VALUE` of `earlier` whose names `later` does not set."""
    names = {setting.partition("=")[0] for setting in later}
    return [setting for setting in earlier if setting.partition("=")[0] not in names]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunOptions(WorkerOptions, LaunchOptions):
    """How and where a plan is trained, and which of its values are replaced."""

    output: str | None = option(
        "-o, --output PATH",
        Text(values.path),
        "Folder of the run.  [default: that of --resume, or a new one: runs/PLAN, runs/PLAN.2, ...]",
        section="Output",
        in_file=False,
    )
    model: str | None = option(
        "--model FILE",
        Text(unset=PLANNED),
        "Model file, if it has moved.",
        section="Model",
        of_plan=True,
        in_file=False,
    )
    model_settings: tuple[str, ...] = again(
        ProfileOptions,
        "model_settings",
        artifact="",
        of_plan=True,
        help="Set a parameter NAME of functions in model.py, such as lr in optimizer(named_parameters, lr=0.1). The "
        "plan stays valid if the model's operators stay the same. May be repeated.",
    )
    schedule: str | None = _plan("--schedule", Choice(tuple(SCHEDULES), unset=PLANNED), f"{ORDER_OF_WORK}.")
    microbatches: int | None = _plan("--microbatches N", Count(1, MAX_MINIBATCHES, unset=PLANNED), MICROBATCHES)
    weights: str | None = _plan(
        "--weights",
        Choice(ONE_F_ONE_B.policy_names, unset=PLANNED),
        f"Weights that {ONE_F_ONE_B.name} uses for a minibatch: {', '.join(_POLICIES[:-1])}, or {_POLICIES[-1]}.",
    )
    update_every: int | None = _plan(
        "--update-every N",
        Count(1, MAX_MINIBATCHES, unset=PLANNED),
        "Minibatches in one update of every stage, in schedules without a flush.",
        excludes=("microbatches",),
    )
    wire_dtype: str | None = again(
        PartitionOptions,
        "wire_dtype",
        artifact="",
        of_plan=True,
        same=True,
        value=Choice(tuple(WIRE_BYTES), unset=PLANNED),
    )
    log_every: int | None = _training(
        "--log-every N",
        Count(unset="one every 10 seconds"),
        "Print a line after every N updates. This has no effect on a terminal, which shows a bar.",
    )

    @property
    def resumed(self) -> Path | None:
        """The folder to resume; None if there is none, or if none is named."""
        if self.resume != SAME_FOLDER:
            return self.resume
        return Path(self.output) if self.output else None
