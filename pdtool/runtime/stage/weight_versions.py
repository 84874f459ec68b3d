"""Weight versions: the backward of a minibatch must see the weights that its forward saw (PipeDream, section 3.3).

The optimizer owns the Parameters, which always hold the newest weights. The module computes with a *version*: one leaf
tensor per parameter, which shares the Parameter's memory. Autograd graphs hold the leaves, so the graphs themselves are
the stash, and gradients land on the leaves of the right version.

    step t      Parameters ─┬─ memory a ── leaves of version t ◀── graphs of the minibatches in flight
    step t + 1  Parameters ─┼─ memory b ── leaves of version t+1     (a stays until its last backward)

Before a step, if a minibatch still needs the current version, the Parameters move to other memory. If none does, the
step is done in place and nothing is copied. Memory that a live graph has saved is never written, because a backward
would use the new weights. (Without stashing, it should.)

The schedule decides which version a minibatch reads (schedule/policies.py): the newest, or with vertical sync the one
that it read at the first stage, which is kept here until the minibatch comes.

User code (optimizer(), a step, after_update(), a scheduler) gets the Parameters and may do anything that a plain loop
allows: write into them, assign to `.data`, freeze or unfreeze them, hook their gradients. `adopt_changes` copies all of
this to the newest version. Changes that no version can have, such as another shape, are refused.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pdtool.errors import FieldError
from pdtool.frontend.operators import empty_in_same_place, named_state, names_over_parameters

OnGradient = Callable[[nn.Parameter], None] | None  # called with each parameter whose gradient is complete


@dataclass(eq=False)
class WeightVersion:
    """One version of a module's weights.

    Attributes:
        leaves: in the order of `WeightVersions.parameters`, each of the parameter's shape.
        views: buffers and other tensors of the module that share memory with leaves.
        number: updates since the phase began.
        users: minibatches in flight that read the version.
    """

    leaves: list[Tensor]
    views: list[Tensor]
    number: int
    users: int


class WeightVersions:
    """The weight versions of one module.

    Args:
        stashing: whether versions are kept for the minibatches that read them; otherwise there is one version, and
            every step is in place.
        extrapolates: whether forwards read the values of `set_extrapolated` instead of the Parameters
            (runtime/corrections.py).

    Attributes:
        parameters: name -> Parameter, each once (one that is used under several names has the first).
        by_name: the same under all names.
        peak_versions: most versions that were ever alive together, the current one included.
        extrapolates: the argument.
        kept_memory: name of a parameter whose memory user code holds, as by `p.data`; "" for none.
    """

    def __init__(self, module: nn.Module, *, stashing: bool = True, extrapolates: bool = False) -> None:
        self.parameters = dict(module.named_parameters())
        self.by_name = dict(module.named_parameters(remove_duplicate=False))
        index = {id(parameter): i for i, parameter in enumerate(self.parameters.values())}
        self._entries = [
            (owner._parameters, key, index[id(parameter)])
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        state = named_state(module)
        shared = {id(state[name]) for group in names_over_parameters(state) for name in group}
        self._view_entries: list[tuple[dict[str, Any], str]] = [
            (tensors, key)
            for owner in module.modules()
            for tensors in (owner._buffers, vars(owner))
            for key, value in tensors.items()
            if id(value) in shared
        ]
        # nn.LSTM and its kind compute with their own list, made when a parameter is assigned
        self._rnns: list[Any] = [owner for owner in module.modules() if hasattr(owner, "_flat_weights_names")]
        self._in_one_storage = shared | {id(p) for rnn in self._rnns for p in rnn._parameters.values()}
        self._stashing = stashing
        self._reads: Iterator[int] | None = None
        self._next_reads: deque[int] = deque()  # read ahead, to see whether a version will be read
        self._spare_memory: list[list[Tensor]] = []
        self.kept_memory = ""
        self._alive: dict[int, WeightVersion] = {}
        self.peak_versions = 1
        self._bound: WeightVersion | None = None
        values = [
            *(p.data for p in self.parameters.values()),
            *(tensors[key].data for tensors, key in self._view_entries),
        ]
        self.extrapolates = extrapolates
        self._exact = self._new_version(values, 0) if extrapolates else None
        self._make_current(0, self._take_memory() if extrapolates else values)
        if extrapolates:
            self.set_extrapolated({})

    def begin_phase(self, reads: Iterator[int] | None = None) -> None:
        """Begin a phase, with no minibatch in flight.

        Args:
            reads: for each forward in order, how many updates of this phase it sees, never decreasing; None: all see
                the newest weights.
        """
        self._reads, self._next_reads = reads if self._stashing else None, deque()
        self._current.number, self._current.users = 0, 0
        self._alive = {0: self._current}

    def acquire(self) -> WeightVersion:
        """Bind the version that the next minibatch reads to the module and return it; see `accumulate_gradients`."""
        version = self._current
        if self._reads:
            version = self._alive[self._next_reads.popleft() if self._next_reads else next(self._reads)]
        version.users += 1
        self.bind(version)
        return version

    def accumulate_gradients(
        self, version: WeightVersion, backward: Callable[[], None], weight: float, on_gradient: OnGradient
    ) -> None:
        """Run the backward of a minibatch, add its gradients to those of the Parameters, and release its version.

        Args:
            backward: accumulates gradients in the leaves of `version`.
            weight: factor of these gradients.
            on_gradient: called with each Parameter whose gradient is complete, while others are still computed.
        """
        leaves = list(zip(self.parameters.values(), version.leaves, strict=True))
        if weight == 1.0:  # no scaling: the leaves accumulate in the Parameters' gradients in place
            for parameter, leaf in leaves:
                leaf.grad = parameter.grad
        hooks = _add_hooks(leaves, weight, on_gradient) if on_gradient else []
        backward()
        for hook in hooks:
            hook.remove()
        _collect_gradients(leaves, weight)
        self._release(version)

    def prepare_update(self) -> None:
        """Free the Parameters' memory for a step: afterwards no minibatch needs its content."""
        number = self._current.number + 1
        if not self._stashing or not self._is_needed(self._current):  # the step is in place
            del self._alive[self._current.number]
            self._current.number = number
            self._alive[number] = self._current
        elif self._exact:  # no forward reads the Parameters' memory: only the weights that it reads move
            self._make_current(number, self._take_memory())
        else:
            self._make_current(number, self._move_parameters())
        self.peak_versions = max(self.peak_versions, len(self._alive))

    def _move_parameters(self) -> list[Tensor]:
        """Give the Parameters other memory, which is returned, with the same values.

        Raises:
            FieldError: user code holds the old memory.
        """
        if self.kept_memory:
            raise FieldError(
                self.kept_memory,
                "gets new memory while minibatches are in flight, but your code still holds its old .data, or a view "
                "of it; read .data again in each step, or plan with --schedule 1f1b-flush",
            )
        memory = self._take_memory()
        _copy_all(memory, [*(parameter.data for parameter in self.parameters.values()), *self._current.views])
        for parameter, new in zip(self.parameters.values(), memory, strict=False):
            parameter.data = new
        return memory

    @property
    def _newest(self) -> WeightVersion:
        """The version with the values of the Parameters."""
        return self._exact or self._current

    def adopt_changes(self) -> bool:
        """After user code, update the newest version from the Parameters; return whether that changed it.

        Minibatches in flight keep the version that they read.

        Raises:
            FieldError: a parameter was changed in a way that training cannot follow; its text ends with the remedy.
        """
        newest = self._newest
        if not any(map(_is_changed, self.parameters.values(), newest.leaves)):
            return False
        for name, p, leaf in zip(self.parameters, self.parameters.values(), newest.leaves, strict=True):
            _check_change(name, p, leaf)
        memory = [*(p.data for p in self.parameters.values()), *newest.views]
        if self._exact:
            self._exact = self._new_version(memory, self._exact.number)
            memory = [*(leaf.detach() for leaf in self._current.leaves), *self._current.views]
        self._spare_memory.clear()  # shared memory there may no longer be shared
        users = self._current.users
        self._make_current(self._current.number, memory)
        self._current.users = users
        return True

    @contextmanager
    def noticing_kept_memory(self) -> Iterator[None]:
        """Detect whether user code in this context keeps a reference to a parameter's memory.

        A step may move the Parameter to other memory, and writes to the old memory would be lost.
        """
        before = self._others_in_memory()
        yield
        for name, others in self._others_in_memory().items():
            if others > before[name] and not self.kept_memory:
                self.kept_memory = name

    def _others_in_memory(self) -> dict[str, int]:
        """How many tensors hold each parameter's memory, besides the parameters and the newest leaves."""
        known = (*self.parameters.values(), *self._newest.leaves)
        own = Counter(tensor.untyped_storage().data_ptr() for tensor in known)
        storages = {name: p.untyped_storage() for name, p in self.parameters.items()}
        return {
            name: torch._C._storage_Use_Count(storage._cdata) - own[storage.data_ptr()]
            for name, storage in storages.items()
        }

    def set_extrapolated(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """After a step, set the weights that forwards read.

        Args:
            values: a parameter -> a tensor of its shape; for missing parameters forwards read the exact value.
        """
        assert self._exact, "forwards read the Parameters"
        with torch.no_grad():
            _copy_all(self._current.views, self._exact.views)
            _copy_all(self._current.leaves, [values.get(p, p.detach()) for p in self.parameters.values()])

    def bind_newest(self) -> None:
        """Let the module compute with the Parameters' values."""
        self.bind(self._newest)

    def bind(self, version: WeightVersion) -> None:
        """Let the module compute with `version`."""
        if version is self._bound:
            return
        self._bound = version
        for parameters, key, i in self._entries:
            parameters[key] = version.leaves[i]  # type: ignore[assignment]
        for (tensors, key), view in zip(self._view_entries, version.views, strict=True):
            tensors[key] = view
        for rnn in self._rnns:  # with the references, or on a GPU its forward would move the leaves to its own memory
            rnn._flat_weights = [rnn._parameters[name] for name in rnn._flat_weights_names]
            rnn._flat_weight_refs = [weakref.ref(weight) for weight in rnn._flat_weights]

    def _release(self, version: WeightVersion) -> None:
        """End a minibatch's use of `version`; memory of a version without users is kept for the next one."""
        version.users -= 1
        is_older = self._alive.get(version.number) is version and version is not self._current
        if is_older and not self._is_needed(version):
            del self._alive[version.number]
            self._spare_memory.append([*(leaf.detach() for leaf in version.leaves), *version.views])

    def _is_needed(self, version: WeightVersion) -> bool:
        """Whether a minibatch in flight, or a future forward, reads the version, if it is no longer the newest."""
        return bool(version.users) or self._will_be_read(version.number)

    def _will_be_read(self, number: int) -> bool:
        """Look ahead in the forwards' reads, which never decrease, until one reads a later version."""
        while self._reads and (not self._next_reads or self._next_reads[-1] <= number):
            next_read = next(self._reads, None)
            if next_read is None:
                break
            self._next_reads.append(next_read)
        return number in self._next_reads

    def _take_memory(self) -> list[Tensor]:
        if self._spare_memory:
            return self._spare_memory.pop()
        storages: dict[int, torch.UntypedStorage] = {}
        memory = [
            empty_in_same_place(p.data, storages) if id(p) in self._in_one_storage else torch.empty_like(p.data)
            for p in self.parameters.values()
        ]
        return memory + [empty_in_same_place(view, storages) for view in self._newest.views]

    def _new_version(self, memory: Sequence[Tensor], number: int) -> WeightVersion:
        """A version with fresh leaves over `memory`."""
        parameters = self.parameters.values()
        leaves = [m.detach().requires_grad_(p.requires_grad) for m, p in zip(memory, parameters, strict=False)]
        for leaf, p in zip(leaves, parameters, strict=True):
            if p._backward_hooks is not None:
                leaf._backward_hooks = p._backward_hooks  # the dict itself, because it shows when hooks are removed
        return WeightVersion(leaves, list(memory[len(leaves) :]), number, users=0)

    def _make_current(self, number: int, memory: Sequence[Tensor]) -> None:
        self._current = self._alive[number] = self._new_version(memory, number)
        self.bind(self._current)


def _is_changed(parameter: nn.Parameter, leaf: Tensor) -> bool:
    """Whether user code gave a parameter other memory than its leaf's, froze or unfroze it, or changed its hooks."""
    return (
        not parameter.is_set_to(leaf)
        or parameter.requires_grad != leaf.requires_grad
        or parameter._backward_hooks is not leaf._backward_hooks
        or bool(parameter._post_accumulate_grad_hooks)
    )


def _check_change(name: str, parameter: nn.Parameter, leaf: Tensor) -> None:
    """Check user code's changes to a parameter; raises FieldError, as `adopt_changes` does."""
    was, now = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}" for t in (leaf, parameter))
    if was != now:
        raise FieldError(name, f"became {now}, but is {was} in its stage; keep its shape, dtype and device")
    if parameter._post_accumulate_grad_hooks:
        raise FieldError(
            name,
            "has a hook on its accumulated gradient, but this is complete only after the sum over microbatches and "
            "replicas; update the parameter in the optimizer's step, or change each microbatch's gradient with "
            "register_hook() in optimizer()",
        )


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, of the same shape, in a few kernels."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _add_hooks(
    leaves: Iterable[tuple[nn.Parameter, Tensor]], weight: float, on_gradient: Callable[[nn.Parameter], None]
) -> list[RemovableHandle]:
    """Collect each gradient as soon as it is complete, then call `on_gradient`."""

    def hook(parameter: nn.Parameter, leaf: Tensor) -> None:
        _collect_gradients([(parameter, leaf)], weight)
        on_gradient(parameter)

    return [
        leaf.register_post_accumulate_grad_hook(partial(hook, parameter))  # type: ignore[no-untyped-call]
        for parameter, leaf in leaves
        if leaf.requires_grad
    ]


def _collect_gradients(leaves: Iterable[tuple[nn.Parameter, Tensor]], weight: float) -> None:
    """Add the gradients of leaves, times `weight`, to those of their Parameters, in a few kernels."""
    collected: list[tuple[nn.Parameter, Tensor]] = []
    for parameter, leaf in leaves:
        gradient, leaf.grad = leaf.grad, None
        if not parameter.requires_grad:  # frozen since the forward
            parameter.grad = None
        elif gradient is not None and gradient is not parameter.grad:
            collected.append((parameter, gradient))
    if weight != 1.0 and collected:
        torch._foreach_mul_([gradient for _, gradient in collected], weight)
    sums = [(parameter.grad, gradient) for parameter, gradient in collected if parameter.grad is not None]
    if sums:
        torch._foreach_add_([total for total, _ in sums], [gradient for _, gradient in sums])
    for parameter, gradient in collected:
        parameter.grad = gradient if parameter.grad is None else parameter.grad
