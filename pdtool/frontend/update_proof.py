"""Proof that a model's update is the same when each stage has an optimizer of its own.

Each stage calls optimizer() with all parameters and keeps its own (`keep_parameters`). For nearly all optimizers that
makes no difference. But one that looks at all of its parameters, to clip by their norm or to find a common step size,
would only see those of one stage and train differently. So we compute updates both ways and compare them bit for bit:
as many updates as D-Adaptation takes until its step size moves, on a corner of each large parameter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.trial import tried

NAMES_OF_GROUP = {"params", "param_names"}  # keys of a parameter group that say which parameters it has
TRIED_UPDATES = 40  # before training, to see what the optimizer and after_update() do
_GROWN = (
    "pdtool tries it with gradients that grow from update to update. If it estimates a step size from all of them, as "
    "Prodigy does, train without stages, as with `pdtool partition --strategy data-parallel`"
)
_LAST_SIZES = {-2: 1e-6, -1: 1e3}  # number of an update, from the end -> factor on its gradients
# Of three updates, the factors on the gradient that is spoiled and on all others: as they are, huge, not a number.
_SPOILED = ((1.0, 1.0), (1e6, 1e-4), (math.nan, 1.0))
_LARGE, _CORNER = 1_000_000, 8  # numbers in all parameters; of larger models, the most in each dimension of one
_RTOL, _ATOL = 1e-3, 1e-5  # for an optimizer that does not compute the same bits twice
_CALLS_USER_CODE = (LambdaLR, MultiplicativeLR)
_Parameters = Mapping[str, nn.Parameter]  # by name


def keep_parameters(optimizer: Optimizer, kept: set[int]) -> None:
    """Make an optimizer keep some of its parameters, each in its group; a group may become empty.

    Args:
        kept: ids of these parameters.
    """
    for group in optimizer.param_groups:
        is_kept = [id(p) in kept for p in group["params"]]
        for key in NAMES_OF_GROUP:  # names where the optimizer was given them
            if key in group:
                group[key] = [value for value, keep in zip(group[key], is_kept, strict=True) if keep]
    for each in (optimizer, *wrapped_optimizers(optimizer).values()):
        for parameter in [p for p in each.state if isinstance(p, Tensor) and id(p) not in kept]:
            del each.state[parameter]


def wrapped_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers in an optimizer's attributes, by name; they have states of their own, as in Lookahead."""
    own = vars(optimizer).items()
    return {name: o for name, o in own if isinstance(o, Optimizer) and o.state is not optimizer.state}


def set_mode(optimizer: Optimizer, *, training: bool) -> None:
    """Put an optimizer with modes, as schedule-free ones, into training or evaluation mode."""
    method = getattr(optimizer, "train" if training else "eval", None)
    if callable(method):
        method()


def own_zero_grad(optimizer: Optimizer) -> bool:
    """Call zero_grad() if it is not torch's, whose work is done by dropping the gradients; return whether it is not."""
    is_own = not getattr(optimizer.zero_grad, "__module__", "").startswith("torch.")
    if is_own:
        optimizer.zero_grad()
    return is_own


def user_code_in_step(file: ModelFile, optimizer: Optimizer) -> list[str]:
    """Name the code outside torch that takes part in a step of optimizer()'s result."""
    # An optimizer that wraps another one, and never called Optimizer.__init__, has no such attributes.
    hooks = [vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    hooks += [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    causes = [] if is_of_torch and not any(hooks) else [f"a step of {type(optimizer).__name__}"]
    return causes + ["after_update()"] * file.has("after_update")


def schedules_by_user_code(scheduler: object) -> bool:
    """Whether code outside torch takes part in a learning-rate schedule; False for None."""
    is_of_torch = scheduler is None or type(scheduler).__module__ == "torch.optim.lr_scheduler"
    return not is_of_torch or isinstance(scheduler, _CALLS_USER_CODE)


def _user_code_in_update(file: ModelFile, parameters: _Parameters) -> str:
    """Name the code outside torch that takes part in an update; "" for none."""
    optimizer = file.optimizer(list(parameters.items()))
    causes = user_code_in_step(file, optimizer)  # before a scheduler wraps the optimizer's step
    by_user_code = schedules_by_user_code(file.scheduler(optimizer, TRIED_UPDATES))
    return " or ".join(causes) or "scheduler()" * by_user_code


def check_update(file: ModelFile, model: nn.Module, stages: Sequence[Collection[str]]) -> None:
    """Check that updates of each stage, and of each layer alone, give the same weights as updates of the whole model;
    raises ModelError.

    Torch's own optimizers and schedules treat each parameter separately, so they are not checked. If an update draws
    random numbers, these differ between stages and nothing can be compared.

    Args:
        model: on a CPU, with the values of its parameters.
        stages: names of the parameters of each stage, and of each group that several stages hold.
    """
    parameters = dict(model.named_parameters())
    cause = tried(partial(_user_code_in_update, file, parameters), parameters.values()) if len(stages) > 1 else ""
    if not cause:
        return
    update = _Update(file, cause, parameters)
    if sum(p.numel() for p in parameters.values()) > _LARGE:
        corners = _Update(file, cause, {name: _corner(p) for name, p in parameters.items()}, parameters)
        with suppress(ModelError):  # of an optimizer() that wants the shapes as they are
            corners.of(parameters)
            update = corners
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    expected, again = (update.of(parameters) for _ in range(2))
    if update.draws_random_numbers:
        return
    is_same: Callable[[Tensor, Tensor], bool] = partial(torch.allclose, rtol=0.0, atol=0.0, equal_nan=True)
    if not all(is_same(expected[name], again[name]) for name in expected):
        is_same = partial(torch.allclose, rtol=_RTOL, atol=_ATOL, equal_nan=True)
    for parts, owner in ((stages, "each stage"), (list(layers.values()), "each layer")):
        found: dict[str, Tensor] = {}
        for part in parts:
            try:
                found |= update.of(part)
            except ModelError as error:
                if parts is not stages:  # such as parameters and their averages, which one stage has
                    continue
                what = f"it works with all parameters, but fails with only {', '.join(list(part)[:3])} ({error})"
                remedy = "if it fails because a parameter group is empty there, skip it with `if group['params']:`"
                if "size of tensor" in str(error) or "shape" in str(error):
                    remedy = "if it keeps values of parameters by position, keep them in self.state[parameter] instead"
                raise _refusal(update, what, f"{remedy}; ") from error
        if different := [name for name in found if not is_same(found[name], expected[name])]:
            others = f" and {len(different) - 3} others" * (len(different) > 3)
            what = f"with the same gradients, {', '.join(different[:3])}{others} get different values"
            raise _refusal(update, f"{what} if {owner} has an optimizer of its own")
    if trained := [name for name, p in parameters.items() if p.requires_grad and any(name in s for s in stages)]:
        _check_skipped_updates(update, stages, trained[0], is_same)


def _check_skipped_updates(
    update: _Update, stages: Sequence[Collection[str]], spoiled: str, is_same: Callable[[Tensor, Tensor], bool]
) -> None:
    """Check that a gradient of one stage that is huge or not finite changes no update of the others, as in an optimizer
    that skips such an update.

    Args:
        spoiled: the parameter with that gradient.
    """
    try:
        expected = update.of([name for stage in stages for name in stage], spoiled)
    except ModelError:  # it ends the run, whichever stage raises it
        return
    for stage in (stage for stage in stages if spoiled not in stage):
        found = update.of(stage, spoiled)
        if changed := [name for name in found if not is_same(found[name], expected[name])]:
            what = f"if the gradient of {spoiled} is huge or not finite, {changed[0]} gets another value"
            raise _refusal(update, f"{what} if each stage has an optimizer of its own")


def _refusal(update: _Update, what: str, remedy_of_optimizer: str = "") -> ModelError:
    function = update.cause.removesuffix("()")
    function = function if update.file.has(function) else "optimizer"
    remedy = (
        "if the update needs all parameters in one place, train without stages, as with `pdtool partition --strategy "
        "data-parallel`"
    )
    if function == "optimizer":
        remedy = (
            "if it clips gradients, set MAX_GRAD_NORM instead (a flushing schedule then clips by the norm of all "
            f"gradients); {remedy}"
        )
        remedy = remedy_of_optimizer + remedy
    return update.file.error_in(function, f"{update.cause} depends on parameters of several stages: {what}", remedy)


class _Update:
    """Updates of some parameters of a model, with gradients that are the same for each part.

    Args:
        whole: the tensors that `parameters` are corners of; gradients are scaled to have the whole tensors' norms.

    Attributes:
        file: the user's.
        cause: code outside torch that takes part in an update, such as `after_update()`.
        draws_random_numbers: whether an update does.
    """

    def __init__(self, file: ModelFile, cause: str, parameters: _Parameters, whole: _Parameters | None = None) -> None:
        sizes = whole or parameters
        self.file, self.cause, self._parameters = file, cause, parameters
        self.draws_random_numbers = False
        generator = torch.Generator().manual_seed(0)
        self._gradients = {
            name: (torch.randn(p.shape, generator=generator) * math.sqrt(sizes[name].numel() / max(1, p.numel()))).to(p)
            for name, p in parameters.items()
        }

    def of(self, part: Collection[str], spoiled: str = "") -> dict[str, Tensor]:
        """Return the values of the parameters of a part after the updates, by name.

        Each part is tried from the same state of the user's variables, and no variable or file of the user changes.

        Args:
            spoiled: instead, make three updates; in the second one this parameter's gradient is huge and the others
                are small, in the third one it is not finite.
        """
        values, draws_random_numbers = tried(partial(self._of, part, spoiled), self._parameters.values())
        self.draws_random_numbers |= draws_random_numbers
        return values

    def _of(self, part: Collection[str], spoiled: str) -> tuple[dict[str, Tensor], bool]:
        """Return the values of `of`, and whether the updates draw random numbers.

        The gradients point the same way in each update, so that a search for a step size finds one. Their size grows
        slowly. In the last two updates they are tiny and huge, because user code may act only on such gradients.
        """
        parameters = {n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in self._parameters.items()}
        own = {name: parameters[name] for name in parameters if name in part}
        optimizer = self.file.optimizer(list(parameters.items()))
        keep_parameters(optimizer, {id(p) for p in own.values()})
        scheduler: Any = self.file.scheduler(optimizer, TRIED_UPDATES)
        gradients = {name: self._gradients[name] for name in own}
        before = _generator_states()
        try:
            set_mode(optimizer, training=True)
            for update in range(len(_SPOILED) if spoiled else TRIED_UPDATES):
                size = _LAST_SIZES.get(update - TRIED_UPDATES, 1 + 0.1 * update)
                of_spoiled, of_others = _SPOILED[update] if spoiled else (size, size)
                for name, gradient in gradients.items():
                    factor = of_spoiled if name == spoiled else of_others
                    own[name].grad = gradient * factor if own[name].requires_grad else None
                optimizer.step()
                self.file.after_update(list(own.items()), update + 1)
                if scheduler:
                    with suppress(Exception):  # of a schedule that is shorter
                        scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
                if own_zero_grad(optimizer) and any(p.grad is not None and p.grad.any() for p in own.values()):
                    what = f"zero_grad() of {type(optimizer).__name__} leaves gradients, but pdtool then drops them"
                    raise self.file.error_in("optimizer", what, "keep what the next step needs in self.state")
        except ModelError:  # of after_update()
            raise
        except Exception as error:
            found = self.file.error_at(error, self.cause)
            if "overflow" in str(error):
                found.remedy = _GROWN
            raise found from error
        return {name: p.detach() for name, p in own.items()}, before != _generator_states()


def _corner(parameter: nn.Parameter) -> nn.Parameter:
    """The first numbers of a parameter in each dimension, scaled to the norm of the whole."""
    values = parameter.detach()[tuple(slice(_CORNER) for _ in parameter.shape)].clone()
    if values.is_floating_point() or values.is_complex():
        ratio = float(parameter.detach().norm() / values.norm())
        values = values * ratio if math.isfinite(ratio) else values
    return nn.Parameter(values, parameter.requires_grad)


def _generator_states() -> list[Any]:
    """The states of all generators, which change when random numbers are drawn."""
    state: Any = np.random.get_state(legacy=False)
    of_numpy = (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"])
    return [torch.get_rng_state().tolist(), random.getstate(), of_numpy]
