"""A placement: which operators run on which workers, and how. Search, cost formulas and simulator compute with it.

Placement.of(plan, profile)  <-  artifact Plan  <-  placement.to_plan(profile, path, cluster)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pdtool.artifacts.artifact import fields_checked
from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan, Stage
from pdtool.artifacts.profile import Profile
from pdtool.errors import ScheduleError, UsageError
from pdtool.schedule import STRATEGIES, ExecutionConfig, PipelineShape, check_executable

_MAX_NAME = 400  # characters of the profile's name in the plan's


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The stages of a plan, the workers of each, and how they are executed.

    Attributes:
        stages: names of the nodes of each stage, in topological order.
        workers: numbers in the cluster of the workers of each stage; replica k of a stage belongs to copy
            k mod `execution.copies`. With chunks, stage s is on the workers of stage s mod the pipeline depth.
        in_flight: minibatches in flight at each replica of each stage.
        recompute: whether each stage runs its forward a second time before its backward, to save memory.
    """

    stages: tuple[tuple[str, ...], ...]
    workers: tuple[tuple[int, ...], ...]
    in_flight: tuple[int, ...]
    recompute: tuple[bool, ...]
    execution: ExecutionConfig

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> Placement:
        """Read a plan.

        Raises:
            ArtifactError: its stages do not fit the profile.
        """
        return cls(
            stages=tuple(map(tuple, plan.stage_nodes(profile))),
            workers=tuple(stage.workers for stage in plan.stages),
            in_flight=tuple(stage.in_flight for stage in plan.stages),
            recompute=tuple(stage.recompute for stage in plan.stages),
            execution=plan.execution,
        )

    def to_plan(self, profile: Profile, profile_path: str, cluster: Cluster) -> Plan:
        """Write the placement as a plan, without predictions.

        Args:
            profile_path: the path of the profile, to store in the plan.

        Raises:
            UsageError: a plan cannot store that path.
        """
        stages = tuple(
            Stage(
                nodes=tuple(profile.graph.compress(nodes)),
                replicas=len(workers),
                workers=workers,
                in_flight=in_flight,
                recompute=recompute,
            )
            for nodes, workers, in_flight, recompute in zip(
                self.stages, self.workers, self.in_flight, self.recompute, strict=True
            )
        )
        remedy = "give the profile a path of at most 500 ordinary characters"
        with fields_checked(lambda fault: UsageError(f"the plan cannot be written: {fault}", remedy)):
            return Plan(
                **vars(self.execution),
                name=plan_name(profile, cluster, self.execution.strategy),
                model=profile.model,
                profile=profile_path,
                digests={**profile.digests, profile_path: profile.content_sha256},
                batch_size=profile.batch_size,
                cluster=cluster,
                wire_dtype=profile.wire_dtype,
                stages=stages,
            )

    @property
    def pipeline_depth(self) -> int:
        """Stages that are on workers of their own."""
        return len(self.stages) // self.execution.chunks

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage in all copies."""
        return tuple(map(len, self.workers))

    @property
    def replicas_per_copy(self) -> tuple[int, ...]:
        """Replicas of each stage in one copy of the pipeline."""
        return tuple(count // self.execution.copies for count in self.replicas)

    @property
    def used_workers(self) -> int:
        """Number of workers that compute."""
        return sum(self.replicas[: self.pipeline_depth])

    @property
    def config(self) -> str:
        """The replicas of its stages, as a plan says them."""
        return self.execution.describe(self.replicas[: self.pipeline_depth])

    def shape(self, tied_stages: Collection[tuple[int, ...]] = ()) -> PipelineShape:
        """Return what the schedule is built for; `tied_stages` are groups of stages that share a parameter."""
        depth = self.pipeline_depth
        return self.execution.shape(self.replicas[:depth], self.in_flight[:depth], tied_stages)

    @property
    def is_executable(self) -> bool:
        """Whether the schedule ends without a deadlock with these minibatches in flight."""
        try:
            check_executable(self.execution.kind, self.shape())
        except ScheduleError:
            return False
        return True

    def with_usual_in_flight(self) -> Placement:
        """Return the same with as many minibatches in flight as its schedule wants."""
        return self.with_in_flight(self.execution.usual_in_flight(self.replicas[: self.pipeline_depth]))

    def with_in_flight(self, in_flight: Sequence[int]) -> Placement:
        """Return the same with other numbers of minibatches in flight at each replica of the stages on workers of their
        own; with chunks, the others have those of the stage on the same workers."""
        return replace(self, in_flight=tuple(in_flight) * self.execution.chunks)


def plan_name(profile: Profile, cluster: Cluster, strategy: str) -> str:
    """Return the name of a plan: one that is made for comparison lies beside the planner's own."""
    suffix = "" if STRATEGIES[strategy].is_own else f"-{strategy}"
    return f"{profile.name[:_MAX_NAME]}-{cluster.topology}{suffix}"
