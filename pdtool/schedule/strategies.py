"""The strategies that a plan can be asked for: PipeDream's own, and those that it is compared with.

Source: PipeDream, SOSP'19, section 2 (what each is) and section 5 (the comparison). U is the number of workers.

    auto                 whatever is fastest: data parallelism, or a pipeline whose stages may be replicated
    pipeline             the fastest pipeline of two stages or more
    straight             the fastest pipeline of one stage on each worker
    data-parallel        the whole model on each worker; an update averages one minibatch of every worker
    model-parallel       one stage on each worker and one minibatch in flight, so that stages take turns
    gpipe                at most one stage on each worker; an update flushes the pipeline of its microbatches
    hybrid               stages are replicated and take turns: the first stage computes one minibatch on each of its
                         replicas, the others share these, and the next ones begin after the update
    async-data-parallel  U workers update in turns without waiting (ASP), so each gradient is U - 1 updates late;
                         computed by one worker with U minibatches in flight: for learning curves, not for speed
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What distinguishes the plans of a strategy.

    Attributes:
        label: in tables.
        schedule: the only one that it has; None: any.
        is_straight: whether no stage is replicated.
        min_workers, min_stages: that its plans have.
        is_pipelined: whether stages compute at the same time; otherwise they take turns.
        is_selected: whether its plan is chosen by simulation, from a shortlist; otherwise by the formulas.
        is_searched: whether there are several plans of it to choose from.
    """

    label: str
    schedule: str | None = None
    is_straight: bool = False
    min_workers: int = 1
    min_stages: int = 1
    is_pipelined: bool = True
    is_selected: bool = False
    is_searched: bool = True


STRATEGIES = {
    "auto": Strategy(label="the planner's choice", is_selected=True),
    "pipeline": Strategy(label="pipeline", min_workers=2, min_stages=2, is_selected=True),
    "straight": Strategy(label="straight pipeline", is_straight=True, is_selected=True),
    "data-parallel": Strategy(label="data parallelism", schedule="1f1b", is_searched=False),
    "model-parallel": Strategy(
        label="model parallelism", schedule="1f1b", is_straight=True, min_workers=2, min_stages=2, is_pipelined=False
    ),
    "gpipe": Strategy(label="GPipe", schedule="gpipe", is_straight=True, min_workers=2, min_stages=2),
    "hybrid": Strategy(
        label="hybrid parallelism", schedule="1f1b-flush", min_workers=3, min_stages=2, is_pipelined=False
    ),
    "async-data-parallel": Strategy(label="asynchronous data parallelism", schedule="1f1b", is_searched=False),
}
RIVALS = tuple(name for name in STRATEGIES if name not in ("auto", "async-data-parallel"))  # that compare in speed
