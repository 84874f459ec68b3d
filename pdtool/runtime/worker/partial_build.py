"""Build a model with the values of only some tensors, exactly as they are in the whole model.

A worker needs the parameters of its own stages. All others are on the meta device, where tensors have no values:

                                             number     first build    second build, for the values of head and scale
    self.embed = nn.Embedding(9, 4)          0          meta           real
    self.block = nn.Linear(4, 4)             1, 2       meta           1 real; 2 meta, its values drawn and dropped
    self.head.weight = self.embed.weight     0 again
    self.scale = self.block.weight.std()     from 1     meta           real
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pdtool.frontend.model_io import tensors_in
from pdtool.frontend.operators import storage_address

META = torch.device("meta")
_DRAWN_IN_PIECES = {"aten::normal_", "aten::uniform_"}
# For these, how many numbers are drawn depends only on the tensor's shape.
DRAWN_BY_SHAPE = _DRAWN_IN_PIECES | {
    *("aten::random_", "aten::bernoulli_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_"),
    *("aten::geometric_", "aten::rand_like", "aten::randn_like"),
}
_PIECE = 2**18  # elements; a multiple of the 16 that normal_ draws together
_DRAWN_TOGETHER = 16

_SEEN_ON_CPU = {
    Tensor.device.__get__: torch.device("cpu"),
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_NEEDING_MEMORY = {
    *(Tensor.data_ptr, Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__repr__),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__),
}


class MissingValuesError(RuntimeError):
    """Code needs values that a partial build leaves out."""


def build_partially(
    build: Callable[[], nn.Module], wanted: Callable[[nn.Module], Iterable[Tensor]]
) -> tuple[nn.Module, nn.Module]:
    """Build a model twice: with all parameters on the meta device, and with the values of the tensors that are wanted.

    model() makes all parameters from one sequence of random numbers. A parameter that is not needed moves to the meta
    device as soon as a module registers it. Its initialization's numbers are drawn and dropped, so that the sequence
    goes on as in the whole model. The first build draws nothing, and finds out which parameters the wanted tensors
    depend on. The second build keeps these.

    A tensor has the values of the whole model or none. An operator raises if it needs values of a meta tensor, or would
    write from one into a real tensor. After an error the model must be built as a whole.

    Args:
        build: seeds the generators and makes the model, with the same structure each time; only the second call's
            prints are shown.
        wanted: finds the tensors in either model.

    Returns:
        The models of the first and the second build; in the second, other tensors may have values too.

    Raises:
        MissingValuesError: the construction needs values that are left out, or differs between calls.
        Exception: any error of `build`, perhaps because values are missing.
    """
    first = _PartialBuild(keeps=(), draws=False)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        outline = first.run(build)
    second = _PartialBuild(keeps=first.numbers(wanted(outline)), draws=True)
    model = second.run(build)
    if first.registered != second.registered:
        raise MissingValuesError("model() makes different parameters when it is called again")
    if any(tensor.is_meta for tensor in wanted(model)):
        raise MissingValuesError("model() initializes a parameter in a way that pdtool cannot repeat")
    return outline, model


class _PartialBuild(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves parameters to the meta device when modules register them, and follows all tensors computed from them.

    Storages are identified by their address, and kept alive so that addresses stay unique.

    Args:
        keeps: numbers of the parameters to leave alone; numbers are in order of registration.
        draws: whether to draw the random numbers of tensors on the meta device, and drop them.

    Attributes:
        registered: shape and type of each parameter, in the order of their numbers.
    """

    def __init__(self, keeps: Collection[int], *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps, self._draws = keeps, draws
        self.registered: list[tuple[torch.Size, torch.dtype]] = []
        self._numbers: dict[int, int] = {}  # storage of a registered parameter -> its number
        self._sources: dict[int, set[int]] = {}  # storage -> the registered parameters that it is computed from
        self._storages: list[torch.UntypedStorage] = []
        self._made_on_meta: dict[int, torch.UntypedStorage] = {}  # by model() itself
        self._failure: Exception | None = None

    def run(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a model in this mode.

        Raises:
            Exception: an error of an operator or `build`, even if the model's code caught it.
        """
        register, draw_truncated = nn.Module.register_parameter, init._no_grad_trunc_normal_

        def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            if type(param) is nn.Parameter:
                self._register(param)

        def draw_truncated_on_meta(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self.follows(tensor):
                return draw_truncated(tensor, *args, **kwargs)
            if self._draws:  # how many numbers it takes depends on their values
                with DisableTorchFunction():
                    draw_truncated(with_memory(tensor), *args, **kwargs)
            return tensor

        start = threading.Thread.start

        def start_watched(thread: threading.Thread) -> None:
            run = thread.run

            def run_watched() -> None:
                with _NoDraws(self):  # a thread of model(), which the build does not follow
                    run()

            thread.run = run_watched  # type: ignore[method-assign]
            start(thread)

        with (
            patch.object(threading.Thread, "start", start_watched),
            patch.object(nn.Module, "register_parameter", register_on_meta),
            patch.object(init, "_no_grad_trunc_normal_", draw_truncated_on_meta),
            _SeenOnCpu(self),
            self,
        ):
            model = build()
        if self._failure:
            raise self._failure
        return model

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of all parameters that the values of `tensors` depend on."""
        found: set[int] = set()
        left = {source for tensor in tensors for source in self._sources.get(storage_address(tensor), ())}
        while left:
            found |= left
            left = {source for storage in left for source in self._sources[storage]} - found
        return {self._numbers[source] for source in found}

    def follows(self, tensor: Tensor) -> bool:
        """Whether a meta tensor stands for one that has values in the whole model."""
        with DisableTorchFunction():
            return tensor.is_meta and storage_address(tensor) in self._sources

    def set_data(self, param: Tensor, values: Tensor) -> None:
        """Do `param.data = values` if one of them is followed; the parameter then depends on both."""
        if not self.follows(param):
            self.refuse(
                MissingValuesError("model() assigns a value computed from a parameter to the .data of another tensor")
            )
        with DisableTorchFunction(), _disable_current_modes():
            sources = self._sources[storage_address(param)] | self._sources.get(storage_address(values), set())
            param.data = values.detach().to(META)
            self._add(param, sources)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error that counts even if the model's code catches it."""
        self._failure = self._failure or error
        raise error

    def _register(self, param: nn.Parameter) -> None:
        """Give a parameter that is registered for the first time a number, and move it unless it is kept."""
        with DisableTorchFunction(), _disable_current_modes():
            is_on_cpu = param.device.type == "cpu" and param.layout is torch.strided
            if storage_address(param) in self._numbers or not (is_on_cpu or self.follows(param)):
                return
            number = len(self.registered)
            self.registered.append((param.shape, param.dtype))
            if is_on_cpu and number not in self._keeps:
                move_to_meta(param)
            self._add(param, {storage_address(param)})
            self._numbers[storage_address(param)] = number

    def _add(self, tensor: Tensor, sources: set[int]) -> None:
        self._storages.append(tensor.untyped_storage())
        self._sources.setdefault(storage_address(tensor), set()).update(sources)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            on_meta = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
            try:
                if any(self.follows(tensor) for tensor in on_meta):
                    return self._run_followed(func, args, kwargs)
                if is_random(func) and any(storage_address(tensor) not in self._made_on_meta for tensor in on_meta):
                    raise MissingValuesError(f"model() draws random numbers with {func} for a copy of a parameter")
                result = func(*args, **kwargs)
            except Exception as error:
                if on_meta:
                    self.refuse(error)
                raise
            if kwargs.get("device") == META:
                self._made_on_meta |= {
                    storage_address(tensor): tensor.untyped_storage() for tensor in tensors_in(result)
                }
        return result

    def _run_followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that reads or writes followed tensors; follow its outputs too."""
        written = written_by(func, args, kwargs)
        if not all(tensor.is_meta for tensor in written):
            what = f"model() writes a value computed from a parameter into another tensor, with {func}"
            raise MissingValuesError(what)
        result = self._result(func, args, kwargs, written)
        sources = {s for tensor in tensors_in((args, kwargs)) for s in self._sources.get(storage_address(tensor), ())}
        for tensor in (*tensors_in(result), *written):
            self._add(tensor, sources)
        for source in sources:  # all inputs of an operator must be on one device
            self._sources[source].update(sources)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any, written: Collection[Tensor]) -> Any:
        if not is_random(func):
            args, kwargs = pytree.tree_map(to_meta, (args, kwargs))
            return func(*args, **kwargs)
        if func._schema.name not in DRAWN_BY_SHAPE:
            raise MissingValuesError(f"the numbers that model() draws with {func} depend on a parameter's values")
        if not written:
            return to_meta(func(with_memory(args[0]), *args[1:], **kwargs))
        if self._draws:
            draw(func, *args, **kwargs)
        return args[0]


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses draws for meta tensors, which draw nothing: the sequence would go on wrongly."""

    def __init__(self, build: _PartialBuild) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._build = build

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func) and any(tensor.is_meta for tensor in tensors_in((args, kwargs or {}))):
            self._build.refuse(MissingValuesError(f"model() draws random numbers with {func} in another thread"))
        return func(*args, **(kwargs or {}))


class _SeenOnCpu(TorchFunctionMode):
    """Shows the CPU as the device of followed tensors, because code may initialize meta tensors differently."""

    def __init__(self, build: _PartialBuild) -> None:
        super().__init__()
        self._build = build

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SEEN_ON_CPU and self._build.follows(args[0]):
            return _SEEN_ON_CPU[func]
        if func in _NEEDING_MEMORY and self._build.follows(args[0]):
            self._build.refuse(MissingValuesError(f"model() reads a parameter with {func.__name__}()"))
        if func == _SET_DATA and any(self._build.follows(tensor) for tensor in args):
            return self._build.set_data(*args)
        return func(*args, **(kwargs or {}))


def move_to_meta(param: nn.Parameter) -> None:
    """Move a parameter itself, not a copy, so that all its holders see it there."""
    moved = nn.Parameter(torch.empty_like(param, device=META), param.requires_grad)
    moved.__dict__.update(param.__dict__)
    with suppress(RuntimeError):  # there are views of it, or weak references: it stays
        torch.utils.swap_tensors(param, moved)  # type: ignore[no-untyped-call]


def draw(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Draw as many random numbers as `func` does to fill a tensor on the meta device, and drop them.

    Args:
        func: an operator of DRAWN_BY_SHAPE that works in place.
        tensor: of any shape; a large one is drawn in pieces where that draws the same.
    """
    args = pytree.tree_map(with_memory, args)
    scratch = [with_memory(tensor)]
    if func._schema.name in _DRAWN_IN_PIECES and tensor.is_contiguous() and tensor.is_floating_point():
        pieces = max(0, tensor.numel() - _DRAWN_TOGETHER) // _PIECE
        rest = torch.empty(tensor.numel() - pieces * _PIECE, dtype=tensor.dtype)
        scratch = [torch.empty(_PIECE, dtype=tensor.dtype)] * pieces + [rest]
    for piece in scratch:
        func(piece, *args, **kwargs)


def is_random(func: Any) -> bool:
    """Return whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator writes into."""
    if "batch_norm" in func._schema.name:  # its schema does not say that it writes statistics
        return tensors_in((args, kwargs))
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    return tensors_in([value for argument, value in given if argument.alias_info and argument.alias_info.is_write])


def to_meta(value: Any) -> Any:
    """Turn a tensor into one without values, and the CPU into the meta device; return anything else unchanged."""
    if isinstance(value, torch.device):
        return META if value.type == "cpu" else value
    return value.to(META) if isinstance(value, Tensor) else value


def with_memory(value: Any) -> Any:
    """Return memory with the shape and strides of a meta tensor; anything else unchanged."""
    if not (isinstance(value, Tensor) and value.is_meta):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
