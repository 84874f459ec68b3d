"""What a run is asked to do, and which worker has which place in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.envelope import ModelRef
from pdtool.artifacts.plan import Plan
from pdtool.errors import UsageError
from pdtool.run.correct import Correction

AT_MOST = ("loss", "perplexity")


@dataclass(frozen=True)
class Target:
    """`accuracy=0.98`: the run stops after the epoch whose validation reached it.

    A metric counts as reached at or above the value; `loss` and `perplexity` at or below it.
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Inverse of `str`; raises UsageError."""
        metric, equals, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not equals or not metric.isidentifier() or number != number:
            raise UsageError(f"target {text!r} is not METRIC=NUMBER", "write accuracy=0.98 or loss=0.5")
        return cls(metric, number)

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether these validation metrics reach it; raises UsageError when the metric is not among them."""
        if self.metric not in metrics:
            raise UsageError(
                f"target {self}: the model reports no metric {self.metric!r}", f"it reports: {', '.join(metrics)}"
            )
        value = metrics[self.metric]
        return value <= self.value if self.metric in AT_MOST else value >= self.value


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run.

    Attributes:
        bundle_dir: the folder of bundle.yaml and the stage files.
        trusted: the model was named on the command line, so it may lie outside the current folder.
        out: the run's folder; checkpoints, metrics.jsonl, trace.json and report.json go there.
        epochs: to train in all; a resumed run does those that are left.
        steps: minibatches of an epoch, at most (None: the whole training set).
        seed: fixes initial weights, sample order and every random number drawn on the way.
        device: `auto` is cuda where there is one.
        correction: of gradients that come late; None: they are applied as they are.
        precision: what stages compute in: `bf16` is autocast, with weights and messages in fp32.
        compiled: whether stages go through torch.compile.
        transport: how tensors go between workers: `auto` through memory where two share a machine, by NCCL between
            GPUs, else by gloo; `gloo` always by gloo; `shared` refuses to run where memory cannot be shared.
        wire_dtype: what fp32 tensors are between workers.
        timeout_s: how long a worker waits for another before it gives up.
        resume: a run's folder, or one of its checkpoints, to go on from; made by any plan of the same model.
        nnodes, node_rank, rdzv_endpoint: of a run on several machines; `host:port` is on machine 0.
    """

    plan: Plan
    bundle: Bundle
    bundle_dir: Path
    model: ModelRef
    out: Path
    trusted: bool = False
    epochs: int = 1
    steps: int | None = None
    target: Target | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    correction: Correction | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    compiled: bool = False
    transport: Literal["auto", "gloo", "shared"] = "auto"
    wire_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    timeout_s: float = 300.0
    resume: Path | None = None
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""


@dataclass(frozen=True)
class Place:
    """One worker's place: `rank 1 (stage 1, replica 0)`; `worker` is its number in the cluster.

    With several stages on each worker `stage` is the first of them.
    """

    rank: int
    worker: int
    stage: int
    replica: int

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica})"


def places(plan: Plan) -> list[Place]:
    """The place of each rank: the plan's workers in the order of their numbers. Unused workers are not started."""
    first = plan.stages[: plan.pipeline_depth]
    used = sorted((worker, s, k) for s, stage in enumerate(first) for k, worker in enumerate(stage.workers))
    return [Place(rank, *entry) for rank, entry in enumerate(used)]


def seed_of(*parts: int | str) -> int:
    """A seed for `parts`, such as (seed, epoch, stage, minibatch): never a neighbour of another one's."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1
