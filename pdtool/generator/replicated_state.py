"""Find what a stage with replicas keeps of its minibatches: each replica sees only its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs
from pdtool.frontend.operators import in_mode
from pdtool.frontend.variable_uses import is_of_torch, kept_between_calls
from pdtool.generator.composed import ModelFailedError, VerificationError
from pdtool.generator.kept_state import has_same_content
from pdtool.generator.verify import VERIFIED_SAMPLES, repeatable, run_model


def buffers_read_back(plan: Plan, bundle: Bundle, model_file: ModelFile) -> tuple[str, ...]:
    """Return the buffers, in stages with replicas, that forward changes in training and that its next call reads.

    Those of torch's own modules are left out.

    Raises:
        VerificationError: forward sets a parameter of such a stage from its first minibatch: each replica would set its
            own, and from then on only gradients are averaged.
    """
    stages = zip(bundle.stages, plan.stages, strict=True)
    replicated = [(s, stage, planned.replicas) for s, (stage, planned) in enumerate(stages) if planned.replicas > 1]
    if bundle.proof != "values" or not replicated:
        return ()
    size = min(bundle.batch_size, VERIFIED_SAMPLES)
    batches = [model_file.example_inputs(samples) for samples in (size, size + 1)]
    with suppress(ModelFailedError):  # the minibatch is too small
        set_first = _set_by_first_minibatch(model_file.build, batches)
        for s, stage, replicas in replicated:
            if name := next(filter(set_first.__contains__, stage.parameters), None):
                raise VerificationError(
                    f"forward sets parameter {name} from its first minibatch, but stage {s} has {replicas} replicas, "
                    "and each would set it from another one",
                    "set it in model() from fixed samples, or plan with one worker for this stage, such as --straight",
                )
        found = _read_back(in_mode(model_file.build(), True), batches)
        return tuple(name for _, stage, _ in replicated for name in stage.buffers if name in found)
    return ()


def kept_by_loss(plan: Plan, model_file: ModelFile) -> tuple[str, ...]:
    """Return `line: variable` of the file's variables that loss() changes and reads, if the last stage has replicas."""
    if plan.stages[-1].replicas < 2 or not model_file.has("loss"):
        return ()
    modules = {model_file.module.__name__: model_file.module}
    found = kept_between_calls(model_file.module, ["loss"], modules)
    return tuple(dict.fromkeys(f"{line}: {variable}" for line, _, variable in found))


def _set_by_first_minibatch(build: Callable[[], nn.Module], batches: Sequence[ModelInputs]) -> list[str]:
    """Return the parameters that the first forward in training sets from its minibatch, as ActNorm does."""
    changed: list[dict[str, Tensor]] = []
    for inputs in batches:
        model = in_mode(build(), True)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with repeatable():
            run_model(model, inputs, "the first minibatch")
        after = ((name, p.detach()) for name, p in model.named_parameters() if name in before)
        changed.append({name: weight for name, weight in after if not torch.equal(weight, before[name])})
    first, other = changed  # a mask that is applied to a weight changes both alike
    return [n for n in first | other if n not in first or n not in other or not torch.equal(first[n], other[n])]


def _read_back(model: nn.Module, batches: Sequence[ModelInputs]) -> list[str]:
    """Return the buffers of the user's modules that a forward in training changes and the next one reads.

    The output for a minibatch is computed with the buffers of the start, and with those after another minibatch.
    """
    first, other = batches
    start = _copied(model)

    def output_with(buffers: Mapping[str, Tensor], inputs: ModelInputs) -> Any:
        _set(model, buffers)
        with repeatable(), torch.no_grad():
            return run_model(model, inputs, "a second minibatch")

    output_with(start, first)
    after = _copied(model)
    changed = [name for name in start.keys() & after if not has_same_content(start[name], after[name])]
    own = {n: after[n] for n in changed if not is_of_torch(type(model.get_submodule(n.rpartition(".")[0])))}
    expected = output_with(start, other)
    are_read = bool(own) and not has_same_content(expected, output_with(start | own, other))
    tried = own if are_read else {}
    alone = [n for n in tried if not has_same_content(expected, output_with(start | {n: own[n]}, other))]
    _set(model, start)  # model() may return the same one each time
    return alone or [*tried]


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def _set(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Set buffers that differ, in place where they have the same shape: some may share memory."""
    for name, value in buffers.items():
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)._buffers
        current = owner[attribute]
        if current is None or current.shape != value.shape:
            owner[attribute] = value.clone()
        elif not torch.equal(current, value):
            current.copy_(value)
