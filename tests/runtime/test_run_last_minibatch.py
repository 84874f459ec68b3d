"""A last minibatch that batch norm cannot be trained with is found at the start of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from harness import CONV1, CONV3, Toy

from pdtool.errors import ModelError, PdtoolError
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.loading.minibatches import samples_in_epoch
from pdtool.runtime.worker.last_minibatch import check_last_minibatch, check_single_samples
from pdtool.runtime.worker.worker_model import load_stage_module

_NORMED = "self.fc = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))"


def normed(toy: Toy) -> Toy:
    """The toy with a batch norm that has one value per channel of each sample, in its last stage."""
    *first, (source, inputs, outputs) = toy.stages
    last = (source.replace("self.fc = nn.Linear(16, 4)", _NORMED), inputs, outputs)
    return replace(toy, model=toy.model.replace("self.fc = nn.Linear(16, 4)", _NORMED), stages=(*first, last))


def modules(spec: RunConfig) -> dict[int, torch.nn.Module]:
    model = ModelFile.load(spec.model, trusted=True).build()
    return {s: load_stage_module(spec.bundle, spec.bundle_dir, s, model) for s in range(len(spec.bundle.stages))}


CPU = torch.device("cpu")


def test_one_sample_is_refused_at_the_start_with_the_remedy(tmp_path: Path) -> None:
    """26 samples in minibatches of 5: before anything is trained."""
    spec = harness.job(tmp_path, normed(CONV3), batch_size=5)
    with pytest.raises(
        PdtoolError, match=r"one sample \(26 samples in minibatches of 5\).*; set DROP_LAST = True"
    ) as e:
        launch(spec)
    assert e.value.exit_code == 1
    assert not (spec.out / "metrics.jsonl").exists()


def test_it_is_found_by_shapes_alone(tmp_path: Path) -> None:
    """The module stays as it is; another number of samples, and a batch norm that keeps its statistics, go through."""
    spec = harness.job(tmp_path, normed(CONV1), batch_size=5)
    found = modules(spec)
    before = {name: value.clone() for name, value in found[0].state_dict().items()}
    with pytest.raises(ModelError, match="a single value per channel"):
        check_last_minibatch(found, spec.bundle, 26, CPU)
    assert all(torch.equal(value, before[name]) for name, value in found[0].state_dict().items())
    check_last_minibatch(found, spec.bundle, 25, CPU)
    found[0].get_submodule("fc").eval()
    check_last_minibatch(found, spec.bundle, 26, CPU)


def test_a_sample_that_is_squeezed_away_is_refused_at_the_start(tmp_path: Path) -> None:
    """As `x.squeeze()` does with a tensor [1, 4, 3, 3] of one sample; the bundle was made with more."""
    spec = harness.job(tmp_path, CONV3, batch_size=5)
    found = modules(spec)
    found[0].register_forward_hook(lambda module, args, output: output.squeeze())
    with pytest.raises(
        ModelError, match=r"one sample .* with shape \[[\d, ]+\], not \[1, .*; if forward calls squeeze"
    ):
        check_last_minibatch(found, spec.bundle, 26, CPU)
    check_last_minibatch(found, spec.bundle, 25, CPU)


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_stage_that_cannot_be_run_without_content_hides_no_later_one(tmp_path: Path, error: type[Exception]) -> None:
    """Such as one that looks at values: what it cannot do on one sample, training finds."""
    spec = harness.job(tmp_path, normed(CONV3), batch_size=5)
    found = modules(spec)

    def look(*_: object) -> None:
        raise error("a value is needed")

    found[0].register_forward_pre_hook(look)
    with pytest.raises(ModelError, match="a single value per channel"):
        check_last_minibatch(found, spec.bundle, 26, CPU)
    del found[2]
    check_last_minibatch(found, spec.bundle, 26, CPU)


def test_images_have_several_values_in_one_sample(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV1, batch_size=5)
    check_last_minibatch(modules(spec), spec.bundle, 26, CPU)


def test_minibatches_of_one_need_another_remedy(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, normed(CONV1), batch_size=1)
    with pytest.raises(ModelError, match="; profile and plan with a larger --batch-size"):
        check_last_minibatch(modules(spec), spec.bundle, 26, CPU)


def test_one_sample_for_which_the_stages_are_wrong_is_refused(tmp_path: Path) -> None:
    """In an epoch or a validation of 26 samples in minibatches of 5, if codegen has found that the model branches."""
    bundle = harness.job(tmp_path, CONV1, batch_size=5).bundle
    check_single_samples(bundle, 26, 26)
    bundle = bundle.model_copy(update={"differs_for_one_sample": True})
    check_single_samples(bundle, 25, 27)
    check_single_samples(bundle, 25, 0)
    with pytest.raises(ModelError, match=r"last minibatch of an epoch has one sample \(26 .* or set DROP_LAST = True$"):
        check_single_samples(bundle, 26, 25)
    with pytest.raises(ModelError, match=r"last minibatch of a validation has one sample .*HINTS = \{'opaque'"):
        check_single_samples(bundle, 25, 26)


@pytest.mark.parametrize(
    ("steps", "drop_last", "count"), [(None, False, 26), (None, True, 24), (3, True, 12), (9, True, 24)]
)
def test_samples_of_an_epoch(tmp_path: Path, steps: int | None, drop_last: bool, count: int) -> None:
    assert samples_in_epoch(26, harness.job(tmp_path, CONV1, steps=steps), drop_last=drop_last) == count


def test_no_minibatch_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="with DROP_LAST the training set of 3 samples has no minibatch of 4; remove"):
        samples_in_epoch(3, harness.job(tmp_path, CONV1), drop_last=True)
