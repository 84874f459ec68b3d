"""The shape of a pipeline that a schedule is built for: stages, replicas, and the bounds that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdtool.schedule.versions import is_asynchronous


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """The stages, replicas and bounds that a schedule is built for.

    Attributes:
        replicas: r[s], for each stage.
        in_flight: w[s], for each stage, see `default_in_flight`; with chunks for each worker, over all its chunks.
        update_every: k[s], minibatches in one update of stage s, over all its replicas.
        chunks: v, stages on one worker: of p v stages, worker k holds k, k + p, k + 2p, ...
        weights: the policy, one of versions.POLICIES.
    """

    replicas: tuple[int, ...]
    in_flight: tuple[int, ...]
    update_every: tuple[int, ...]
    chunks: int = 1
    weights: str = "stash"

    @property
    def pipeline_depth(self) -> int:
        """p: the number of stages that do not share their workers with an earlier stage."""
        return len(self.replicas) // self.chunks

    @property
    def representative_minibatches(self) -> int:
        """So many that a schedule fills, is steady and drains."""
        return 2 * max(*self.update_every, total_in_flight(self.replicas[: self.pipeline_depth], self.in_flight)) + 1

    def stage_replicas(self) -> Iterator[tuple[int, int]]:
        """Yield (stage, replica) of each worker's list, in order; with chunks the first stage on that worker."""
        return ((s, k) for s, r in enumerate(self.replicas[: self.pipeline_depth]) for k in range(r))

    def stages_on_same_workers(self, stage: int) -> range:
        """Return all stages on the workers of `stage`."""
        return range(stage % self.pipeline_depth, len(self.replicas), self.pipeline_depth)

    def versions(self, stage: int) -> int:
        """Return the maximal number of weight versions at one replica of a stage, the newest included.

        Between two updates a replica does k/r backwards, so of w minibatches in flight no more than that many were
        begun with the same weights. With vertical sync the minibatches in flight at the first stage count, everywhere.
        """
        r, w, k = self.replicas[stage], self.in_flight[stage % self.pipeline_depth], self.update_every[stage]
        match self.weights:
            case "flush" | "none":
                return 1
            case "2bw":
                return 2
            case "vertical-sync":
                return 1 + math.ceil((self.replicas[0] * self.in_flight[0] - 1) / k)
            case _:
                return min(w, 1 + math.ceil((w - 1) / max(1, k // r)))


def default_in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return w[s] = ceil(sum of r[j] for j >= s, over r[s]), just enough to keep every later worker busy.

    PipeDream, SOSP'19, section 3.2 (NOAM is this number at the input stage).
    """
    return tuple(math.ceil(sum(replicas[s:]) / r) for s, r in enumerate(replicas))


def default_shape(name: str, replicas: Sequence[int], microbatches: int = 1, chunks: int = 1) -> PipelineShape:
    """Return the shape that schedule `name` is defined for.

    Args:
        replicas: r[s]; for `interleaved` and `zb-h1` all the same, r pipelines side by side.
        microbatches: in one update of a flushing schedule; the minimum for `2bw`.
        chunks: v, for `interleaved`.
    """
    p, usual = len(replicas), default_in_flight(replicas)
    if name == "1f1b":
        return PipelineShape(replicas=tuple(replicas), in_flight=usual, update_every=tuple(replicas))
    per_replica = [math.ceil(microbatches / r) for r in replicas]  # microbatches of one update
    weights = "flush"
    match name:
        case "2bw":  # k >= all in flight, so that a third version is never begun (Narayanan et al., 2021, section 3.1)
            microbatches, weights = max(microbatches, total_in_flight(replicas, usual)), "2bw"
            in_flight = usual
        case "1f1b-flush":
            in_flight = tuple(map(min, usual, per_replica))
        case "interleaved":  # after the warm-up, one more; the last round may be short, and its groups larger
            rounds = range(1, per_replica[0] + 1)
            in_flight = tuple(
                max(min(interleaved_warm_up(p, r, n, chunks) + 1, n * chunks) for n in rounds) for r in range(p)
            )
        case "zb-h1":  # the memory of 1F1B's first stage, everywhere (ICLR'24, section 2.1)
            in_flight = (min(p, per_replica[0]),) * p
        case _:
            in_flight = tuple(per_replica)
    stages = p * chunks
    return PipelineShape(
        replicas=tuple(replicas) * chunks,
        in_flight=in_flight,
        update_every=(microbatches,) * stages,
        chunks=chunks,
        weights=weights,
    )


def total_in_flight(replicas: Sequence[int], in_flight: Sequence[int]) -> int:
    """Return the minibatches in flight at all replicas of the stage that has the most."""
    return max(w * r for w, r in zip(in_flight, replicas, strict=True))


def interleaved_groups(p: int, microbatches: int) -> list[int]:
    """Return the sizes of the groups that pass one chunk before the next: p, as in Megatron-LM (SC'21, section 2.2).

    Where p does not divide them the groups are even and larger than p: one smaller than p would deadlock.
    """
    count = max(1, microbatches // p)
    return [microbatches // count + (i < microbatches % count) for i in range(count)]


def interleaved_warm_up(p: int, worker: int, microbatches: int, chunks: int) -> int:
    """Count the forwards before the first 1F1B pair: the first minibatch must pass all chunks of the last worker."""
    return 2 * (p - worker - 1) + (chunks - 1) * interleaved_groups(p, microbatches)[0]


def tied_update_lag(shape: PipelineShape, holders: Sequence[int], stage: int) -> int:
    """Return by how many rounds `stage` runs ahead of the first holder f of a tied parameter (see pdtool/run).

    ceil((r[f] w[f] - r[s] w[s]) / k), at least 0.
    """
    first, this = (shape.replicas[s] * shape.in_flight[s] for s in (min(holders), stage))
    return max(0, math.ceil((first - this) / shape.update_every[stage]))


def pipeline_shape(
    schedule: str,
    *,
    replicas: Sequence[int],
    in_flight: Sequence[int],
    weights: str,
    microbatches: int = 1,
    update_every: int | None = None,
    chunks: int = 1,
    tied_stages: Sequence[Sequence[int]] = (),
) -> PipelineShape:
    """Return the shape of a plan, with the number of minibatches after which each stage updates.

    Args:
        replicas: of each stage.
        in_flight: of each stage; with chunks of the first stage on each worker.
        weights: the policy, one of versions.POLICIES.
        microbatches: in one update of a flushing schedule.
        update_every: minibatches in one update of every stage, without a flush; None: as many as the stage has
            replicas (PipeDream), and with vertical sync or 2BW the fewest that suit all stages.
        tied_stages: groups of stages that share a parameter, and so must update after the same number of minibatches.
    """
    if not is_asynchronous(schedule):
        intervals = [microbatches] * len(replicas)
    elif update_every:
        intervals = [update_every] * len(replicas)
    elif weights == "vertical-sync":
        intervals = [math.lcm(*replicas)] * len(replicas)
    elif weights == "2bw":
        intervals = [total_in_flight(replicas[: len(in_flight)], in_flight)] * len(replicas)
    else:
        intervals = list(replicas)
        for stages in tied_stages:
            for s in stages:
                intervals[s] = math.lcm(*(replicas[t] for t in stages))
    return PipelineShape(
        replicas=tuple(replicas),
        in_flight=tuple(in_flight),
        update_every=tuple(intervals),
        chunks=chunks,
        weights=weights,
    )
