"""The options of `pdtool run`: what each worker is told, and how the run is launched."""

from __future__ import annotations

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

SAME_FOLDER = Path("the folder of -o")  # what --resume takes without a folder
PLANNED = "what the plan says"
_POLICIES = [f"{policy.words} ({policy.name})" for policy in ONE_F_ONE_B.policies]
_MAX_LOADER_WORKERS = 1000  # more is a slip

_training = partial(option, section="Training")
_computing = partial(option, section="Computing")
_machines = partial(option, section="Machines")
_plan = partial(option, section="Plan", of_plan=True, same=True)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class WorkerOptions:
    """How a plan is trained: what each worker is told, as `RunConfig` has it."""

    epochs: int = _training("--epochs N", Count(default=1), "Epochs in all.", same=True)
    steps: int | None = _training(
        "--steps N",
        Count(unset="the whole training set"),
        "Minibatches in an epoch, at most; needed for an IterableDataset without a length.",
        same=True,
    )
    target: Target | None = _training(  # noqa: RUF009
        "--target METRIC<=VALUE",
        Text(lambda name, text: Target.parse(text)),
        "Stop when the validation reaches it, as 'nll<=4' or 'accuracy>=0.98' (also <, > and =, where = means at most "
        "for loss and perplexity, else at least); exit with 6 when it does not.",
        same=True,
    )
    seed: int = _training(
        "--seed INTEGER RANGE", Count(0, 2**63 - 1, default=0), "Seed of all random numbers.", same=True
    )
    resume: Path | None = _training(  # noqa: RUF009
        "--resume [RUN_DIR]",
        Text(lambda name, text: Path(text) if text else None, without=str(SAME_FOLDER)),
        "Go on from the last checkpoint of RUN_DIR. Plan and options are those of that run unless you give others; any "
        "plan of the same model will do.  [without RUN_DIR: the folder of -o]",
        in_file=False,
    )
    correction: str | None = _training(
        "--correction NAME[=VALUE]",
        Text(unset="none"),
        "Correct for gradients of older weights, without a flush: lr-discount[=UPDATES], weight-prediction or "
        "nesterov[=G].",
        same=True,
    )
    device: Literal["auto", "cpu", "cuda"] = _computing(
        "--device",
        Choice(("auto", "cpu", "cuda"), default="auto"),
        "Device to train on; auto is cuda where there is one.",
    )
    timeout_s: float = _computing(
        "--timeout TIME",
        Text(values.timeout, default="300s"),
        "How long a worker or machine waits for another.",
        keyword="timeout",
    )
    precision: Literal["fp32", "bf16"] = _computing(
        "--precision",
        Choice(("fp32", "bf16"), default="fp32"),
        "What stages compute in; bf16 is autocast, weights and messages stay fp32.",
        same=True,
    )
    transport: Literal["auto", "gloo", "shared"] = _computing(
        "--transport",
        Choice(("auto", "gloo", "shared"), default="auto"),
        "How tensors go between workers; auto shares memory, of GPUs too, within a machine.",
        same=True,
    )
    loader_workers: int | None = _computing(
        "--loader-workers N",
        Count(
            0,
            _MAX_LOADER_WORKERS,
            unset="what the profile's loading time needs, at most the cores; "
            "0 if that is under 1 ms or 2 % of a minibatch's",
        ),
        "Processes that load for each replica of the first stage; 0 loads in the training process.",
    )
    threads: int | None = _computing(
        "--threads N",
        Count(unset="as many as the profile was measured with, at most the cores"),
        "CPU threads of each worker.",
    )
    compiled: bool = _computing(
        "--compile/--no-compile",
        Flag(default=False),
        "Put each stage through torch.compile.",
        keyword="compile",
        same=True,
    )
    trust: bool = _computing(
        "--trust",
        Flag(default=False),
        "Run the stage files as they are, edited by hand or from elsewhere.",
        in_file=False,
        same=True,
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LaunchOptions:
    """Over which machines workers are launched; each starts its own."""

    nnodes: int = _machines("--nnodes N", Count(default=1), "Machines.")
    node_rank: int = _machines("--node-rank K", Count(0, default=0), "This machine.")
    rdzv_endpoint: str = _machines(
        "--rdzv-endpoint HOST:PORT",
        Text(values.endpoint, default=""),
        "Where the machines meet, on machine 0.",
        in_file=False,
    )

    @property
    def machines(self) -> Machines:
        """The machines of the launch."""
        return Machines(self.nnodes, self.node_rank, self.rdzv_endpoint)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunOptions(WorkerOptions, LaunchOptions):
    """How a plan is trained, where, and what goes before what it says."""

    output: str | None = option(
        "-o, --output PATH",
        Text(values.path),
        "Folder of the run.  [default: a new one, runs/PLAN, runs/PLAN.2, ...]",
        section="Output",
        in_file=False,
    )
    model: str | None = option(
        "--model FILE",
        Text(unset=PLANNED),
        "Model file, when it has moved since.",
        section="Model",
        of_plan=True,
        in_file=False,
    )
    model_settings: tuple[str, ...] = again(
        ProfileOptions,
        "model_settings",
        artifact="",
        of_plan=True,
        help="Setting for those functions of model.py that have a parameter NAME, as optimizer(named_parameters, "
        "lr=0.1) has; the plan holds as long as the model's operators stay the same. May be repeated.",
    )
    schedule: str | None = _plan("--schedule", Choice(tuple(SCHEDULES), unset=PLANNED), f"{ORDER_OF_WORK}.")
    microbatches: int | None = _plan("--microbatches N", Count(1, MAX_MINIBATCHES, unset=PLANNED), MICROBATCHES)
    weights: str | None = _plan(
        "--weights",
        Choice(ONE_F_ONE_B.policy_names, unset=PLANNED),
        f"Weights of a minibatch under {ONE_F_ONE_B.name}: {', '.join(_POLICIES[:-1])}, or {_POLICIES[-1]}.",
    )
    update_every: int | None = _plan(
        "--update-every N",
        Count(1, MAX_MINIBATCHES, unset=PLANNED),
        "Minibatches in one update of every stage, without a flush.",
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
        Count(unset="10 seconds"),
        "Updates between two lines where stderr is no terminal, which shows a bar.",
    )

    @property
    def resumed(self) -> Path | None:
        """The folder to go on from; None where there is none, or none is named."""
        if self.resume != SAME_FOLDER:
            return self.resume
        return Path(self.output) if self.output else None
