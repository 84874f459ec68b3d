"""The collection of ordinary models: each as a model.py of its own, trained by stages and by a plain loop.

A family is a file of tests/models with a table MODELS, name -> Task. The model.py of one of them is the text of its
family and a few lines that choose the model.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from reference import plain_loop
from torch import Tensor, nn

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.cli.commands.app import main
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.composed import compose
from pdtool.runtime.loading.minibatches import sample_order
from pdtool.runtime.worker.worker_model import load_stage_module

FOLDER = Path(__file__).parent / "models"
FAMILIES = ("vision", "sequences", "attention", "generative", "tabular", "structures")
LIBRARIES = ("torchvision_models", "timm_models", "transformers_models")
# What should pass and does not yet, and why. Whoever mends it takes it out.
FAILS_BY_REASON = {
    "a gradient taken in the forward of the model itself": ["generative.hamiltonian"],
    "a write to the data of a parameter in the forward of the model itself": ["structures.momentum_contrast"],
    "autocast and vmap in the forward of the model itself": ["structures.mixed_precision", "structures.ensemble"],
}
FAILS = {name: reason for reason, names in FAILS_BY_REASON.items() for name in names}

WORKERS = 3
_SEED, _EPOCHS, _BATCH_SIZE, _MICROBATCHES = 0, 2, 4, 2  # 20 updates of two minibatches
_RELATIVE = 1e-6  # of a tensor's largest value
_SMALL = 1e-3  # largest values below may be rounding errors themselves, such as a bias in front of a batch norm
_CRASHED = -1  # instead of an exit code

sys.path.append(str(FOLDER))  # the families import their neighbour, task.py

_CHOICE = """

TASK = MODELS[{name!r}]
model, dataset, loss, optimizer = TASK.build, TASK.dataset, TASK.loss, TASK.optimizer
HINTS = {{"pin": TASK.pin or {{}}}}
"""


def tasks(*families: str) -> dict[str, Any]:
    """`vision.resnet` -> its Task, of all models of some families."""
    modules = {family: importlib.import_module(family) for family in families}
    return {f"{family}.{name}": task for family, module in modules.items() for name, task in module.MODELS.items()}


def parameters(names: Iterable[str]) -> list[Any]:
    """Names as parameters of a test, which those in FAILS are expected to fail."""
    marks = {name: [pytest.mark.xfail(strict=True, reason=FAILS[name])] if name in FAILS else [] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


def write_model(folder: Path, name: str) -> ModelFile:
    """Write the model.py of `vision.resnet` and what it imports, and import it."""
    family, _, model = name.partition(".")
    for neighbour in ("task.py", "torchvision_models.py"):
        (folder / neighbour).write_text((FOLDER / neighbour).read_text())
    path = folder / "model.py"
    path.write_text((FOLDER / f"{family}.py").read_text() + _CHOICE.format(name=model))
    return ModelFile.load(ModelRef(source=str(path)), trusted=True)


def trained_plainly(file: ModelFile, *, validates: bool = False) -> dict[str, Tensor]:
    """The model's state after all epochs of a plain loop, each followed by a validation if it `validates`."""
    model = file.build(_SEED)
    _train(model, file, model, validates=validates)
    return model.state_dict()


def trained_in_stages(file: ModelFile, bundle: Bundle, folder: Path) -> dict[str, Tensor]:
    """The same of the stages in `folder`, called one after the other in this process."""
    model = file.build(_SEED)
    stages = [load_stage_module(bundle, folder, s, model) for s in range(len(bundle.stages))]

    class Composed(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            inputs = file.as_inputs(kwargs or args)
            return compose(stages, bundle, getattr(inputs, "tensors", inputs))

    _train(Composed(), file, model)
    return model.state_dict() | {name: value for stage in stages for name, value in stage.state_dict().items()}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Where two trained states differ by too much, each with by how much."""
    missing = [f"{name} is missing" for name in expected.keys() - found.keys()]
    errors = {name: _error(found[name], value) for name, value in expected.items() if name in found}
    differing = {name: error for name, error in errors.items() if not error <= _RELATIVE}
    return missing + [f"{name} by {error:.2g} of its largest value" for name, error in differing.items()]


@dataclass(frozen=True)
class Outcome:
    """What became of a model on its way through the commands.

    Attributes:
        code: the exit code of the command that ended the way; 0 if all did their work.
        message: what it said.
        wrong: where the trained weights are not those of a plain loop.
        stages: of the plan.
        opaque: modules that are never split.
    """

    code: int = 0
    message: str = ""
    wrong: tuple[str, ...] = ()
    stages: int = 0
    opaque: tuple[str, ...] = ()


def take_the_road(folder: Path, name: str, *, noisy: bool) -> Outcome:
    """Take a model through the commands in `folder`, the current one, and compare what was trained.

    A model without noise of its own must equal a plain loop, any other the same on one worker.
    """
    file = write_model(folder, name)
    failed = _run("profile", "model.py", "--batch-size", str(_BATCH_SIZE), "--threads", "1") or _train_on(WORKERS)
    if failed:
        return failed
    bundle = Bundle.load(folder / f"plans/model-{WORKERS}/bundle.yaml")
    found = torch.load(f"{WORKERS}.pt")
    if noisy and (failed := _train_on(1)):
        return failed
    expected = torch.load("1.pt") if noisy else trained_plainly(file, validates=True)
    opaque = tuple(path or "the model" for stage in bundle.stages for path in getattr(stage, "opaque", ()))
    return Outcome(wrong=tuple(differences(found, expected)), stages=len(bundle.stages), opaque=opaque)


def _train_on(workers: int) -> Outcome | None:
    """Plan for some workers, and train; None if that was done."""
    plan = f"plans/model-{workers}.yaml"
    flushing = ("--schedule", "1f1b-flush", "--microbatches", str(_MICROBATCHES), "--bandwidth", "100GB/s")
    commands = (
        ("partition", "--topology", str(workers), "--straight", "--simplest", "0%", *flushing, "-o", plan),
        ("codegen", plan),
        ("run", plan, "--epochs", str(_EPOCHS), "--seed", str(_SEED), "-o", f"runs/{workers}"),
        ("export", f"runs/{workers}", "-o", f"{workers}.pt"),
    )
    return next((failed for command in commands if (failed := _run(*command))), None)


def _run(*command: str) -> Outcome | None:
    """Run a command; None if it did its work."""
    result = CliRunner().invoke(main, command, prog_name="pdtool")
    if result.exit_code == 0:
        return None
    if not isinstance(result.exception, SystemExit):
        return Outcome(_CRASHED, f"{command[0]}: traceback of {result.exception!r}")
    return Outcome(result.exit_code, result.output.strip().splitlines()[-1])


def _train(model: nn.Module, file: ModelFile, original: nn.Module, *, validates: bool = False) -> None:
    """Train a model as `pdtool run` does: the same samples in the same order, the same updates.

    Args:
        original: has the parameters to train.
    """
    dataset: Any = file.dataset("train")
    plain_loop.train(
        model,
        dataset,
        [list(sample_order(_SEED, epoch, len(dataset))) for epoch in range(1, _EPOCHS + 1)],
        file.loss,
        file.module.optimizer(original.named_parameters()),
        batch_size=_BATCH_SIZE,
        accumulation=_MICROBATCHES,
        validation=file.dataset("valid") if validates else (),
    )


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest value that was expected."""
    if found.shape != expected.shape or not expected.numel():
        return 0.0 if found.shape == expected.shape else float("inf")
    a, b = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (found, expected))
    return (a - b).abs().max().item() / max(b.abs().max().item(), _SMALL)
