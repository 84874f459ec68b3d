"""Load the module of a stage that codegen wrote, with the parameters and buffers of the whole model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import ArtifactError, describe_error
from pdtool.frontend.user_code import user_modules_importable


def load_stage_module(bundle: Bundle, folder: Path, stage: int, model: nn.Module) -> nn.Module:
    """Import the stage's class and give it the parameters and buffers of `model`, by name, without copying them.

    Raises:
        StaleError: a file is not as codegen wrote it.
        ArtifactError: it cannot be imported, or the parameters of the stage are not the model's.
    """
    bundle.check_files(folder)
    described = bundle.stages[stage]
    path = folder / described.file
    spec = importlib.util.spec_from_file_location(f"pdtool_stage_{stage}", path)
    assert spec
    assert spec.loader
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code
    try:
        with user_modules_importable():
            spec.loader.exec_module(code)
        kind = getattr(code, described.class_name)
        with torch.device("meta"):  # its values are those of the model
            module: nn.Module = kind(model) if described.opaque else kind()
    except Exception as error:
        what = f"cannot be used ({describe_error(error)})"
        raise ArtifactError(path, what, "mend it, or let `pdtool codegen` write it again") from error
    for kind in ("_parameters", "_buffers"):
        _take_over(module, model, kind, path)
    return module.train()


def _take_over(module: nn.Module, model: nn.Module, kind: str, path: Path) -> None:
    """Replace every entry of `kind` in `module` by the model's of the same name, so that what is tied stays tied."""
    for prefix, owner in module.named_modules():
        for key, value in getattr(owner, kind).items():
            name = f"{prefix}.{key}" if prefix else key
            original = _entry(model, kind, name)
            if value is None and original is None:
                continue
            if _description(value) != _description(original):
                raise ArtifactError(
                    path,
                    f"its {name} is {_description(value)}, the model's is {_description(original)}",
                    "run `pdtool codegen` again",
                )
            setattr(owner, key, original)  # nn.LSTM makes its list of weights here


def _entry(model: nn.Module, kind: str, name: str) -> Tensor | None:
    """The model's parameter or buffer of this name; a tensor that is a mere attribute is a buffer of its stage."""
    prefix, _, key = name.rpartition(".")
    try:
        owner = model.get_submodule(prefix)
    except AttributeError:
        return None
    value = getattr(owner, kind).get(key)
    if value is None and kind == "_buffers":
        value = vars(owner).get(key)
    return value if isinstance(value, Tensor) else None


def _description(value: Tensor | None) -> str:
    """`float32[4, 16]`, or `missing`."""
    return "missing" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
