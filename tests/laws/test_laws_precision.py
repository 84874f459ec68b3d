"""Law 3 with --precision bf16 and --compile: the same definitions, as exactly as such arithmetic allows.

bf16: the replay computes the whole model under the same autocast; what goes between stages is fp32, which holds a bf16
number exactly, so only the order of sums may differ. Against the replay in fp32 the weights may differ as bf16 rounds:
8 bits, or 0.4 %, of each step; the runs here take 14 steps.

compiled: inductor fuses and orders sums in its own way, in fp32: a few units in the last place of each step.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV2, CONV3, LSTM3, TIED3, Toy, assert_same, batches, stage_of, weights
from reference import replay
from test_laws_training import pipeline
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from pdtool.errors import UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch.launcher import check_config
from pdtool.runtime.stage.pipeline_stage import PipelineStage

SAME_BF16 = {"rtol": 1e-3, "atol": 1e-4}
NEAR_FP32 = {"rtol": 5e-2, "atol": 1e-2}
COMPILED = {"rtol": 1e-4, "atol": 1e-5}


def trained(spec: RunConfig, replicas: tuple[int, ...], under: Callable[[Any], Any] = lambda call: call) -> Any:
    """The replay's weights, the model and the loss computed `under` something."""
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    model.forward = under(model.forward)
    return replay.asynchronous(
        model,
        stage_of(spec).__getitem__,
        batches(spec),
        under(file.loss),
        file.optimizer,
        pipeline(spec, replicas, replicas),
    )


def autocast(call: Any) -> Any:
    """In bf16 where that is safe; what it returns is fp32."""

    def computed(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args).float()

    return computed


def is_lstm_computed_in_bf16() -> bool:
    """Whether torch can do it here: its LSTM of oneDNN has no bf16 for CPUs without AVX-512."""
    try:
        autocast(lambda x: torch.nn.LSTM(6, 7)(x)[0])(torch.zeros(1, 6))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("toy", "replicas"),
    [
        pytest.param(CONV3, (1, 1, 1), id="conv"),
        pytest.param(CONV3, (2, 1, 1), id="conv-2-1-1"),
        pytest.param(
            LSTM3,
            (1, 1, 1),
            id="lstm",
            marks=pytest.mark.skipif(not is_lstm_computed_in_bf16(), reason="torch has no LSTM in bf16 for this CPU"),
        ),
    ],
)
def test_bf16_equals_its_replay_and_is_near_fp32(tmp_path: Path, toy: Toy, replicas: tuple[int, ...]) -> None:
    spec = harness.job(tmp_path, toy, replicas, optimizer="sgd", epochs=2, precision="bf16")
    found = weights(harness.run(spec))
    assert all(value.dtype is not torch.bfloat16 for value in found.values())
    exact, expected = trained(spec, replicas), trained(spec, replicas, autocast)
    assert_same(found, expected, **SAME_BF16)
    assert_same(found, exact, **NEAR_FP32)
    assert any(not torch.allclose(found[n], value, rtol=1e-5, atol=1e-6) for n, value in exact.items()), "it is fp32"


# without autocast torch refuses to multiply a bf16 output by an fp32 matrix
PROJECTED = """
def loss(output, target):
    return F.cross_entropy(output @ torch.eye(4), target)
"""


@pytest.mark.parametrize("code", ["", PROJECTED], ids=["cross-entropy", "projected"])
def test_a_validation_in_bf16_computes_the_loss_as_training_does(tmp_path: Path, code: str) -> None:
    """The model and the loss under autocast, the metrics not, as of the weights that the epoch ends with."""
    toy = replace(CONV2, model=CONV2.model + code)
    spec = harness.job(tmp_path, toy, precision="bf16")
    found = weights(harness.run(spec))
    file = ModelFile.load(spec.model, trusted=True)
    model, data = file.build(spec.seed).eval(), file.dataset("valid")
    model.load_state_dict(found)
    total = 0.0
    for i in range(0, len(data), 4):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x, y = data.x[i : i + 4], data.y[i : i + 4]
            total += float(file.loss(model(x), y)) * len(y)
    assert harness.logged(spec.out)[-1].loss == pytest.approx(total / len(data), rel=1e-6)


def test_bf16_is_refused_where_the_model_switches_autocast_off(tmp_path: Path) -> None:
    """Stages do not, and would compute that part in bf16."""
    spec = harness.job(tmp_path, CONV2, precision="bf16")
    bundle = spec.bundle.model_copy(update={"autocast_off": ("model.py:7",)})
    with pytest.raises(UsageError, match=r"--precision bf16: the model switches autocast off at model\.py:7"):
        check_config(replace(spec, bundle=bundle))
    check_config(replace(spec, bundle=bundle, precision="fp32"))


def test_all_weight_versions_go_through_one_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    stage = PipelineStage(torch.nn.Linear(3, 3), None, compiled=True)
    for minibatch in range(3):
        stage.forward(minibatch, [torch.ones(2, 3, requires_grad=True)])
        stage.weights.prepare_update()
    assert stage.weights.peak_versions == 4
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("given", [None, os.path.abspath(default_cache_dir())])
def test_compiled_code_is_kept_where_no_other_user_can_put_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """torch reads code from a folder in /tmp, whoever made it, and names that in the environment."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "pdtool" / "torchinductor"
    for mode in (0o700, 0o777):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given or "")
        if mode == 0o777:
            folder.chmod(mode)
            with pytest.raises(
                UsageError, match=r"torchinductor, torch.compile.s cache, is not private to you; remove it"
            ):
                PipelineStage(torch.nn.Linear(3, 3), None, compiled=True)
        else:
            PipelineStage(torch.nn.Linear(3, 3), None, compiled=True)
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
            assert stat.S_IMODE(folder.stat().st_mode) == mode


def compiled_with_versions(tmp_path: Path) -> None:
    """As the replay. With three versions; which of them a policy takes is no matter of the compiler.

    All minibatches are of one size: those of the other law are not, and each size is compiled.
    """
    spec = harness.job(tmp_path, CONV3, (1, 1, 1), optimizer="sgd", batch_size=2, compiled=True, timeout_s=110.0)
    outcomes = harness.run(spec)
    assert max(o.peak_versions for o in outcomes) == 3
    assert_same(weights(outcomes), trained(spec, (1, 1, 1)), **COMPILED)


def compiled_with_a_flush(tmp_path: Path) -> None:
    """As the unsplit model. Tied weights, in both precisions at once."""
    spec = harness.job(
        tmp_path,
        TIED3,
        (1, 1, 1),
        optimizer="sgd",
        epochs=1,
        schedule="1f1b-flush",
        microbatches=2,
        compiled=True,
        precision="bf16",
        timeout_s=110.0,
    )
    found = weights(harness.run(spec))
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    expected = replay.synchronous(model, batches(spec), file.loss, file.optimizer, 2)
    assert_same(found, {n: v for n, v in expected.items() if n in found}, **NEAR_FP32)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("law", [compiled_with_versions, compiled_with_a_flush])
def test_compiled_stages_train_by_the_definitions(tmp_path: Path, law: Callable[[Path], None]) -> None:
    law(tmp_path)
