"""Random numbers that do not depend on the plan: who draws them, and from which seed.

The functions say which modules and ATen operators draw random numbers, and in the layout of which tensors.
OperatorSeeds seeds the generators for each random operator of a stage, so that it draws the same numbers wherever the
cuts are.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pdtool.frontend.operators import Operator, Value

# Checkpoints name a generator's kind by its place here.
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PROBABILITIES = ("p", "dropout", "dropout_p")  # ATen operators draw nothing if one of these arguments is 0
_MODES = ("train", "training")  # or if one of these is False
# These draw by sample and channel, or for a tensor of their own, not in the layout of an input.
_DRAWING_BY_INDEX = {"feature_dropout", "feature_alpha_dropout", "scaled_dot_product_attention"}
_DRAWING_BY_INDEX |= {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_MODULES_DRAWING_BY_INDEX = (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
    nn.MultiheadAttention,
    nn.RNNBase,
)
_FUNCTION = "seed_operator"  # of the stage files


def module_draws(module: nn.Module) -> bool:
    """Whether a call of `module` may draw random numbers; any module outside torch.nn may."""
    return any(is_user_module(m) or _drops(m) or isinstance(m, nn.RReLU) for m in module.modules())


def is_user_module(module: nn.Module) -> bool:
    """Whether the type of a module is defined outside torch.nn."""
    return not type(module).__module__.startswith("torch.nn.")


def operator_draws(op: Operator, model: nn.Module) -> bool:
    """Whether an operator of `model` may draw random numbers, in training or in evaluation mode."""
    if op.target is None:  # a user's autograd.Function may draw, as a user's module may
        return op.function is not None or (op.is_module and module_draws(model.get_submodule(op.module)))
    if torch.Tag.nondeterministic_seeded not in op.target.tags:
        return False
    is_off = any(op.kwargs.get(name) is False for name in _MODES)
    return not is_off and all(op.kwargs.get(name, 1) != 0 for name in _PROBABILITIES)


def module_draws_by_layout(module: nn.Module) -> bool:
    """Whether the memory layout of a random module's input decides which element gets which number."""
    return not isinstance(module, _MODULES_DRAWING_BY_INDEX)


def values_drawn_like(op: Operator) -> list[Value]:
    """Return the tensors whose memory layout decides which element gets which number of a random ATen operator."""
    return [] if op.target is None or op.op in _DRAWING_BY_INDEX else list(dict.fromkeys(op.values))


def _drops(module: nn.Module) -> bool:
    """Whether it is a Dropout layer, or has a dropout of its own (nn.LSTM, nn.MultiheadAttention)."""
    return bool(getattr(module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0))


def derive_seed(*parts: int | str) -> int:
    """Return a seed for `parts`, such as (seed, epoch, stage, minibatch), unrelated to that of other parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of the CPU and of `device`.

    torch.manual_seed seeds all devices. If CUDA is not in use, it formats a stack trace each time, which takes most of
    a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device and device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of torch (as `seed_torch` does), Python and numpy.

    Generators of other devices stay unseeded: code that may draw there needs torch.manual_seed as well.
    """
    seed_torch(seed, device)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random states of torch, Python and numpy at the end; those of GPUs only if CUDA is in use."""
    state, numpy_state = random.getstate(), np.random.get_state()
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count()) if is_in_use else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def generator_state(generator: Any) -> Any:
    """Return the state of one of GENERATORS, of tensors, arrays, numbers and texts; it changes with each draw."""
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Give one of GENERATORS the state of another one of its kind."""
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case random.Random():
            generator.setstate(state)
        case _:
            generator.set_state(state)


def has_known_state(value: object) -> bool:
    """Whether it is one of GENERATORS, on the CPU, whose state another one of its kind can take.

    Not one of a subclass, or with a bit generator that is not numpy's.
    """
    if type(value) not in GENERATORS:
        return False
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    bits = getattr(value, "_bit_generator", None)
    return bits is None or type(bits) is getattr(np.random, type(bits).__name__, None)


def generator_with_state(kind: type, state: Any) -> Any:
    """Return a generator of one of the kinds GENERATORS, with this state."""
    bits = [getattr(np.random, state["bit_generator"])()] if kind.__module__.startswith("numpy") else []
    generator = kind(*bits)
    set_generator_state(generator, state)
    return generator


class OperatorSeeds:
    """Seeds the generators for the random operators of one stage.

    The seed depends on the run's seed, the epoch, the minibatch and the operator's name. So an operator draws the same
    numbers wherever the cuts are, whoever computes its stage, and however often (recomputation). A leaf module that is
    called once has its path as name, and a hook seeds for it. Before any other random operator the stage file calls
    `seed_operator` with its name; this function does nothing until a run replaces it. All others, such as operators of
    a stage under torch.compile, draw from generators that are seeded at the beginning of the stage's forward.

    Which element of a tensor gets which random number depends on the tensor's memory layout. A tensor that has crossed
    a stage border is always contiguous. So operators that draw in the layout of their inputs get contiguous ones.

    Args:
        stage: its number.
        device: where it computes; None: the CPU.
    """

    def __init__(self, stage: int = 0, device: torch.device | None = None) -> None:
        self._stage, self._device = stage, device
        self._phase: tuple[int | str, ...] = ()
        self._minibatch = 0
        self._named = ""  # the operator that the stage file named last

    def attach(self, module: nn.Module) -> None:
        """Make every random operator of the stage's module draw from generators seeded for it."""
        code = sys.modules[type(module).__module__]
        if hasattr(code, _FUNCTION):
            setattr(code, _FUNCTION, self._seed_named)
        for path, leaf in _leaves(module):
            if module_draws(leaf) and not isinstance(leaf, torch.jit.ScriptModule):  # which takes no hooks
                seed = self.seed_user_code if is_user_module(leaf) else self.seed
                leaf.register_forward_pre_hook(partial(self._before_call, seed, path), with_kwargs=True)

    def begin_phase(self, *phase: int | str) -> None:
        """Begin a pass over a split of the data: (seed of the run, name of the split, epoch)."""
        self._phase = phase

    def begin_forward(self, minibatch: int) -> None:
        """Begin the stage's forward of a minibatch, or its recomputation before the backward."""
        self._minibatch = minibatch
        self.seed(f"stage {self._stage}")

    def seed(self, operator: str) -> None:
        """Seed torch's generators for an operator of the minibatch."""
        seed_torch(self._seed_of(operator), self._device)

    def seed_user_code(self, operator: str) -> None:
        """Seed the generators of Python and numpy too, because code outside torch may draw from them."""
        seed_generators(self._seed_of(operator), self._device)

    def _seed_of(self, operator: str) -> int:
        return derive_seed(*self._phase, self._minibatch, operator)

    def _seed_named(self, name: str, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Seed for the operator of this name; return contiguous versions of the tensors whose layout it draws in."""
        self._named = name
        self.seed(name)
        contiguous = tuple(map(_contiguous, tensors))
        return contiguous[0] if len(contiguous) == 1 else contiguous

    def _before_call(
        self, seed: Callable[[str], None], path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook of a leaf module: seed for it; the stage file has named the call if it is one of several."""
        seed(self._named if self._named.startswith(f"{path}@") else path)
        if not module_draws_by_layout(module):
            return args, kwargs
        return tuple(map(_contiguous, args)), {name: _contiguous(value) for name, value in kwargs.items()}


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of each module directly in a stage's containers, not of modules inside these."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) in (nn.Module, nn.ModuleDict):
            yield from _leaves(child, f"{path}.")
        else:
            yield path, child
