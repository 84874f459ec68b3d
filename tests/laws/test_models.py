"""Ordinary models train in stages as in a plain loop: the collection tests/models, in this process.

Each is traced, cut into three stages, generated and proved; then the stages, composed, are trained for 20 updates and
must end with the weights of a plain training loop. test_models_road.py takes some of them through the commands.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import skeletons
import torch
from collection import FAILS, FAMILIES, differences, parameters, tasks, trained_in_stages, trained_plainly, write_model
from skeletons import plan_of, shared_traces, skeleton  # noqa: F401  a fixture: each model is traced once

from pdtool.generator.generate import generate

TASKS = tasks(*FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore")  # models warn, as they do in a plain loop


@pytest.fixture(autouse=True)
def one_thread_and_no_old_traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models are so small that a second thread only costs."""
    monkeypatch.setattr(skeletons, "TRACES", {})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_collection_is_as_large_as_it_should_be():
    assert len(TASKS) >= 60
    assert FAILS.keys() <= {*TASKS, *tasks("refused")}


@pytest.mark.rows_of_the_day(days=7)
@pytest.mark.parametrize("name", parameters(TASKS))
def test_stages_train_as_a_plain_loop(name, tmp_path):
    file = write_model(tmp_path, name)
    profile = skeleton(file)
    bundle = generate(plan_of(profile, 3), profile, file, tmp_path / "bundle")
    assert bundle.proof == "values"
    if not TASKS[name].noisy:
        assert not differences(trained_in_stages(file, bundle, tmp_path / "bundle"), trained_plainly(file))
