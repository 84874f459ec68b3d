"""Models that take and return more than tensors by position: each a function that builds it.

`INPUTS` gives what `example_inputs` returns for a minibatch of n samples.
"""

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


# --- what a model returns ---------------------------------------------------------------------------------------------


class _Dict(_Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return {"scores": self.second(hidden), "others": {"hidden": hidden, "count": 3}, "missing": None}


Pair = namedtuple("Pair", "scores hidden")


class _NamedTuple(_Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return Pair(self.second(hidden), hidden)


@dataclass(frozen=True)
class Prediction:
    scores: torch.Tensor
    hidden: torch.Tensor
    samples: int
    weights: torch.Tensor = None

    def __post_init__(self):
        if self.scores.shape != self.hidden.shape:
            raise ValueError("scores and hidden differ in shape")


class _Dataclass(_Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return Prediction(self.second(hidden), hidden, x.shape[0])


class Named(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _Attributes(_Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return [Named(scores=self.second(hidden), hidden=hidden), (Pair(hidden, None),)]


class _Largest(_Net):
    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).max(1)


class _Distribution(_Net):
    def forward(self, x):
        return self.first(x), torch.distributions.Normal(self.second(x), 1.0)


# --- what it takes ----------------------------------------------------------------------------------------------------


class _Keywords(_Net):
    """As Hugging Face models do: called with a dict, whose labels make the loss."""

    def forward(self, words=None, mask=None, labels=None, scale=1.0, *, returns_scores=False):
        hidden = torch.tanh(self.first(words) * scale)
        scores = self.second(hidden if mask is None else hidden * mask)
        loss = None if labels is None else F.cross_entropy(scores, labels)
        return Named(loss=loss, scores=scores) if returns_scores else Named(loss=loss)


class _ReturnedScores(_Keywords):
    pass


class _AnyKeywords(_Net):
    def forward(self, **batch):
        return self.second(torch.tanh(self.first(batch["words"]))) * batch["mask"]


class _Positions(_Net):
    def forward(self, x, mask=None, bias=None, negated=False):
        x = self.first(x) if mask is None else self.first(x) * mask
        x = self.second(torch.tanh(x)) if bias is None else self.second(torch.tanh(x)) + bias
        return -x if negated else x


class _Nested(_Net):
    def forward(self, pair, batch):
        a, (b, _) = pair
        return self.second(torch.tanh(self.first(a) + b)) * batch["mask"]


@dataclass
class Batch:
    words: torch.Tensor
    mask: torch.Tensor


class _DataclassInput(_Net):
    def forward(self, batch):
        return self.second(torch.tanh(self.first(batch.words))) * batch.mask


class _Unused(_Net):
    def forward(self, x, ids, mask):
        return self.second(torch.tanh(self.first(x)))


# --- several minibatches in one ---------------------------------------------------------------------------------------


class _Siamese(_Net):
    def forward(self, a, b):
        left, right = self.second(torch.tanh(self.first(torch.cat([a, b])))).chunk(chunks=2, dim=0)
        return F.cosine_similarity(left, right)


class _Views(_Net):
    """As SimCLR does."""

    def forward(self, views):
        n = views.shape[0]
        x = self.second(torch.tanh(self.first(torch.cat(views.unbind(1)))))
        a, b, c = torch.split(x, n)
        return F.normalize(torch.stack([a, b], 1), dim=-1), c


class _Halves(_Net):
    def forward(self, a, b):
        x = torch.tanh(self.first(torch.cat([a, b, a])))
        n = x.shape[0] // 3
        return self.second(x[:n]) - x[n : 2 * n] + x.reshape(3, n, 8)[2]


class _Sections(_Net):
    def forward(self, a, b):
        x = torch.tanh(self.first(torch.cat([a, b])))
        left, right = x.split([a.shape[0], b.shape[0]])
        return self.second(left) * right + x.tensor_split(2)[1] + x.view(2, -1, 8).mean(0)


class _Lengths(_Net):
    def forward(self, a, b):
        scores = self.first(a) @ self.second(b).T
        return scores, F.cross_entropy(scores, torch.arange(len(scores)))


# --- around a model ---------------------------------------------------------------------------------------------------


class _Checkpointed(_Net):
    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(lambda x: self.second(torch.tanh(x)), x, use_reentrant=False)


class _Trained(nn.Module):
    """With what a LightningModule has."""

    def __init__(self):
        super().__init__()
        self.net = _Views()

    def forward(self, views):
        return self.net(views)

    def training_step(self, batch, index):
        return self(batch[0])[0].sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# --- what a model holds -----------------------------------------------------------------------------------------------


class _Table(_Net):
    """A mask that is a mere attribute, as rotary tables and relative positions are in many models."""

    def __init__(self):
        super().__init__()
        self.inner = _Net()
        self.inner.table = torch.randn(12, 8)
        self.second = nn.Linear(12, 8)
        self.small = torch.full((8,), 2.0)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) @ self.inner.table.T) * self.small


class _TableOfNumbers(_Net):
    def forward(self, x):
        return self.first(x) @ torch.tensor([[float(i == j) for i in range(9)] for j in range(8)])


def vectors(n):
    return torch.randn(n, 8)


INPUTS = {
    "keywords": lambda n: {"words": vectors(n), "mask": vectors(n), "labels": torch.randint(8, (n,)), "scale": 2.0},
    "returned_scores": lambda n: {"words": vectors(n), "mask": None, "returns_scores": True},
    "any_keywords": lambda n: {"words": vectors(n), "mask": vectors(n)},
    "positions": lambda n: (vectors(n), None, vectors(n), True),
    "nested": lambda n: ((vectors(n), [vectors(n), 5]), {"mask": vectors(n), "ids": torch.arange(n)}),
    "dataclass_input": lambda n: Batch(vectors(n), vectors(n)),
    "unused": lambda n: (vectors(n), torch.arange(n), torch.ones(n, 3, dtype=torch.bool)),
    "siamese": lambda n: (vectors(n), vectors(n)),
    "views": lambda n: torch.randn(n, 3, 8),
    "trained": lambda n: torch.randn(n, 3, 8),
    "halves": lambda n: (vectors(n), vectors(n)),
    "lengths": lambda n: (vectors(n), vectors(n)),
    "sections": lambda n: (vectors(n), vectors(n)),
}

dictionary = _Dict
named_tuple = _NamedTuple
dataclass_output = _Dataclass
attributes = _Attributes
largest = _Largest
distribution = _Distribution
keywords = _Keywords
returned_scores = _ReturnedScores
any_keywords = _AnyKeywords
positions = _Positions
nested = _Nested
dataclass_input = _DataclassInput
unused = _Unused
siamese = _Siamese
views = _Views
halves = _Halves
sections = _Sections
lengths = _Lengths
table = _Table
table_of_numbers = _TableOfNumbers
checkpointed = _Checkpointed
trained = _Trained
