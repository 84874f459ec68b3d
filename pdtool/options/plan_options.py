"""The options of `pdtool profile` and `pdtool partition`; all of them change the artifact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from pdtool.options import values
from pdtool.options.declaration import option
from pdtool.options.values import Choice, Count, Flag, Text, Texts
from pdtool.schedule import SCHEDULES, STRATEGIES, schedule_names

OUTER_BANDWIDTH, INNER_BANDWIDTH = "10Gbit/s", "12GB/s"  # a common network card; PCI Express 3.0 x16
_RUNNING, _CHUNKED = schedule_names(lambda kind: not kind.flushes, "and"), schedule_names(lambda kind: kind.chunked)
ORDER_OF_WORK = f"Order of work. {_RUNNING} never flush the pipeline. The others flush it before each update"
MICROBATCHES = (
    "Microbatches in one update, with a schedule that flushes (empties) the pipeline before each update. Each has the "
    "profiled batch size."
)
MAX_MINIBATCHES = 10_000  # in an update; more is a slip
# What `--wire-dtype` may be -> the bytes of a float32 number in messages between stages; how it is sent,
# runtime/messages/routes.py says.
WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

_model = partial(option, section="Model", artifact="profile")
_computing = partial(option, section="Computing", artifact="profile")
_cluster = partial(option, section="Cluster", artifact="plan")
_plan = partial(option, section="Plan", artifact="plan")


@dataclass(frozen=True, kw_only=True, repr=False)
class ProfileOptions:
    """How a model is profiled."""

    model_settings: tuple[str, ...] = _model(
        "--set NAME=VALUE",
        Texts(default=()),
        "Set a parameter NAME of model(), or of other functions in model.py. May be repeated.",
        keyword="settings",
    )
    batch_size: int = _model(
        "--batch-size N", Count(default=32), "Samples in one minibatch. Use the size that you will train with."
    )
    device: str = _computing(
        "--device NAME",
        Text(default="auto"),
        "Measure on this machine with cpu, cuda or auto (cuda if there is one). For any other device (v100, a100, ...; "
        "see `pdtool devices`) or your own YAML file, estimate without running the model.",
    )
    threads: int | None = _computing(
        "--threads N", Count(unset="all cores"), "CPU threads to measure with. Use as many as each worker will have."
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = _computing(
        "--precision",
        Choice(("fp32", "tf32", "bf16", "fp16"), unset="the model's own"),
        "When measuring, fp32 runs the model unchanged, and bf16 runs it under autocast, as `run` does. When "
        "estimating, the model is assumed to be cast to this dtype; tf32 is fp32 with TF32 matrix products.",
    )
    compiled: bool = _computing(
        "--compile/--no-compile",
        Flag(default=False),
        "Measure the compiled model. It is timed in segments, and the operators of a segment share its time.",
        keyword="compile",
    )
    calibrate: str | None = _model(
        "--calibrate PROFILE",
        Text(),
        "Correct the estimate with a measured profile from the same device, preferably of a similar model.",
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PartitionOptions:
    """How, and for which cluster, a profile is partitioned."""

    topology: str | None = _cluster(
        "--topology NxM", Text(), "Shape of the cluster: 4 is 4 devices, 4x4 is 4 servers with 4 devices each."
    )
    cluster: str | None = _cluster(
        "--cluster FILE",
        Text(),
        "Read the topology and the bandwidths from a file that `pdtool probe` wrote.",
        excludes=("topology", "bandwidth", "latency"),
    )
    bandwidth: str | None = _cluster(
        "--bandwidth RATE,...",
        Text(unset=f"{OUTER_BANDWIDTH} at the outermost level, {INNER_BANDWIDTH} at inner levels"),
        "Bandwidth of a link at each level, in each direction, the outermost first, such as 10Gbit/s,12GB/s.",
    )
    latency: str | None = _cluster(
        "--latency TIME,...", Text(unset="0s"), "Latency of a message at each level, such as 50us,5us."
    )
    memory: str | None = _cluster(
        "--memory SIZE",
        Text(unset="the cluster file's, or that of the profiled device"),
        "Memory of each device, such as 16GB or 16GiB, or none for no limit.",
    )
    workers: int | None = _cluster("--workers N", Count(unset="all of the topology"), "Use at most N workers.")
    replicas: tuple[int, ...] | None = _plan(
        "--replicas R-R-R",
        Text(values.replicas, unset="whatever is fastest"),
        "Give the stages exactly these numbers of workers. 15-1 is 15 for the first, 1 for the second.",
        excludes=("strategy", "straight"),
    )
    strategy: str = _plan(
        "--strategy",
        Choice(tuple(STRATEGIES), default="auto"),
        "Find the fastest plan of any kind (auto), or the best plan of one kind. A straight pipeline has one stage "
        "on each worker.",
    )
    straight: bool = _plan(
        "--straight/--no-straight", Flag(default=False), "The same as --strategy straight.", excludes=("strategy",)
    )
    schedule: str | None = _plan(
        "--schedule",
        Choice((*SCHEDULES, "auto"), unset="that of --strategy; 1f1b-flush with --samples-per-update; else 1f1b"),
        f"{ORDER_OF_WORK}. With --microbatches or --samples-per-update, auto is the fastest of "
        f"{schedule_names(lambda kind: kind.has_formulas, 'and')}. Without them, auto is 1f1b.",
    )
    microbatches: int | None = _plan(
        "--microbatches N",
        Count(1, MAX_MINIBATCHES, unset="4 with a flushing --schedule, as many as workers with --strategy gpipe"),
        MICROBATCHES,
    )
    samples_per_update: int | None = _plan(
        "--global-batch-size, --samples-per-update N",
        Count(unset="from --microbatches"),
        "Samples in one update, the same for every stage: a multiple of the profiled batch size.",
        excludes=("microbatches",),
    )
    wire_dtype: str = _plan(
        "--wire-dtype",
        Choice(tuple(WIRE_BYTES), default="fp32"),
        "Send fp32 activations and gradients to other workers in this dtype.",
    )
    in_flight: int | None = _plan(
        "--in-flight N",
        Count(
            1,
            MAX_MINIBATCHES,
            unset="with a flush, the smallest number that gives the shortest time; without one, the schedule's own "
            "number, or up to twice as many if that makes the plan 10 % faster",
        ),
        "Minibatches in flight at each replica of the first stage. Later stages keep at most as many. With a flush, at "
        "most the microbatches of one update.",
    )
    chunks: int = _plan("--chunks N", Count(2, 100, default=2), f"Stages on each worker with --schedule {_CHUNKED}.")
    recompute: bool = _plan(
        "--recompute/--no-recompute",
        Flag(default=True),
        "Let stages that lack memory compute their activations again in the backward (activation checkpointing).",
    )
    cost_model: str = _plan(
        "--cost",
        Choice(("ours", "pipedream", "pipedream-free"), default="ours"),
        "Cost formulas: pdtool's own (ours), or those of PipeDream's optimizer. With pipedream-free, sending "
        "activations takes no time.",
    )
    simplest: float = _plan(
        "--simplest SHARE",
        Text(values.share, default="3%"),
        "Take a plan that is at most this much slower than the fastest if it has fewer stages, or cuts between modules "
        "instead of inside them. With 0%, take the fastest plan by the formulas.",
    )
    max_cuts: int = _plan(
        "--cuts N",
        Count(100, 100_000, default=1200),
        "Search at most N cuts. If the graph has more, because of its branches, operators are merged first, so a "
        "better plan may be missed. The time grows with N squared.",
    )
