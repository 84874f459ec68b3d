"""One stage on this worker: its module, its borders, and what its replicas share. A worker has one, or its chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pdtool.errors import PdtoolError
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
        losses: of minibatches of the round, at the last stage; numbers are read off the device once a round.
        weights: of the minibatches that the round has so far, in whole minibatches.
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
    losses: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def count(self, minibatch: int, weight: float) -> None:
        """The backward of a minibatch is done."""
        self.weights[minibatch] = weight

    def update(self, epoch: int) -> float:
        """End a round: average the gradients over the replicas, then step in memory that nobody else needs.

        Returns:
            The mean loss of the round's samples.

        Raises:
            PdtoolError: a loss is not a number.
        """
        weight, loss = sum(self.weights.values()), self._loss(epoch)
        self.weights.clear()
        for tied in self.tied:
            tied.start(weight)
        weight, loss = self.replicas.average_gradients(weight, loss)
        self.stage.weights.make_room()
        self.updater.step()
        self.look_ahead()
        return loss / weight

    def _loss(self, epoch: int) -> float:
        """The sum over the round's samples, in minibatches."""
        total = 0.0
        for i, weight in self.weights.items():
            loss = self.losses.pop(i).item() if i in self.losses else 0.0
            if not math.isfinite(loss):
                raise PdtoolError(
                    f"the loss is {loss} in minibatch {i} of epoch {epoch}",
                    "try a lower learning rate, and check the data and the loss for division by zero or log(0)",
                )
            total += weight * loss
        return total

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
