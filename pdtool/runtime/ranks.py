"""Which rank executes which stages of the plan, and how messages name a worker: `rank 1 (stage 1, replica 0)`."""

from __future__ import annotations

from dataclasses import dataclass

from pdtool.artifacts.plan import Plan


@dataclass(frozen=True)
class RankAssignment:
    """The stage and replica that a rank executes; prints as `rank 1 (stage 1, replica 0)`.

    Attributes:
        rank: in torch.distributed.
        worker: number in the cluster.
        stage: the first of its stages; with chunks it has several.
    """

    rank: int
    worker: int
    stage: int
    replica: int

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica})"


def assign_ranks(plan: Plan) -> list[RankAssignment]:
    """Return the assignment of each rank, in the order of the workers' numbers; unused workers have no rank."""
    stages = plan.stages[: plan.pipeline_depth]
    used = sorted((worker, s, k) for s, stage in enumerate(stages) for k, worker in enumerate(stage.workers))
    return [RankAssignment(rank, *entry) for rank, entry in enumerate(used)]
