"""One stage on this worker: its module, its borders, and what its replicas share. A worker has one, or its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pdtool.run.border import Border
from pdtool.run.optimize import Updater
from pdtool.run.replicas import Replicas
from pdtool.run.stage import Stage
from pdtool.run.tied import Tied


@dataclass(kw_only=True)
class Part:
    """One stage on this worker.

    Attributes:
        number: of the stage.
        replica: of the stage that this worker is.
        names: parameters and persistent buffers of the stage that a checkpoint holds.
        idle: what else of the model's state a checkpoint holds: second names of this stage's own parameters and, at
            the first stage, what no operator uses.
        weight, loss: of the round so far: samples (in minibatches) and the sum of their losses.
    """

    number: int
    replica: int
    stage: Stage
    border: Border
    replicas: Replicas
    updater: Updater
    tied: list[Tied]
    names: list[str]
    idle: dict[str, Tensor]
    weight: float = 0.0
    loss: float = 0.0

    def count(self, weight: float, loss: float) -> None:
        """A backward is done, of `weight` minibatches and of this loss."""
        self.weight += weight
        self.loss += weight * loss

    def update(self) -> float:
        """End a round: average the gradients over the replicas, then step in memory that nobody else needs.

        Returns:
            The mean loss of the round's samples.
        """
        for tied in self.tied:
            tied.start(self.weight)
        weight, loss = self.replicas.average_gradients(self.weight, self.loss)
        self.weight = self.loss = 0.0
        self.stage.weights.make_room()
        self.updater.step()
        self.look_ahead()
        return loss / weight

    def catch_up(self) -> None:
        """Before the stage's next action: take the steps of tied parameters that are due.

        Not in the update itself: another holder may wait for what this worker's other stages have yet to do.
        """
        for tied in self.tied:
            while tied.ready:
                tied.step()
                self.look_ahead()

    def look_ahead(self) -> None:
        """Let forwards see what the correction of delay says."""
        self.stage.weights.look_ahead({key: value for u in self.updaters for key, value in u.steps.seen().items()})

    def settle(self, minibatches: int) -> None:
        """The pipeline is empty: take the steps of tied parameters that are still due, make the replicas equal."""
        self.border.close()
        self.stage.weights.use()
        for tied in self.tied:
            while not tied.drained:
                tied.step()
        self.look_ahead()
        mine = len(range(self.replica, minibatches, self.replicas.size))
        self.replicas.average_buffers(self.stage.module.buffers(), mine)

    def state(self, canonical: Mapping[str, str]) -> dict[str, Tensor]:
        """This stage's part of a checkpoint; the optimizer state of a tied parameter is its first holder's.

        Args:
            canonical: parameter name -> its first name in the whole model.
        """
        own = self.stage.module.state_dict()
        state = {f"model.{name}": own[name] for name in self.names}
        state |= {f"model.{name}": value for name, value in self.idle.items()}
        owned = [tied.updater for tied in self.tied if tied.first]
        for updater in (self.updater, *owned):
            state |= {f"optimizer.{canonical[name]}.{key}": value for name, key, value in updater.state()}
        return state

    @property
    def updaters(self) -> list[Updater]:
        """All that step parameters of this stage."""
        return [self.updater, *(tied.updater for tied in self.tied)]
