"""The artifact Plan: which worker computes what, when, and with which weights. You may edit it by hand."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, GetPydanticSchema, SerializerFunctionWrapHandler, model_serializer

from pdtool.artifacts.artifact import STRICT, FrozenModel, ModelRef, YamlArtifact
from pdtool.artifacts.cluster import Cluster, check_levels
from pdtool.artifacts.fields import Count, Digest, Figure, FigureBytes, FigureCount, Label, Number, Title
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.text_formats import with_values
from pdtool.errors import ArtifactError, FieldError
from pdtool.options.plan_options import WIRE_BYTES
from pdtool.schedule import (
    SCHEDULES,
    STRATEGIES,
    WEIGHT_POLICIES,
    ExecutionConfig,
    PipelineShape,
    ScheduleKind,
    check_executable,
    schedule_names,
)
from pdtool.units import counted, format_seconds


def _one_of(*names: str) -> GetPydanticSchema:
    return GetPydanticSchema(lambda source, handler: handler(Literal[names]))


ScheduleName = Annotated[str, _one_of(*SCHEDULES)]
AskedScheduleName = Annotated[str, _one_of(*SCHEDULES, "auto")]
StrategyName = Annotated[str, _one_of(*STRATEGIES)]
WeightPolicyName = Annotated[str, _one_of(*WEIGHT_POLICIES)]

MAX_IN_FLIGHT = 10_000  # a schedule is a list, and a typing error must not fill the memory
ONE_WORKER = "one worker"  # a rival of every plan
# What the runtime does and the planner counts on:
BUCKET_BYTES = 25_000_000  # gradients that replicas average in one message
ASKED_AHEAD = 1  # minibatches whose messages a stage asks for beyond those in flight
# Of the limit. On a CPU, memory that is kept for the next minibatch comes to about a third more than is needed.
LITTLE_ROOM = 0.75
# Fields that do not affect predictions: names, and the predictions themselves.
_NOT_PREDICTED_FROM = {"format", "tool_version", "sha256", "name", "model", "profile", "asked", "predicted", "why"}
_MIN_GAP = 0.0005  # a smaller gap rounds to 0.0%
_ROUNDING = 1e-9  # a smaller gap is a rounding error
_MAX_ERROR = 0.03  # of the formulas, compared with the simulation; a certificate mentions a larger one
_EARLIER_CERTIFICATE = {"lower_bound_s": "bound_s", "gap": "gap", "proof": "proof"}  # fields of Why, once
CostModelName = Literal["ours", "pipedream", "pipedream-free"]


class Stage(FrozenModel):
    """One stage.

    Attributes:
        nodes: module paths and node names (Graph.expand).
        replicas: how many workers share its minibatches, round-robin.
        workers: their numbers in the cluster.
        in_flight: minibatches in flight at each replica (forward begun, backward not finished); with stashing at most
            as many weight versions. A worker with several stages (chunks) counts those of all of them.
        recompute: whether to keep only the stage's inputs, and run its forward again before its backward.
    """

    nodes: Annotated[tuple[Label, ...], Field(min_length=1)]
    replicas: Count
    workers: tuple[Number, ...]
    in_flight: Annotated[int, Field(ge=1, le=MAX_IN_FLIGHT)]
    recompute: bool = False


class Predicted(FrozenModel):
    """Predictions of the cost model and the simulator; times are seconds per minibatch in steady state.

    Attributes:
        bottleneck_s: time of the whole pipeline by the formulas: the slowest stage or transfer, each by itself.
        simulated_s: time in a simulation of the workers' own action lists; None: not simulated.
        data_parallel_s: simulated time of data parallelism on all workers; None: not simulated.
        data_parallel_fits: whether that data parallelism fits into memory; None: an earlier pdtool predicted.
        one_worker_s: time of one worker alone; None: the model does not fit on one, or an earlier pdtool predicted.
        throughput_samples_per_s: from simulated_s; if that is missing, from bottleneck_s.
        gain_over_data_parallel: ratio of the two simulated times; if one is missing, of the two by the formulas.
        samples_per_update: samples whose gradients one update averages, at the stage with the most; None: an earlier
            pdtool predicted.
        data_parallel_samples_per_update: the same for the data parallelism in the gain.
        compute_s: per stage, forward + backward + update, shared by its replicas.
        allreduce_s: per stage, synchronising the replicas' gradients.
        transfer_s: between stage s and s + 1, activations and gradients.
        memory_bytes: per stage, what its worker needs: with chunks the same for all stages of a worker.
        traffic_bytes: sent by all workers together for one minibatch.
        cost: whose formulas: `ours`, or those of PipeDream's optimizer, for comparison only.
        plan_sha256: digest of the part of the plan behind these figures; if it differs, the plan was edited since.
    """

    bottleneck_s: Figure
    simulated_s: Figure | None = None
    data_parallel_s: Figure | None = None
    data_parallel_fits: bool | None = None
    one_worker_s: Figure | None = None
    throughput_samples_per_s: Figure
    gain_over_data_parallel: Figure
    samples_per_update: FigureCount | None = None
    data_parallel_samples_per_update: FigureCount | None = None
    compute_s: tuple[Figure, ...]
    allreduce_s: tuple[Figure, ...]
    transfer_s: tuple[Figure, ...]
    memory_bytes: tuple[FigureBytes, ...]
    traffic_bytes: FigureBytes
    cost: CostModelName = "ours"
    plan_sha256: Digest

    @property
    def time_s(self) -> float:
        """The simulated time of a minibatch, or if there is none, the time by the formulas."""
        return self.bottleneck_s if self.simulated_s is None else self.simulated_s

    def slowest_part(self, depth: int) -> str:
        """Say what takes longest by itself: the computing of one of `depth` workers, an average or a border."""
        parts = []
        for s in range(depth):
            stages = list(map(str, range(s, len(self.compute_s), depth)))  # of one worker
            longest = f"stages {' and '.join(stages)} together compute" if len(stages) > 1 else f"stage {s} computes"
            parts.append((sum(self.compute_s[s::depth]), f"{longest} longest"))
        parts += [(time_s, f"stage {s} averages gradients longest") for s, time_s in enumerate(self.allreduce_s)]
        parts += [(time_s, f"stages {s} and {s + 1} send longest") for s, time_s in enumerate(self.transfer_s)]
        return max(parts, key=lambda part: part[0])[1]


class Rival(FrozenModel):
    """A plan that was considered and rejected; its fields are named like those of Predicted."""

    plan: Label
    bottleneck_s: Figure
    samples_per_update: FigureCount | None = None
    why: Label


class FasterPlan(FrozenModel):
    """A plan that is a little faster than the chosen one, but was passed over because it is less simple.

    Attributes:
        begins: the first operator of each stage but the first.
        simulated_s: its seconds per minibatch.
    """

    config: Label
    begins: tuple[Label, ...]
    simulated_s: Figure


class MergedOperators(FrozenModel):
    """Groups of operators that were merged into fewer, to limit the number of cuts in the search."""

    groups: Count
    merged_into: Count
    max_cuts: Count


class Certificate(FrozenModel):
    """A time that no plan on this cluster beats by the formulas, and the search that proves it.

    Attributes:
        bound_s: seconds per minibatch.
        gap: by which fraction the plan is slower than that.
        kind: strategy whose plans were searched.
        replicas: replicas of each stage; None: any.
        max_stages: most stages of a plan; None: any number.
        workers: workers that plans may use; None: an earlier pdtool did not record its search.
        cuts: number of cuts in the search.
        max_workers_per_copy: limit of the search, if there are more workers; None: nothing was left out.
        merged_operators: operators merged because of too many cuts; None: nothing was left out.
        all_updates: whether every number of minibatches in an update was searched, which matters only for `hybrid`.
        without_memory_limit: whether the bound ignores the memory limit.
        simulated_plans: number of simulated plans to choose from; None: not recorded, or the formulas chose.
        proof: an earlier pdtool's words about its search.
    """

    bound_s: Figure
    gap: Figure | None = None
    kind: StrategyName = "auto"
    replicas: tuple[Count, ...] | None = None
    max_stages: Count | None = None
    workers: Count | None = None
    cuts: Count | None = None
    max_workers_per_copy: Count | None = None
    merged_operators: MergedOperators | None = None
    all_updates: bool = True
    without_memory_limit: bool = False
    simulated_plans: Count | None = None
    proof: Label = ""

    def claim(self, overestimate: str = "", simulated_s: float | None = None) -> str:
        """State the bound, and how far the plan is above it.

        Args:
            overestimate: why the formulas may overestimate the times.
            simulated_s: the plan's simulated time; None: it was not simulated.
        """
        doubt = f" (the formulas {overestimate})" if overestimate else ""
        bound = f"{format_seconds(self.bound_s)} per minibatch{doubt}"
        claim = f"by the formulas, no plan with these options takes less than {bound}"
        if self.gap is None:
            return claim
        if self.gap < _MIN_GAP:
            claim = f"optimal{f' to within {_MIN_GAP:.2%}' if self.gap > _ROUNDING else ''}: {claim}"
            if simulated_s and simulated_s > self.bound_s * (1 + _MAX_ERROR):
                claim += f". In the simulation, this plan takes {format_seconds(simulated_s)}"
            return claim
        excess = f"{self.gap:.1%} more" if self.gap < 1 else f"{1 + self.gap:.1f} times as long"
        return f"{claim}. This plan takes {format_seconds(self.bound_s * (1 + self.gap))} ({excess})"

    def sentence(self) -> str:
        """Say why no plan beats the bound; "" if an earlier pdtool did not record it."""
        if self.workers is None or self.cuts is None:
            return f"proof: {self.proof}" if self.proof else ""
        on = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        with_replicas = f" with replicas {'-'.join(map(str, self.replicas))}" if self.replicas else ""
        plans = "1 candidate was" if self.simulated_plans == 1 else f"{self.simulated_plans} candidates were"
        simulated = f". {plans} simulated" if self.simulated_plans else ""
        if limits := ". ".join(self._limits()):
            return f"bound: {limits}. The bound{with_replicas} is the time of {on} without idle time{simulated}"
        kind = STRATEGIES[self.kind].noun or f"plan of strategy {self.kind}"
        at_most = f" of at most {self.max_stages} stages" if self.max_stages else ""
        without_limit = ", without the memory limit" if self.without_memory_limit else ""
        return (
            f"proof: the search covered every {kind}{at_most}{with_replicas} on {on}, with borders at any of "
            f"{self.cuts} cuts and as many minibatches in flight as the schedule needs{without_limit}{simulated}"
        )

    def _limits(self) -> Iterator[str]:
        """Yield the limits of the search."""
        if self.max_workers_per_copy:
            yield f"the search covered pipelines of up to {self.max_workers_per_copy} workers, and copies of them"
        if merged := self.merged_operators:
            yield (
                f"{merged.groups} groups of operators were merged into {merged.merged_into} to search at most "
                f"{merged.max_cuts} cuts (--cuts), so a better plan may exist"
            )
        if not self.all_updates:
            yield "not every number of minibatches in an update was searched"


class Why(FrozenModel):
    """The plan's bottleneck, a lower bound for any plan (None: unknown), and the best rejected plans."""

    bottleneck: Label
    certificate: Certificate | None = None
    rivals: tuple[Rival, ...] = ()
    faster: FasterPlan | None = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a plan besides its cluster, by their names in `pdtool.partition`: those that the user asked for,
    with what goes with the strategy.

    Attributes:
        strategy: see pdtool.schedule.strategies; planner.choice.strategies sets options that follow from it.
        straight: one stage on every worker, none replicated; `gpipe` may leave workers idle.
        schedule: see Plan; `auto` takes the fastest.
        microbatches: microbatches of flushing schedules; `auto` tries these only with more than one.
        update_every: minibatches in one update of every stage without a flush; None: the schedule decides.
        workers: use at most so many, the first ones; None: all. A plan uses fewer if that is faster.
        replicas: replicas of each stage, on the first workers of the cluster; None: any number of stages and replicas.
        in_flight: minibatches in flight at each replica of the first stage; None: the schedule's number, or more.
        chunks: stages on each worker of a chunked schedule, which is not searched (planner.choice.without_formulas).
        recompute: whether stages may run their forward twice to save memory.
        cost_model: whose formulas to use; see Predicted.
        simplest: prefer fewer stages (data parallelism first) within this fraction of the best time.
        max_cuts: limit on the cuts in the search, on 16 workers or fewer; on more workers the limit is lower.
    """

    __pydantic_config__ = STRICT

    strategy: StrategyName = "auto"
    straight: bool = False
    schedule: AskedScheduleName = "1f1b"
    microbatches: Count = 1
    update_every: Annotated[int, Field(ge=1, le=MAX_IN_FLIGHT)] | None = None
    workers: Count | None = None
    replicas: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    in_flight: Annotated[int, Field(ge=1, le=MAX_IN_FLIGHT)] | None = None
    chunks: Count = 2
    recompute: bool = True
    cost_model: CostModelName = "ours"
    simplest: Annotated[float, Field(ge=0, lt=1)] = 0.03
    max_cuts: Count = 1200

    @property
    def executions(self) -> list[ExecutionConfig]:
        """How a plan may be executed, under each schedule that the cost formulas cover."""
        kinds = [kind for kind in SCHEDULES.values() if kind.has_formulas and self.schedule in (kind.name, "auto")]
        if self.schedule == "auto" and self.microbatches == 1:
            kinds = [kind for kind in kinds if not kind.flushes]
        executions = [ExecutionConfig.of_schedule(kind.name, strategy=self.strategy) for kind in kinds]
        return [each.averaging(self.microbatches if each.kind.flushes else self.update_every) for each in executions]

    @property
    def min_stages(self) -> int:
        """Stages that a plan must have."""
        return len(self.replicas) if self.replicas else STRATEGIES[self.strategy].min_stages

    @property
    def with_replicas(self) -> str:
        """` with replicas 15-1`, for sentences about the plans that were asked for; empty where any are allowed."""
        return f" with replicas {self.replicas_text}" if self.replicas else ""

    @property
    def replicas_text(self) -> str:
        """`15-1`: the replicas as the option has them; empty where any are allowed."""
        return "-".join(map(str, self.replicas or ()))


class Plan(YamlArtifact):
    """`plans/NAME-4x4.yaml`.

    Attributes:
        profile: path of the profile it was made from.
        schedule: as `1f1b` (PipeDream), see pdtool.schedule.kinds for each.
        weights: which version each minibatch is computed with, see pdtool.schedule.policies.
        microbatches: microbatches in one update of a schedule with a flush; each has `batch_size` samples.
        update_every: minibatches in one update of every stage, for a schedule without a flush. None: each stage updates
            after as many as it has replicas (PipeDream); with vertical sync and 2bw, all update after the smallest
            number that their rules allow.
        chunks: stages on each worker (chunked schedules only); with v of them the plan has p v stages, and stage s is
            on the workers of stage s mod p.
        copies: d copies of one pipeline side by side, with the same weights. Replica k of every stage belongs to copy
            k mod d; copies meet only to average gradients.
        wire_dtype: dtype of float32 activations and gradients in messages between workers; the file has it only if it
            is not fp32.
        strategy: the requested strategy, see pdtool.schedule.strategies. The figures of `model-parallel` and `hybrid`
            are from formulas without pipelining.
        asked: the options; None: an earlier pdtool, which did not record them, or a person made the plan.
        path: the file that it was read from, or that `partition` wrote; "" if there is none. It is no field.
    """

    KIND: ClassVar[str] = "plan"
    MAKER: ClassVar[str] = "pdtool partition"
    SEALED: ClassVar[bool] = False
    path: ClassVar[str] = ""

    name: Title
    model: ModelRef | None
    profile: Label
    batch_size: Count
    cluster: Cluster
    schedule: ScheduleName = ExecutionConfig.schedule
    weights: WeightPolicyName = ExecutionConfig.weights
    microbatches: Annotated[int, Field(ge=1, le=MAX_IN_FLIGHT)] = 1
    update_every: Annotated[int, Field(ge=1, le=MAX_IN_FLIGHT)] | None = None
    chunks: Annotated[int, Field(ge=1, le=100)] = 1
    copies: Count = 1
    strategy: StrategyName = "auto"
    wire_dtype: Annotated[str, _one_of(*WIRE_BYTES)] = "fp32"
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    asked: PlanOptions | None = None
    predicted: Predicted | None = None
    why: Why | None = None

    @property
    def has_gain(self) -> bool:
        """Whether its gain over data parallelism says something: there are several workers, and the plan is for
        speed."""
        return self.cluster.workers > 1 and STRATEGIES[self.strategy].is_for_speed

    @property
    def certificate_lines(self) -> list[str]:
        """The certificate's claim, and why it holds; [] without a certificate."""
        certificate = self.why and self.why.certificate
        if not certificate:
            return []
        overestimate = "assume that every stage fills and drains as slowly as the slowest" if self.kind.flushes else ""
        if not STRATEGIES[self.strategy].is_pipelined:
            overestimate = "assume that stages and messages never overlap"
        simulated_s = self.predicted.simulated_s if self.predicted else None
        lines = (certificate.claim(overestimate, simulated_s), certificate.sentence())
        return [line for line in lines if line]

    @classmethod
    def upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        """Make a certificate from the bound, gap and sentence of an older plan."""
        why = content.get("why")
        if not isinstance(why, dict) or why.keys().isdisjoint(_EARLIER_CERTIFICATE):
            return content
        kept = {name: value for name, value in why.items() if name not in _EARLIER_CERTIFICATE}
        if why.get("lower_bound_s") is not None:
            earlier = {new: why[name] for name, new in _EARLIER_CERTIFICATE.items() if name in why}
            kept.setdefault("certificate", earlier)
        return content | {"why": kept}

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        if self.wire_dtype == "fp32":
            content.pop("wire_dtype", None)
        return content

    def check(self) -> None:
        check_levels("cluster.levels", self.cluster.levels)
        policies = self.kind.policy_names
        if self.weights not in policies:
            fault = f"{self.weights!r}: schedule {self.schedule} allows only {' or '.join(policies)}"
            raise FieldError("weights", fault)
        if not self.kind.flushes and self.microbatches != 1:
            raise FieldError("microbatches", f"{self.microbatches}: only flushing schedules have microbatches")
        if self.kind.flushes and self.update_every:
            raise FieldError(
                "update_every", f"{self.update_every}: a flushing schedule updates after its microbatches; write null"
            )
        replicas = max(stage.replicas for stage in self.stages)
        if self.update_every and self.update_every < replicas:
            fault = f"{self.update_every}: it must be at least {replicas}, one minibatch for each replica"
            raise FieldError("update_every", fault)
        if self.kind.chunked != (self.chunks > 1):
            chunked = schedule_names(lambda kind: kind.chunked, "and")
            raise FieldError("chunks", f"{self.chunks}: {chunked} need 2 or more on each worker, other schedules 1")
        self._check_workers()
        if self.kind.equal_replicas and len({stage.replicas for stage in self.stages}) > 1:
            fault = f"{self.schedule} needs the same number of replicas for each stage, but the plan is {self.config}"
            raise FieldError("schedule", f"{fault}; use a straight plan, or 1f1b-flush")
        if rule := STRATEGIES[self.strategy].broken_rule(self.schedule, self.shape()):
            raise FieldError("strategy", f"{self.strategy} {rule}; write auto for your own plan")
        self._check_predicted()

    def _check_predicted(self) -> None:
        """Check that there is a figure for each stage and border. After an edit there may be others, which are not
        used."""
        if self.predicted is None or self.edited:
            return
        stages = len(self.stages)
        counts = {"compute_s": stages, "allreduce_s": stages, "memory_bytes": stages, "transfer_s": stages - 1}
        for name, count in counts.items():
            if (given := len(getattr(self.predicted, name))) != count:
                raise FieldError(
                    f"predicted.{name}", f"has {counted(given, 'value')}, but {counted(stages, 'stage')} need {count}"
                )

    def _check_workers(self) -> None:
        workers = self.cluster.workers
        depth, rest = divmod(len(self.stages), self.chunks)
        if rest:
            fault = f"{len(self.stages)} stages cannot be divided evenly into {self.chunks} on each worker"
            raise FieldError("chunks", fault)
        user_of: dict[int, int] = {}  # worker -> the first of its stages
        for s, stage in enumerate(self.stages):
            self._check_stage(s, stage)
            self._check_chunk(s, stage, s % depth)
            times_named = Counter(stage.workers)
            for worker in stage.workers:
                if worker >= workers:
                    raise FieldError(f"stages[{s}].workers", f"there is no worker {worker}; write 0 to {workers - 1}")
                if user_of.setdefault(worker, s % depth) != s % depth or times_named[worker] > 1:
                    fault = f"worker {worker} is already used by stage {user_of[worker]}"
                    raise FieldError(f"stages[{s}].workers", fault)

    def _check_stage(self, s: int, stage: Stage) -> None:
        """Check what does not depend on other stages."""
        if repeated_nodes := [name for name, count in Counter(stage.nodes).items() if count > 1]:
            raise FieldError(f"stages[{s}].nodes", f"{repeated_nodes[0]!r} appears twice; remove one")
        if len(stage.workers) != stage.replicas:
            fault = f"{stage.replicas} replicas but {len(stage.workers)} workers"
            raise FieldError(f"stages[{s}].workers", fault)
        if stage.replicas % self.copies:
            fault = f"{stage.replicas} cannot be divided evenly into {self.copies} copies"
            raise FieldError(f"stages[{s}].replicas", fault)

    def _check_chunk(self, s: int, stage: Stage, first: int) -> None:
        """Check that a stage is on the workers of the `first` one there, with as many in flight."""
        for name, rule in (("workers", "must be those of"), ("in_flight", "must equal that of")):
            if getattr(stage, name) != getattr(self.stages[first], name):
                fault = f"{rule} stage {first}, because each worker has {self.chunks} chunks"
                raise FieldError(f"stages[{s}].{name}", fault)

    def stage_nodes(self, profile: Profile) -> list[list[str]]:
        """Return the nodes of each stage, and check them against the profile: each node once, stages in executable
        order.

        Raises:
            ArtifactError: a node is missing, doubled, unknown, separated from its group, or its output goes backwards.
        """
        stages = [profile.graph.expand(stage.nodes) for stage in self.stages]
        faults = profile.graph.stage_faults(stages)
        stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
        if not faults:  # so each node has a stage
            for group in profile.together:
                if len({stage_of[name] for name in group}) > 1:
                    faults.append(f"{', '.join(group)} must be in the same stage")
        if not faults:
            for name, stage in profile.pin.items():
                if stage_of[name] != stage % len(stages):
                    faults.append(f"{name} is pinned to stage {stage % len(stages)}, not {stage_of[name]}")
        if faults:
            more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
            remedy = "fix the stages by hand or partition again"
            raise ArtifactError(self.name, "; ".join(faults[:3]) + more, remedy, field="stages")
        return stages

    def shape(self, tied_stages: tuple[tuple[int, ...], ...] = ()) -> PipelineShape:
        """Return the shape that the plan's schedule is built for.

        Args:
            tied_stages: groups of stages that share a parameter, and so must update after the same number of
                minibatches.
        """
        stages = self.stages[: self.pipeline_depth]
        return self.execution.shape([s.replicas for s in stages], [s.in_flight for s in stages], tied_stages)

    def check_schedule(self) -> None:
        """Check that the schedule can be executed.

        Raises:
            ScheduleError: it deadlocks with these numbers in flight (the error names some that do not), or is far too
                long.
        """
        check_executable(self.kind, self.shape())

    @property
    def plan_sha256(self) -> str:
        """Digest of the fields that affect predictions."""
        is_default = self.strategy == Plan.model_fields["strategy"].default
        unsaid = {"strategy"} if is_default else set()  # as in plans from before it was a field
        content = self.model_dump(mode="json", exclude=_NOT_PREDICTED_FROM | unsaid)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def edited(self) -> bool:
        """Whether the plan was changed by hand since the figures in `predicted` were computed."""
        return self.predicted is None or self.predicted.plan_sha256 != self.plan_sha256

    def updated_text(self, text: str) -> str:
        """Return the plan's YAML with the figures and digests of `self`; comments stay.

        Args:
            text: YAML of the same plan, except for its figures and digests.

        Raises:
            FormatError: the text is not a YAML mapping.
        """
        is_of_same_profile = Plan.parse(text).digests == self.digests
        changed = {"predicted", "why"} if is_of_same_profile else {"digests", "predicted", "why"}
        new = with_values(text, self.model_dump(mode="json", include=changed))
        assert Plan.parse(new) == self
        return new

    @property
    def config(self) -> str:
        """The replicas of its stages, as `15-1`."""
        return self.execution.describe([stage.replicas for stage in self.stages[: self.pipeline_depth]])

    @property
    def memory_needed(self) -> list[int]:
        """Bytes that the tensors of a worker need, for each stage of a pipeline's depth; empty without a prediction."""
        return list(self.predicted.memory_bytes[: self.pipeline_depth]) if self.predicted else []

    @property
    def stages_with_little_room(self) -> list[int]:
        """The stages whose workers on a CPU return freed memory at once, because they need most of the limit."""
        limit = self.cluster.memory_bytes
        return [s for s, needed in enumerate(self.memory_needed) if limit and needed > LITTLE_ROOM * limit]

    @classmethod
    def load(cls, path: Path | str, *, may_be_pipe: bool = False) -> Self:
        """Read and check a plan; arguments and errors as of any artifact."""
        plan = super().load(path, may_be_pipe=may_be_pipe)
        plan.set_path(path)
        return plan

    def set_path(self, path: Path | str) -> None:
        """Record the file of this plan; its stage files lie beside it."""
        if str(path) != "-":
            object.__setattr__(self, "path", str(path))

    @property
    def kind(self) -> ScheduleKind:
        """Its schedule."""
        return SCHEDULES[self.schedule]

    @property
    def execution(self) -> ExecutionConfig:
        """How its stages are executed."""
        return ExecutionConfig(**{field.name: getattr(self, field.name) for field in fields(ExecutionConfig)})

    @property
    def workers(self) -> int:
        """Number of workers that the plan uses."""
        return sum(stage.replicas for stage in self.stages[: self.pipeline_depth])

    @property
    def pipeline_depth(self) -> int:
        """Number of stages that do not share their workers with an earlier stage; all, unless there are chunks."""
        return len(self.stages) // self.chunks
