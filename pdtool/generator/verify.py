"""Check on every call of codegen that the stages composed equal the model.

It compares outputs and buffers over three consecutive minibatches in training mode, two of one size and one of another,
and then over two in evaluation mode. It compares the gradients of all parameters for one minibatch of each size. Random
operators draw from a generator seeded by their own input. Opaque modules, which may also draw from Python and numpy,
use generators seeded by their path. So model and stages drop the same elements in whatever order they run. A model that
keeps other state between calls of forward is refused: `kept_attributes` (kept_state.py) finds that state.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import PdtoolError, describe_error
from pdtool.frontend.model_io import ModelInputs, named_leaves, tensors_of
from pdtool.frontend.model_rules import hook_on_parameter
from pdtool.frontend.operators import in_mode, named_state, registered_state, shared_memory
from pdtool.frontend.random_numbers import GENERATORS, derive_seed, random_state_kept, seed_generators, seed_torch
from pdtool.frontend.user_code import line_of
from pdtool.frontend.variable_uses import names_read, user_classes
from pdtool.generator.composed import REPORT, ModelFailedError, VerificationError, compose, copy_state, load_stages
from pdtool.generator.kept_state import (
    TOLERANCE,
    KeptAttribute,
    changed_attributes,
    has_same_content,
    kept_attributes,
    kept_state,
)
from pdtool.generator.stage_file import FUNCTION_MARK

_STAGES = "the generated stages"
_CHECK_STATE = (
    "check whether a module keeps state on self between calls, overrides train(), reads requires_grad, grad_fn, "
    "torch.is_grad_enabled() or torch.compiler.is_compiling(), or has an autograd.Function or a random generator of "
    "its own; if so, name that module in HINTS opaque. If it calls torch.utils.checkpoint, leave that out: `pdtool "
    "partition` lets stages recompute where memory is short"
)
_EQUAL = 1e-10  # difference of outputs in double precision, where the same elements are dropped
_IF_ZERO = "the gradient is zero: freeze it in model(), or do not compute from it what forward then overwrites"
_ROUNDINGS = 100  # in a gradient, of the precision of the largest one
_RANDOM = ("dropout", "attention", "lstm", "gru", "rnn", "rand", "bernoulli", "multinomial", "normal", "rrelu")
_FILLING = ("uniform_", "normal_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_")
VERIFIED_SAMPLES = 2  # of most minibatches; 1 is a special case for some operators
_FILLING_WITHIN = {"gumbel_softmax": "exponential_"}  # function that fills a tensor of its argument's shape


def verify_values(
    build: Callable[[], nn.Module],
    texts: Mapping[str, str],
    bundle: Bundle,
    batches: Sequence[Any],
    after_forward: Mapping[str, Callable[..., Any]] | None = None,
    one_sample: Any = None,
    *,
    several_in_flight: bool = True,
) -> bool:
    """Compare the composed stages with the model, and return whether they differ for a minibatch of one sample.

    Args:
        build: makes the model, the same each time.
        texts: texts of the stage files, by name.
        batches: inputs of three consecutive minibatches, the last one of another size, as ModelInputs takes them.
        after_forward: the user's functions that a run calls with the last stage's output, by name.
        one_sample: inputs of that minibatch. torch.export assumes two samples or more, so `if len(x) > 1` is true in
            the stages. None: it is not tried.
        several_in_flight: whether a stage computes the forward of a minibatch before the backward of an earlier one.

    Raises:
        VerificationError: an output, a gradient or a buffer differs, or the model keeps other state between
            minibatches.
    """
    minibatches = [ModelInputs.of(inputs) for inputs in batches]
    comparison = _StageComparison.of(build, texts, bundle)
    model = comparison.model
    _refuse_listed_parameters(model, bundle)
    _fill_zeros(model)
    comparison.copy_state()
    before = kept_state(model)
    state, opaque = named_state(model), bundle.opaque
    shared = {tuple(names): state[names[0]].detach().clone() for names in shared_memory(state)}
    try:
        for training in (True, False):
            comparison.compare_minibatches(minibatches, training=training)
    except VerificationError:  # state may be why the values differ
        _refuse_kept_state([*kept_attributes(model, before)], build, minibatches, opaque)
        _refuse_changed_memory(model, shared)
        raise
    _refuse_kept_state([*kept_attributes(model, before)], build, minibatches, opaque)
    _refuse_hidden_paths(in_mode(model, True), bundle, minibatches[0], after_forward or {})
    if several_in_flight and _runs_user_code(model, texts, bundle):
        comparison.compare_in_flight((minibatches[0], minibatches[-1]))
    return one_sample is not None and comparison.differs_for(ModelInputs.of(one_sample))


@dataclass(frozen=True)
class _StageComparison:
    """The model and its stages, whose outputs, gradients and buffers are compared."""

    model: nn.Module
    stages: Sequence[nn.Module]
    bundle: Bundle

    @classmethod
    def of(cls, build: Callable[[], nn.Module], texts: Mapping[str, str], bundle: Bundle) -> Self:
        """Make the model and stages; opaque modules of both draw the same random numbers."""
        model, stages = build(), load_stages(texts, bundle, build=build)
        for stage, spec in zip(stages, bundle.stages, strict=True):
            _seed_by_path(model, spec.opaque)
            _seed_by_path(stage, spec.opaque)
        return cls(model, stages, bundle)

    @property
    def _modules(self) -> Sequence[nn.Module]:
        return self.model, *self.stages

    def copy_state(self) -> None:
        """Give the stages the model's parameters and buffers."""
        copy_state(self.model, self.stages, self.bundle)

    def compare_minibatches(self, batches: Sequence[ModelInputs], *, training: bool) -> None:
        """Compare outputs, gradients and buffers in one mode; evaluation leaves out the first minibatch."""
        after_first: dict[str, Tensor] = {}
        for module in self._modules:
            module.train(training)
        mode = "training" if training else "evaluation"
        first, *rest = enumerate(batches)
        for number, inputs in [first, *rest] if training else rest:
            where = f"{mode}, minibatch {number} of {len(batches)}"
            with torch.set_grad_enabled(training):
                with _hooks_noted() as in_model:
                    expected = self._expected(inputs, where)
                with _hooks_noted() as in_stages:
                    composed = self._composed(inputs, where)
            if lost := sorted(in_model - in_stages):
                remedy = 'move this line into a module of its own, and name that module in HINTS = {"opaque": [...]}'
                what = f"{lost[0]}: forward puts a hook on a tensor, but no stage would call it"
                raise VerificationError(what, remedy)
            _compare_outputs(expected, composed, where)
            has_new_size = number != 1  # the second has the size of the first
            if training and has_new_size and _compare_gradients(self._gradients(expected, composed, where), where):
                self._compare_in_double(inputs, where)
            self._compare_buffers(where)
            after_first = after_first or {name: p.detach().clone() for name, p in self.model.named_parameters()}
        changed = [name for name, p in self.model.named_parameters() if not torch.equal(after_first[name], p)]
        if changed:  # at each call: a mask applied to a weight in the first call changes nothing later
            raise VerificationError(
                f"forward changes parameter {changed[0]} at each call: minibatches in flight together cannot share it",
                "let after_update() change it, or keep what forward changes in a buffer of the module that uses it",
            )

    def differs_for(self, inputs: ModelInputs) -> bool:
        """Whether the stages differ from the model in a mode in which the model itself does not fail, as batch norm
        does in training."""
        for training, minibatches in ((True, [inputs]), (False, [inputs, inputs])):
            self.copy_state()  # a model that has failed may have changed its buffers
            try:
                self.compare_minibatches(minibatches, training=training)
            except ModelFailedError:
                continue
            except VerificationError:
                return True
        return False

    def compare_in_flight(self, batches: Sequence[ModelInputs]) -> None:
        """Compare the gradients of two minibatches: in the model one after the other, in the stages in flight
        together."""
        self.copy_state()
        for module in self._modules:
            in_mode(module, True).zero_grad()
        where = "training, two minibatches in flight"
        for inputs in batches:
            _backward("the backward of the model", self._expected(inputs, where), where)
        try:
            for output in [self._composed(inputs, where) for inputs in batches]:
                _backward(_STAGES, output, where)
            _compare_gradients(self._gradient_pairs(where), where)
        except VerificationError as error:
            what = f"{error.what}: the backward of one minibatch needs a value that the forward of the next one changes"
            remedy = (
                "keep what backward needs in ctx or in a local variable of forward, and compute with a copy of a "
                "buffer that forward changes, such as self.scale.clone()"
            )
            raise VerificationError(what, remedy) from error

    def _expected(self, inputs: ModelInputs, where: str) -> Any:
        """Return the model's output."""
        with repeatable():
            return run_model(self.model, inputs, where)

    def _composed(self, inputs: ModelInputs, where: str) -> Any:
        """Return the output of the stages."""
        with repeatable():
            return _run(_STAGES, partial(compose, self.stages, self.bundle, inputs.map(torch.clone).tensors), where)

    def _compare_in_double(self, inputs: ModelInputs, where: str) -> None:
        """Compare gradients in double precision, in which rounding is much smaller."""
        inputs = inputs.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        try:
            copies = _run("the model", lambda: [deepcopy(module).double() for module in self._modules], where)
            double = replace(self, model=copies[0], stages=copies[1:])
            expected, composed = double._expected(inputs, where), double._composed(inputs, where)
            gradients = double._gradients(expected, composed, where)
        except VerificationError:  # the user's code, or the trace, has a dtype of its own, or modules cannot be copied
            return
        pairs = zip(tensors_of(expected), tensors_of(composed), strict=True)
        if all(torch.allclose(a, b, rtol=_EQUAL, atol=_EQUAL * _largest(a), equal_nan=True) for a, b in pairs):
            _compare_gradients(gradients, where)  # else they have drawn different random numbers

    def _gradients(self, expected: Any, composed: Any, where: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Run both backwards, and return each parameter's gradients: the model's, and that of the stages."""
        for module in self._modules:
            module.zero_grad()
        _backward("the backward of the model", expected, where)
        _backward(f"the backward of {_STAGES}", composed, where)
        return self._gradient_pairs(where)

    def _gradient_pairs(self, where: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each parameter's gradients: the model's, and that of the stages."""
        stage_gradients = self._stage_gradients()
        gradients = {}
        for name, parameter in self.model.named_parameters():
            in_model, in_stages = parameter.grad, stage_gradients.get(id(parameter))
            if in_stages is None and in_model is None:
                continue
            if in_stages is None or in_model is None:
                only, other = ("the model", _STAGES) if in_stages is None else (_STAGES, "the model")
                remedy = _CHECK_STATE if in_model is None or in_model.any() else _IF_ZERO
                raise VerificationError(f"{name} gets a gradient in {only}, but not in {other} ({where})", remedy)
            dense = [g.to_dense() if g.is_sparse else g for g in (in_model, in_stages)]
            gradients[name] = dense[0], dense[1]
        return gradients

    def _stage_gradients(self) -> dict[int, Tensor]:
        """Sum up the gradients of the stages for each parameter of the model, by its id."""
        original = dict(self.model.named_parameters(remove_duplicate=False))
        gradients: dict[int, Tensor] = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():  # one tied inside the stage counts once
                if parameter.grad is not None:
                    key = id(original[name])
                    gradients[key] = gradients[key] + parameter.grad if key in gradients else parameter.grad
        return gradients

    def _compare_buffers(self, where: str) -> None:
        original = named_state(self.model)
        for stage in self.stages:
            for name, buffer in stage.named_buffers(remove_duplicate=False):
                _compare(original[name], buffer, f"buffer {name} ({where})", TOLERANCE["atol"])


def _refuse_listed_parameters(model: nn.Module, bundle: Bundle) -> None:
    """Refuse an opaque module whose code reads trained parameters from a list, tuple or dict: a stage gives its modules
    the weights of a minibatch's version by assigning to their attributes."""
    for path in (path for stage in bundle.stages for path in stage.opaque):
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            read = {attribute for kind in user_classes(module) for attribute in names_read(kind)}
            for attribute in read & vars(module).keys() - vars(nn.Module()).keys():
                value = vars(module)[attribute]
                listed = pytree.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else ()
                if any(isinstance(leaf, nn.Parameter) and leaf.requires_grad for leaf in listed):
                    what = f"self.{attribute} of {name} holds parameters in a {type(value).__name__}"
                    raise VerificationError(
                        f"{what}, so pdtool cannot give this opaque module the weights of its minibatch",
                        "use nn.ParameterList or nn.ParameterDict, or read each parameter from its own attribute",
                    )


def _fill_zeros(model: nn.Module) -> None:
    """Make trained parameters of zeros nonzero: they hide differences in what they multiply, as B of LoRA does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel() and not parameter.any():
                parameter.fill_(0.1)


def _runs_user_code(model: nn.Module, texts: Mapping[str, str], bundle: Bundle) -> bool:
    """Whether stages call code that may change, in the next forward, what a backward reads: opaque modules and
    functions of the user, or a forward that writes into a buffer. The modules of torch do not."""
    if any(stage.opaque for stage in bundle.stages) or any(FUNCTION_MARK in text for text in texts.values()):
        return True
    has_buffers = (m for m in model.modules() if next(m.buffers(recurse=False), None) is not None)
    return any(not type(module).__module__.startswith("torch.nn.") for module in has_buffers)


def _are_carried_over(
    attributes: Sequence[KeptAttribute],
    build: Callable[[], nn.Module],
    batches: Sequence[ModelInputs],
    opaque: Sequence[str],
) -> bool:
    """Whether attributes, or the model's output, depend on minibatches before the last one: on their inputs, weights,
    or random numbers.

    They do not if a hook stores each minibatch's activations, if the first minibatch makes a table, or if train()
    clears what an evaluation has made of the weights. The last two minibatches have the same size, because such a table
    may be for that size only.

    Args:
        opaque: paths of the opaque modules. A stage computes anew what other modules keep, but not what these do, and
            it calls train() of these only.
    """
    *before, last = (batches[-1], *batches[:-1])
    inside = tuple(f"{path}." for path in opaque)
    are_traced = not any(kept.place[1] or f"{kept.place[0]}.".startswith(inside) for kept in attributes)
    for training, trains_between in ((True, True), (False, False), (False, True)):
        old, new = in_mode(build(), training), in_mode(build(), training)
        fresh = [kept.value(new) for kept in attributes]
        with torch.set_grad_enabled(training), random_state_kept():
            for inputs in before:
                run_model(old, inputs, "a minibatch before")
        switched = [old, new] if are_traced else [m.get_submodule(path) for m in (old, new) for path in opaque]
        switched = switched if trains_between and not training else []
        for module in switched:
            module.train()
        with torch.no_grad():
            for parameter in old.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01 if trains_between else 0.0)
            state = registered_state(old)
            for name, tensor in registered_state(new).items():
                if name in state and state[name].shape == tensor.shape:
                    tensor.copy_(state[name])
        for module in switched:
            module.train(False)
        with torch.set_grad_enabled(training), repeatable():
            results = []
            for model, values in ((old, [kept.value(old) for kept in attributes]), (new, fresh)):
                for kept, value in zip(attributes, values, strict=True):
                    kept.restore(model, value)
                output = run_model(model, last, "the last minibatch")
                results.append((*(kept.value(model) for kept in attributes), *tensors_of(output)))
        if not has_same_content(results[0], results[1]):
            return True
    return False


def _refuse_kept_state(
    attributes: Sequence[KeptAttribute],
    build: Callable[[], nn.Module],
    batches: Sequence[ModelInputs],
    opaque: Sequence[str],
) -> None:
    """Refuse attributes that carry values over to the next minibatch, with the name of one that does so by itself."""
    if not attributes or not _are_carried_over(attributes, build, batches, opaque):
        return
    kept = next((kept for kept in attributes if _are_carried_over([kept], build, batches, opaque)), attributes[0])
    where = f"{kept.location}: " if kept.location else ""
    if isinstance(kept.value(build()), GENERATORS):
        raise VerificationError(
            f"{where}forward draws random numbers from {kept.described}: they would depend on the plan, and start "
            "anew in a resumed run",
            "draw from the global generators of torch, numpy or random, which pdtool seeds for each minibatch",
        )
    raise VerificationError(
        f"{where}forward changes {kept.described} and reads it again: minibatches in flight together cannot share it",
        "compute it from the inputs in each call, or keep it in a buffer that the module's __init__ makes",
    )


def _refuse_hidden_paths(
    model: nn.Module, bundle: Bundle, inputs: ModelInputs, after_forward: Mapping[str, Callable[..., Any]]
) -> None:
    """Refuse a variable that carries values from forward to code in another process: to the loss, or from one opaque
    module to another. Traced modules need no variables, because the trace follows their values."""
    readers = {f"{name}()": set(names_read(function)) for name, function in after_forward.items()}
    opaque = bundle.opaque
    for path in opaque if len(opaque) > 1 else ():
        readers[path] = {name for kind in user_classes(model.get_submodule(path)) for name in names_read(kind)}
    before = kept_state(model)
    run_model(model, inputs, "a further minibatch")
    for changed in changed_attributes(model, before):
        reading = [reader for reader, names in readers.items() if changed.name in names]
        if len(reading) > 1 or (reading and reading[0] not in opaque):
            where = " and ".join(reading)
            calls = f"forward changes {changed.described} in each call"
            what = f"{calls}, but it is read in {where}, perhaps in another process"
            raise VerificationError(what, "pass the value on as an output of the model or the module")


def _refuse_changed_memory(model: nn.Module, before: Mapping[tuple[str, ...], Tensor]) -> None:
    """Refuse tensors that share memory which forward has changed, because a stage file makes each separately.

    Args:
        before: names of tensors that share memory -> the first one's earlier value.
    """
    for names, value in before.items():
        if not torch.equal(named_state(model)[names[0]], value):
            what = f"{' and '.join(names)} share memory that forward changes, but are different tensors"
            raise VerificationError(what, "make them one tensor, or give each its own memory with clone()")


def verify_shapes(texts: Mapping[str, str], bundle: Bundle, inputs: ModelInputs, output: Any) -> None:
    """Compare shapes only, on the meta device, for a model that would not fit on this machine twice.

    Args:
        texts: texts of the stage files, by name.
        output: the model's output, as meta tensors.

    Raises:
        VerificationError: a shape or dtype of the output differs, or a stage fails.
    """
    if opaque := bundle.opaque:
        why = "by running the model, which does not fit into this machine's memory"
        what = f"the outputs of {opaque[0]} are known only {why}"
        raise VerificationError(what, "run codegen on a machine with more memory")
    stages = load_stages(texts, bundle, "meta")
    meta = inputs.map(lambda tensor: tensor.to("meta"))
    composed = _run(_STAGES, partial(compose, stages, bundle, meta.tensors), "shapes")
    for name, a, b in _paired(output, composed, "shapes"):
        if isinstance(a, Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype):
            what = f"{name} is {tuple(b.shape)} {b.dtype} in the stages, but {tuple(a.shape)} {a.dtype} in the model"
            raise VerificationError(what, REPORT)


def outputs_in_both_modes(model: nn.Module, inputs: ModelInputs) -> list[list[Tensor]]:
    """Return the tensors that the model computes from a minibatch in training and in evaluation; raises
    ModelFailedError."""
    outputs = []
    for training in (True, False):
        model.train(training)
        with torch.no_grad(), repeatable():
            outputs.append(tensors_of(run_model(model, inputs, "a minibatch")))
    return outputs


def run_model(model: nn.Module, inputs: ModelInputs, where: str) -> Any:
    return _run("the model", lambda: inputs.map(torch.clone).call(model), where)  # it may write into its inputs


def _run(what: str, call: Callable[[], Any], where: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # the user's code will warn again when it trains
            return call()
    except PdtoolError:
        raise
    except Exception as error:
        kind = VerificationError if what.endswith(_STAGES) else ModelFailedError
        raise kind(f"{what} failed ({where}): {describe_error(error)}") from error


def _compare_outputs(expected: Any, composed: Any, where: str) -> None:
    for name, a, b in _paired(expected, composed, where):
        if isinstance(a, Tensor):
            _compare(a, b, f"{name} ({where})", TOLERANCE["atol"])
        elif a != b and a == a:  # NaN differs from itself
            raise VerificationError(f"{name} is {b!r} in the stages, but {a!r} in the model ({where})", _CHECK_STATE)


def _paired(expected: Any, composed: Any, where: str) -> list[tuple[str, Any, Any]]:
    """(name, model's value, stages' value) of each tensor and constant in the outputs."""
    in_model, in_stages = (list(named_leaves(output, "output")) for output in (expected, composed))
    described = [[(name, isinstance(leaf, Tensor)) for name, leaf in leaves] for leaves in (in_model, in_stages)]
    if described[0] != described[1]:
        parts = [", ".join(f"{n} ({type(leaf).__name__})" for n, leaf in leaves) for leaves in (in_stages, in_model)]
        what = f"the stages return {parts[0]}, but the model returns {parts[1]} ({where})"
        raise VerificationError(what, _CHECK_STATE)
    return [(name, a, b) for (name, a), (_, b) in zip(in_model, in_stages, strict=True)]


def _compare_gradients(gradients: Mapping[str, tuple[Tensor, Tensor]], where: str) -> bool:
    """Compare gradients, and return whether the comparison is unclear for some.

    It is unclear for a gradient whose difference is large compared with the gradient itself, but small compared with
    the largest gradient of the model. This can be rounding, as in a bias before a batch norm, or an error, as in a
    weight behind a layer scale of 1e-6.
    """
    unclear = []
    for name, pair in gradients.items():
        try:
            _compare(*pair, name)
        except VerificationError:
            unclear.append(name)
    largest = max((_largest(in_model) for in_model, _ in gradients.values()), default=0.0) if unclear else 0.0
    for name in unclear:
        rounding = min(TOLERANCE["atol"], _ROUNDINGS * _eps(gradients[name][0])) * largest
        _compare(*gradients[name], f"the gradient of {name} ({where})", rounding)
    return bool(unclear)


def _backward(what: str, output: Any, where: str) -> None:
    """Run the backward of an output, from random gradients that are the same at each call."""
    generator = torch.Generator().manual_seed(0)
    differentiable = tuple(t for t in tensors_of(output) if t.requires_grad)
    gradients = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t) for t in differentiable)
    if differentiable:
        # torch.autograd.backward would leave the mode of `repeatable` for checkpoints that compute again
        run = partial(_engine_run_backward, differentiable, gradients, False, False, (), True, True)
        with repeatable():
            _run(what, run, where)


def _compare(expected: Tensor, composed: Tensor, what: str, rounding: float = 0.0) -> None:
    """Compare two tensors; the tolerance is relative to their largest value, or `rounding` if that is larger."""
    if expected.shape != composed.shape or expected.dtype != composed.dtype:
        in_stages, in_model = (f"{tuple(t.shape)} {t.dtype}" for t in (composed, expected))
        raise VerificationError(f"{what} is {in_stages} in the stages, but {in_model} in the model", _CHECK_STATE)
    if torch.equal(expected, composed):  # almost always, and much faster than testing closeness
        return
    tolerance = {"rtol": TOLERANCE["rtol"], "atol": max(rounding, TOLERANCE["atol"] * _largest(expected))}
    if not torch.allclose(expected, composed, **tolerance, equal_nan=True):
        wide = torch.complex128 if expected.is_complex() else torch.float64
        worst = (expected.to(wide) - composed.to(wide)).abs().max().item()
        what = f"{what} differs between the stages and the model by up to {worst:.3g}"
        raise VerificationError(what, _CHECK_STATE)


def _largest(tensor: Tensor) -> float:
    """The largest absolute value; 0 if there are no elements, or if they are no real or complex numbers."""
    if not _eps(tensor) or not tensor.numel():
        return 0.0
    return tensor.detach().abs().nan_to_num(0.0, 0.0).max().item()


def _eps(tensor: Tensor) -> float:
    """The precision of real or complex numbers; 0 of others."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


class _SeedByInput(TorchFunctionMode):
    """Seed the generator before each function that may draw: from its first tensor, or from the shape of the tensor
    that it fills.

    As in a run, it draws for contiguous tensors, because the layout decides which element gets which number and a stage
    leaves out calls of contiguous().
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        filling = _FILLING_WITHIN.get(name, name)
        if filling in _FILLING:
            filled = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor))
            with torch._C.DisableTorchFunction():
                seed_torch(hash((filling, tuple(filled.shape))) & 0x7FFFFFFF, filled.device)
        elif any(word in name for word in _RANDOM):
            first = next((a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)), torch.zeros(0))
            with torch._C.DisableTorchFunction():
                given = first.contiguous()
                total = float(given.detach().double().abs().sum())
                sizes = tuple(size for size in first.shape if size > 1)  # F.dropout1d adds a batch of 1
                seed_torch(hash((total, sizes)) & 0x7FFFFFFF, first.device)
            version = given._version
            args, kwargs = pytree.tree_map(lambda a: given if a is first else a, (args, kwargs))
            result = func(*args, **(kwargs or {}))
            if given is first or given._version == version:
                return result
            return first.copy_(given)  # what was written in place
        return func(*args, **(kwargs or {}))


@contextmanager
def repeatable() -> Iterator[None]:
    """Draw the same random numbers for the same inputs, and keep the generators' state."""
    with random_state_kept(), _SeedByInput():
        yield


@contextmanager
def _hooks_noted() -> Iterator[set[str]]:
    """Record the lines of the user's code that put hooks on activations.

    Raises:
        TraceError: a line puts a hook on a parameter.
    """
    register: Callable[[Tensor, Any], Any] = Tensor.register_hook
    lines: set[str] = set()

    def noting(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_filename != __file__:  # the mode of `_repeatable` calls it again
            if isinstance(tensor, nn.Parameter):
                raise hook_on_parameter(line_of(frame))
            lines.add(line_of(frame))
        return register(tensor, hook)

    with patch.object(Tensor, "register_hook", noting):
        yield lines


def _seed_by_path(module: nn.Module, paths: Sequence[str]) -> None:
    """Seed all generators before each call of these modules inside `module`."""
    for path in paths:
        seed, submodule = derive_seed(path), module.get_submodule(path)
        if not isinstance(submodule, torch.jit.ScriptModule):  # it takes no hooks
            submodule.register_forward_pre_hook(lambda *_, seed=seed: seed_generators(seed))
