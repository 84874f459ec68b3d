"""What a strategy means for the search: the options that go with it."""

from __future__ import annotations

from typing import Any

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import MAX_IN_FLIGHT
from pdtool.errors import UsageError
from pdtool.partition.search.device_blocks import MAX_WORKERS_PER_COPY
from pdtool.partition.search.search import SearchOptions
from pdtool.schedule import SCHEDULES, STRATEGIES, is_asynchronous

_DEFAULT_MICROBATCHES = 4  # of a flushing schedule that was asked for by name
_SCHEDULES_WITHOUT_REPLICAS = ("interleaved", "zb-h1")


def strategy_options(
    name: str, cluster: Cluster, *, schedule: str | None = None, microbatches: int | None = None, **others: Any
) -> SearchOptions:
    """Return the search options for the best plan of a strategy.

    GPipe has as many microbatches as there are workers, so that an update takes the samples that one of data
    parallelism takes.

    Args:
        name: one of STRATEGIES.
        schedule, microbatches: None: what goes with the strategy.
        others: further fields of SearchOptions.

    Raises:
        UsageError: the strategy has no such schedule, microbatches or replicas, or needs more workers.
    """
    strategy = STRATEGIES[name]
    workers = others.get("workers") or cluster.workers
    if workers < strategy.min_workers:
        raise UsageError(
            f"--strategy {name} on {workers} worker(s)", f"give {strategy.min_workers} or more, or another strategy"
        )
    if strategy.schedule and schedule not in (None, strategy.schedule):
        raise UsageError(
            f"--strategy {name} with --schedule {schedule}", f"leave --schedule out: it has {strategy.schedule}"
        )
    if strategy.schedule not in (None, "gpipe") and microbatches not in (None, 1):
        raise UsageError(f"--strategy {name} with --microbatches {microbatches}", "leave --microbatches out")
    if strategy.schedule not in (None, "1f1b") and others.get("cost_model", "ours") != "ours":
        raise UsageError(f"--strategy {name} with --cost {others['cost_model']}", "leave --cost out")
    chosen = schedule or strategy.schedule or "1f1b"
    match name:
        case "gpipe":
            default = workers
        case "hybrid":
            default = workers - 1  # the most that its first stage can have; all below are searched, too
        case _:
            default = 1 if chosen == "auto" or is_asynchronous(chosen) else _DEFAULT_MICROBATCHES
    straight = others.pop("straight", False) or strategy.is_straight
    if not strategy.is_searched:
        others["max_stages"] = 1
    options = SearchOptions(
        strategy=name, schedule=chosen, microbatches=microbatches or default, straight=straight, **others
    )
    if options.replicas:
        _check_replicas(options, cluster)
    return options


def of_global_batch_size(
    samples: int,
    batch_size: int,
    strategy: str,
    *,
    schedule: str | None = None,
    microbatches: int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the schedule and the microbatches with which an update averages so many samples.

    Args:
        samples: in one update.
        batch_size: of a minibatch, as profiled; a microbatch has the same.
        strategy, schedule, microbatches: what is asked for besides.

    Raises:
        UsageError: minibatches do not make up that number, or what is asked for does not flush.
    """
    asked = f"--global-batch-size {samples}"
    if microbatches:
        raise UsageError(f"{asked} together with --microbatches {microbatches}", "give one of them")
    if STRATEGIES[strategy].schedule not in (None, "gpipe"):
        raise UsageError(f"{asked} with --strategy {strategy}, whose updates have a size of their own", "leave it out")
    schedule = schedule or STRATEGIES[strategy].schedule or "1f1b-flush"
    if schedule == "auto" or is_asynchronous(schedule):
        flushing = ", ".join(name for name in SCHEDULES if not is_asynchronous(name))
        raise UsageError(f"{asked} with --schedule {schedule}, which does not flush", f"choose of {flushing}")
    count, rest = divmod(samples, batch_size)
    if rest or not count:
        near = " or ".join(str(batch_size * n) for n in (count, count + 1) if n)
        remedy = f"give {near}, or profile with a --batch-size that divides {samples}"
        raise UsageError(f"{asked} is no multiple of the minibatch of {batch_size} that was profiled", remedy)
    if count > MAX_IN_FLIGHT:
        raise UsageError(
            f"{asked} is {count} minibatches of {batch_size}", f"give at most {MAX_IN_FLIGHT * batch_size}"
        )
    return {"schedule": schedule, "microbatches": count}


def _check_replicas(options: SearchOptions, cluster: Cluster) -> None:
    """Raise UsageError where no plan with these replicas goes with the other options, or lies on the cluster."""
    asked, workers = f"--replicas {options.replicas_text:.80}", sum(options.replicas or ())
    strategy = STRATEGIES[options.strategy]
    if options.straight or not strategy.is_selected:
        raise UsageError(f"{asked} together with --strategy {options.strategy}", "give one of them")
    if options.workers is not None:
        raise UsageError(f"{asked} together with --workers {options.workers}", "leave --workers out")
    if options.schedule in _SCHEDULES_WITHOUT_REPLICAS:
        allowed = ", ".join(name for name in SCHEDULES if name not in _SCHEDULES_WITHOUT_REPLICAS)
        raise UsageError(f"{asked} together with --schedule {options.schedule}", f"choose of {allowed}")
    if options.min_stages < strategy.min_stages:
        raise UsageError(f"{asked} is one stage", f"--strategy {options.strategy} has {strategy.min_stages} or more")
    if workers > cluster.workers:
        raise UsageError(
            f"{asked} is on {workers} workers: the cluster has {cluster.workers}",
            "give fewer replicas, or a larger --topology",
        )
    if workers > MAX_WORKERS_PER_COPY:
        raise UsageError(f"{asked} is on {workers} workers", f"give at most {MAX_WORKERS_PER_COPY}")
