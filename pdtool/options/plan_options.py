"""The options of `pdtool profile` and `pdtool partition`; all of them change the artifact that is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pdtool.options import values
from pdtool.options.declaration import option
from pdtool.options.values import Choice, Count, Flag, Text, Texts
from pdtool.schedule import SCHEDULES, STRATEGIES, schedule_names

OUTER_BANDWIDTH, INNER_BANDWIDTH = "10Gbit/s", "12GB/s"  # a common network card; PCI Express 3.0 x16
_RUNNING, _CHUNKED = schedule_names(lambda kind: not kind.flushes, "and"), schedule_names(lambda kind: kind.chunked)
ORDER_OF_WORK = f"Order of work: {_RUNNING} never stop (old weights are kept); the others empty the pipeline to update"
MICROBATCHES = "Minibatches in one update of a flushing schedule."
MAX_MINIBATCHES = 10_000  # in an update; more is a slip
# What `--wire-dtype` may be -> the bytes in messages between stages of so many of a float32 tensor; how it is packed,
# runtime/messages/wire_formats.py says.
WIRE_BYTES: dict[str, Callable[[int], int]] = {
    "fp32": lambda size_bytes: size_bytes,
    "fp16": lambda size_bytes: size_bytes // 2,
    "bf16": lambda size_bytes: size_bytes // 2,
}

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
        "Setting for model(), or for other functions of model.py that have a parameter NAME; may be repeated.",
        keyword="settings",
    )
    batch_size: int = _model("--batch-size N", Count(default=32), "Samples in one minibatch, the size that will run.")
    device: str = _computing(
        "--device NAME",
        Text(default="auto"),
        "On cpu or cuda, measure on this machine; auto is cuda where there is one, as of `run`. For any other (v100, "
        "a100, ...; an unknown one lists them) or a YAML file of your own, estimate without running the model.",
    )
    threads: int | None = _computing(
        "--threads N", Count(unset="all cores"), "CPU threads to measure with, as many as each worker will have."
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = _computing(
        "--precision",
        Choice(("fp32", "tf32", "bf16", "fp16"), unset="the model's own"),
        "Measure what `run` computes in: fp32, the model as it is, or bf16 by autocast. Or estimate as if the model "
        "were cast to fp32, bf16 or fp16; tf32: with products of fp32 in TF32.",
    )
    compiled: bool = _computing(
        "--compile/--no-compile",
        Flag(default=False),
        "Measure what `run --compile` runs. What torch.compile fuses is timed in segments; operators get shares.",
        keyword="compile",
    )
    calibrate: str | None = _model(
        "--calibrate PROFILE",
        Text(),
        "Estimate with factors fitted to a profile of any model that was measured on that device.",
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PartitionOptions:
    """For which cluster, and how, a profile is partitioned."""

    topology: str | None = _cluster(
        "--topology NxM",
        Text(),
        "Workers: sizes of the nested levels, the outermost first; 4x4 is 4 servers of 4 devices.",
    )
    cluster: str | None = _cluster(
        "--cluster FILE",
        Text(),
        "The same and all bandwidths, as `pdtool probe` writes them.",
        excludes=("topology", "bandwidth", "latency"),
    )
    bandwidth: str | None = _cluster(
        "--bandwidth RATE,...",
        Text(unset=f"{OUTER_BANDWIDTH} outside, {INNER_BANDWIDTH} at inner levels"),
        "Each way, of one link per level in bit/s or B/s, the outermost first, as 10Gbit/s,12GB/s.",
    )
    latency: str | None = _cluster("--latency TIME,...", Text(unset="0s"), "Of one message per level, as 50us,5us.")
    memory: str | None = _cluster(
        "--memory SIZE", Text(unset="that of the device profiled"), "Of each device, as 16GB or 16GiB; none: no limit."
    )
    workers: int | None = _cluster("--workers N", Count(unset="all of the topology"), "Number of workers to use.")
    replicas: tuple[int, ...] | None = _plan(
        "--replicas R-R-R",
        Text(values.replicas, unset="whatever is fastest"),
        "Workers of each stage, as 15-1: find where to cut the model into exactly these stages.",
        excludes=("strategy", "straight"),
    )
    strategy: str = _plan(
        "--strategy",
        Choice(tuple(STRATEGIES), default="auto"),
        "The fastest plan of any kind (auto), or the best of one kind, to compare it with.",
    )
    straight: bool = _plan(
        "--straight/--no-straight", Flag(default=False), "The same as --strategy straight.", excludes=("strategy",)
    )
    schedule: str | None = _plan(
        "--schedule",
        Choice((*SCHEDULES, "auto"), unset="1f1b, or what --strategy has"),
        f"{ORDER_OF_WORK}; auto takes the fastest, flushing ones only with --microbatches.",
    )
    microbatches: int | None = _plan(
        "--microbatches N",
        Count(1, MAX_MINIBATCHES, unset="4 with a flushing --schedule, as many as workers with --strategy gpipe"),
        MICROBATCHES,
    )
    samples_per_update: int | None = _plan(
        "--global-batch-size, --samples-per-update N",
        Count(unset="what --microbatches makes"),
        "Samples in one update of every stage, of which the minibatches that were profiled are the parts; with "
        "1f1b-flush unless another --schedule is given.",
        excludes=("microbatches",),
    )
    wire_dtype: str = _plan(
        "--wire-dtype",
        Choice(tuple(WIRE_BYTES), default="fp32"),
        "What fp32 activations and gradients are sent as to other workers.",
    )
    in_flight: int | None = _plan(
        "--in-flight N",
        Count(
            1, MAX_MINIBATCHES, unset="what is fastest with a flush, else what the schedule wants or up to twice that"
        ),
        "Minibatches in flight at each replica of the first stage; later stages have fewer, and with a flush none has "
        "more than an update.",
    )
    chunks: int = _plan("--chunks N", Count(2, 100, default=2), f"Stages on each worker with --schedule {_CHUNKED}.")
    recompute: bool = _plan(
        "--recompute/--no-recompute", Flag(default=True), "Let stages that lack memory run their forward twice."
    )
    cost_model: str = _plan(
        "--cost",
        Choice(("ours", "pipedream", "pipedream-free"), default="ours"),
        "Whose formulas; those of PipeDream's optimizer, with or without the traffic of activations, to compare.",
    )
    simplest: float = _plan(
        "--simplest SHARE",
        Text(values.share, default="3%"),
        "Prefer fewer stages, and borders between modules, as long as the plan is at most this much slower than the "
        "fastest.",
    )
    max_cuts: int = _plan(
        "--cuts N",
        Count(100, 100_000, default=1200),
        "Places to cut a branchy graph that are searched at most; more take longer (the square) and miss less.",
    )
