"""Ordinary models train in stages as in a plain loop: the collection tests/models, in this process.

Each is traced, cut into three stages, generated and proved; then the stages, composed, are trained for 20 updates and
must end with the weights of a plain training loop. test_models_road.py takes some of them through the commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import test_codegen
import torch
from collection import FAMILIES, differences, tasks, trained_in_stages, trained_plainly, write_model
from test_codegen import plan_of, shared_traces, skeleton  # noqa: F401  a fixture: each model is traced once

from pdtool.generator.generate import generate

# What should pass and does not yet, and why. Whoever mends it takes it out.
FAILS_BY_REASON = {
    "a gradient taken in the forward of the model itself": ["generative.hamiltonian"],
    "a write to the data of a parameter in the forward of the model itself": ["structures.momentum_contrast"],
    "autocast and vmap in the forward of the model itself": ["structures.mixed_precision", "structures.ensemble"],
}
FAILS = {name: reason for reason, names in FAILS_BY_REASON.items() for name in names}

TASKS = tasks(*FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore")  # models warn, as they do in a plain loop


def parameters(names: Iterable[str]) -> list[Any]:
    """Names as parameters of a test, which those in FAILS are expected to fail."""
    marks = {name: [pytest.mark.xfail(strict=True, reason=FAILS[name])] if name in FAILS else [] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.fixture(autouse=True)
def one_thread_and_no_old_traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models are so small that a second thread only costs."""
    monkeypatch.setattr(test_codegen, "TRACES", {})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_collection_is_as_large_as_it_should_be():
    assert len(TASKS) >= 60
    assert FAILS.keys() <= {*TASKS, *tasks("refused")}


@pytest.mark.parametrize("name", parameters(TASKS))
def test_stages_train_as_a_plain_loop(name, tmp_path):
    file = write_model(tmp_path, name)
    profile = skeleton(file)
    bundle = generate(plan_of(profile, 3), profile, file, tmp_path / "bundle")
    assert bundle.proof == "values"
    if not TASKS[name].noisy:
        assert not differences(trained_in_stages(file, bundle, tmp_path / "bundle"), trained_plainly(file))
