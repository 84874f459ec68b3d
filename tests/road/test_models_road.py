"""Ordinary models go the whole road: the commands, on three workers, end with the weights of a plain training loop.

Some of the collection tests/models, as different as they can be, and those that must be refused. `make test-models`
takes all of them.
"""

from __future__ import annotations

import pytest
from collection import FAMILIES, parameters, take_the_road, tasks

ROAD = [
    "vision.unet",
    "vision.detector",
    "vision.counting_norms",
    "sequences.tagger",
    "sequences.packed_sequences",
    "attention.llama",
    "attention.sparse_experts",
    "generative.vq_vae",
    "tabular.gat",
    "structures.binary_net",
    "structures.shared_norm",
    "structures.shared_memory",
    "structures.missing_gradients",
]
TASKS, REFUSED = tasks(*FAMILIES), tasks("refused")
pytestmark = pytest.mark.filterwarnings("ignore")  # models warn, as they do in a plain loop


@pytest.mark.rows_of_the_day(days=6)
@pytest.mark.parametrize("name", parameters(ROAD))
def test_the_commands_train_as_a_plain_loop(name, folder):
    outcome = take_the_road(folder.path, name, noisy=TASKS[name].noisy)
    assert (outcome.code, outcome.message, outcome.wrong) == (0, "", ())
    assert outcome.stages == 3


@pytest.mark.parametrize("name", parameters(REFUSED))
def test_what_cannot_be_trained_is_refused_with_the_reason(name, folder):
    outcome = take_the_road(folder.path, name, noisy=False)
    assert outcome.code == 1, outcome
    assert outcome.message.startswith("error: ")
    assert REFUSED[name].refused in outcome.message
