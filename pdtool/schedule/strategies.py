"""The strategies of plans: PipeDream's own, and those that it is compared with.

Source: PipeDream, SOSP'19, section 2 (definitions) and section 5 (the comparison). U is the number of workers.
pdtool.planner.choice.strategies finds the plan of each strategy.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdtool.schedule.shape import PipelineShape


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What defines the plans of a strategy.

    Attributes:
        name: its name for `--strategy`.
        label: its name in tables.
        noun: name of one of its plans in sentences; empty: `plan of strategy NAME`.
        schedule: its only schedule; None: any.
        fixes_updates: whether it fixes how many minibatches an update averages.
        is_straight: whether no stage is replicated.
        depths: function of the number of workers and the most stages that the model can be cut into; returns the
            numbers of stages that its plans may have if none is replicated.
        min_workers, min_stages: the least that its plans have.
        is_pipelined: whether stages compute at the same time; otherwise they take turns.
        is_searched: whether it has several plans to choose from.
        is_own: whether it is PipeDream's own; the names of other plans end with their strategy.
        is_for_speed: whether its plan runs as fast as the method that it stands for.
        rule: a rule that its figures need and that an edit by hand may break; such a plan cannot be run in another way.
            Empty: none.
        keeps_rule: whether a plan of this shape and schedule keeps the rule.
        remark: a remark on its plans, for people; empty: none.
    """

    name: str
    label: str
    noun: str = ""
    schedule: str | None = None
    fixes_updates: bool = False
    is_straight: bool = False
    depths: Callable[[int, int], Sequence[int]] = lambda workers, max_stages: [workers]
    min_workers: int = 1
    min_stages: int = 1
    is_pipelined: bool = True
    is_searched: bool = True
    is_own: bool = False
    is_for_speed: bool = True
    rule: str = ""
    keeps_rule: Callable[[PipelineShape], bool] = lambda shape: True
    remark: Callable[[PipelineShape], str] = lambda shape: ""

    def broken_rule(self, schedule: str, shape: PipelineShape) -> str:
        """Return the rule if a plan with this schedule and shape does not keep it, else nothing."""
        is_kept = not self.rule or (schedule == self.schedule and self.keeps_rule(shape))
        return "" if is_kept else self.rule


def _asynchronous_remark(shape: PipelineShape) -> str:
    count = shape.in_flight[0]
    return (
        f"this is for learning curves, not for speed: one worker imitates {count} workers that update in turns, "
        f"so each gradient is {count - 1} updates late"
    )


_ALL = (
    Strategy(name="auto", label="the planner's choice", noun="plan", is_own=True),
    Strategy(name="pipeline", label="pipeline", min_workers=2, min_stages=2, is_own=True),
    Strategy(name="straight", label="straight pipeline", noun="straight pipeline", is_straight=True, is_own=True),
    Strategy(name="data-parallel", label="data parallelism", schedule="1f1b", fixes_updates=True, is_searched=False),
    Strategy(
        name="model-parallel",
        label="model parallelism",
        schedule="1f1b",
        fixes_updates=True,
        is_straight=True,
        depths=lambda workers, max_stages: [min(workers, max_stages)],
        min_workers=2,
        min_stages=2,
        is_pipelined=False,
        rule="needs schedule 1f1b, one replica of each stage and one minibatch in flight",
        keeps_rule=lambda shape: set(shape.replicas) == {1} == set(shape.in_flight),
    ),
    Strategy(  # more stages take longer to fill and drain
        name="gpipe",
        label="GPipe",
        schedule="gpipe",
        is_straight=True,
        depths=lambda workers, max_stages: range(2, min(workers, max_stages) + 1),
        min_workers=2,
        min_stages=2,
    ),
    Strategy(
        name="hybrid",
        label="hybrid parallelism",
        schedule="1f1b-flush",
        fixes_updates=True,
        min_workers=3,
        min_stages=2,
        is_pipelined=False,
        rule="needs schedule 1f1b-flush, and as many microbatches as the first stage has replicas",
        keeps_rule=lambda shape: shape.update_every[0] == shape.replicas[0],
    ),
    Strategy(
        name="async-data-parallel",
        label="asynchronous data parallelism",
        schedule="1f1b",
        fixes_updates=True,
        is_searched=False,
        is_for_speed=False,
        rule="needs schedule 1f1b, and one stage on one worker",
        keeps_rule=lambda shape: shape.replicas == (1,),
        remark=_asynchronous_remark,
    ),
)
STRATEGIES = {strategy.name: strategy for strategy in _ALL}
RIVALS = tuple(strategy.name for strategy in _ALL[1:] if strategy.is_for_speed)  # of a plan: not the planner's choice
BASELINES = ("data-parallel", "straight", "gpipe", "model-parallel")  # of every plan
