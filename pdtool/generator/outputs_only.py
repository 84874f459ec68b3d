"""Check that loss() and metrics() compute from the model's output and the target alone.

In a plain loop they may see more: how one output was computed from another (`torch.autograd.grad`), and the model's
weights and attributes, if a variable such as NET refers to it. In a pipeline, outputs of earlier stages arrive without
their graph, each stage has weights of its own, and no stage sets an attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pdtool.artifacts.bundle import Bundle
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs
from pdtool.frontend.operators import registered_state
from pdtool.frontend.trial import tried
from pdtool.generator.composed import compose, copy_state, load_stages, state_kept
from pdtool.generator.kept_state import has_same_content
from pdtool.generator.verify import VERIFIED_SAMPLES, repeatable

_Sight = tuple[str, Literal["graph", "model"]]  # a function, and what it sees


def check_outputs_only(model_file: ModelFile, bundle: Bundle, texts: Mapping[str, str], outputs: int | None) -> None:
    """Check loss() and metrics() on the training set, unless neither can see more.

    Args:
        texts: texts of the stage files, by name.
        outputs: number of tensors that the model returns; None: unknown.

    Raises:
        ModelError: one of them gives other values in the last stage.
    """
    may_see_graph = outputs != 1 and len(bundle.stages) > 1
    may_see_model = any(map(_has_tensors, vars(model_file.module).values()))
    if not (may_see_graph or may_see_model):
        return
    seen = None
    with suppress(Exception):  # of user code; others tell
        inputs, target = model_file.example_batch(min(bundle.batch_size, VERIFIED_SAMPLES))
        seen = _seen(model_file, bundle, texts, model_file.as_inputs(inputs), target)
    match seen:
        case function, "graph":
            what = (
                f"{function}() depends on how the model computed its outputs, as torch.autograd.grad does, but outputs "
                "of earlier stages reach it without their graph"
            )
            remedy = "train without stages, as with `pdtool partition --strategy data-parallel`"
            raise model_file.error_in(function, what, remedy)
        case function, "model":
            what = (
                f"{function}() reads a weight, buffer or attribute of the model from a variable, but in the last stage "
                "this variable is not updated during training"
            )
            raise model_file.error_in(function, what, "let forward return what it needs as part of the output")


def _has_tensors(value: Any) -> bool:
    """Whether a variable refers to tensors, which may be the model's."""
    if isinstance(value, nn.Module):
        return bool(registered_state(value))
    if isinstance(value, type):
        return value.__module__ != Tensor.__module__ and any(isinstance(v, nn.Module) for v in vars(value).values())
    if isinstance(value, (list, tuple, dict)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _seen(
    model_file: ModelFile, bundle: Bundle, texts: Mapping[str, str], inputs: ModelInputs, target: Any
) -> _Sight | None:
    """Return what loss() or metrics() sees besides outputs and target; None if nothing, or if it is not known."""
    stages = load_stages(texts, bundle, build=model_file.build)
    model = model_file.build()  # the newest one, to which variables of model.py refer
    copy_state(model, stages, bundle)

    def output(*, training: bool, cuts_graph: bool) -> Any:
        for stage in stages:
            stage.train(training)
        return compose(stages, bundle, inputs.map(torch.clone).tensors, cuts_graph=cuts_graph)

    def figures(*, cuts_graph: bool = False, is_trained: bool = False) -> dict[str, Any]:
        """The loss of the minibatch in training, and its metrics in evaluation unless metrics() raises. Variables stay
        as they are: loss() may read those that metrics() changes."""

        def figures_now() -> dict[str, Any]:
            if is_trained:
                _change_as_training_does(model, inputs, with_state=len(stages) > 1)
            with repeatable(), state_kept(*stages):
                loss = float(model_file.loss(output(training=True, cuts_graph=cuts_graph), target).detach())
                found: dict[str, Any] = {"loss": loss}
                with torch.no_grad(), suppress(Exception):
                    found["metrics"] = model_file.metrics(output(training=False, cuts_graph=cuts_graph), target)
            return found

        return tried(figures_now, registered_state(model).values())

    connected, again = figures(), figures()
    if not has_same_content(connected, again):
        return None  # it reads a clock, or it counts its calls and `tried` could not undo that
    try:
        alone = figures(cuts_graph=True)
    except Exception:  # such as torch's "One of the differentiated Tensors appears to not have been used in the graph"
        return "loss", "graph"
    if function := _different(connected, alone):
        return function, "graph"
    function = _different(alone, figures(cuts_graph=True, is_trained=True))
    return (function, "model") if function else None


def _different(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the first function whose values differ."""
    return next((name for name, values in before.items() if not has_same_content(values, after.get(name))), None)


def _change_as_training_does(model: nn.Module, inputs: ModelInputs, *, with_state: bool) -> None:
    """Change the attributes that forward sets; with state, the parameters that are trained, and the buffers that
    forward changes, too (a model in one stage follows the training)."""
    model.train()
    state = registered_state(model)
    with torch.no_grad(), repeatable():
        before = {name: tensor.clone() for name, tensor in state.items()}
        inputs.map(torch.clone).call(model)
        for name, tensor in state.items():
            if not with_state:
                tensor.copy_(before[name])
            elif tensor.requires_grad or not torch.equal(tensor, before[name]):
                tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool else 2 * tensor + 1)
