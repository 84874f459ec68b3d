"""Check that the user's functions do in the stages of a plan what they do in a plain loop.

Some checks read their source. Others try them, in a forked process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, product
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.errors import ModelError, PdtoolError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs, tensors_in
from pdtool.frontend.model_rules import LEAVE_THE_MODE, WRITE_INTO_IT, has_values_of
from pdtool.frontend.operators import first_names, in_mode, registered_state, storage_address
from pdtool.frontend.random_numbers import random_state_kept, seed_generators
from pdtool.frontend.trial import tried
from pdtool.frontend.update_proof import TRIED_UPDATES, check_update
from pdtool.frontend.variable_uses import changed_in_training, collected
from pdtool.generator.composed import ModelFailedError, VerificationError, fits_in_memory, state_kept
from pdtool.generator.kept_state import has_same_content
from pdtool.generator.outputs_only import check_outputs_only
from pdtool.generator.verify import VERIFIED_SAMPLES, outputs_in_both_modes

_IN_TRAINING = ("optimizer", "collate", "sampler", "loss", "scheduler", "metrics", "summarize_metrics", "after_update")
_COMPUTED_AFTER = {
    "after_update": "what loss() or metrics() computes",
    "scheduler": "a value of a parameter group, such as the learning rate,",
}
_BY_EACH_STAGE = ("after_update", "scheduler", "optimizer")
# What the first functions change, the second do not see: with several stages they run in different processes.
_APART: dict[tuple[str, ...], tuple[str, ...]] = {
    ("dataset",): ("loss", "metrics", "summarize_metrics", *_BY_EACH_STAGE),
    ("collate", "sampler"): ("loss", "metrics", *_BY_EACH_STAGE),
    ("loss", "metrics"): ("collate", "sampler", *_BY_EACH_STAGE),
}
_OF_MINIBATCHES = {"collate", "loss", "metrics"}  # each replica calls these for its own
_VALUES = (bool, int, float, str, tuple, torch.Tensor)  # of a parameter group
_DEPTH, _MOST_HELD = 3, 50  # of containers and objects to look for the model in, and what is looked at in each
_COMPARED_UPDATES = (1, 2, 3, TRIED_UPDATES)  # a value may change at first only


def check_user_functions(
    model_file: ModelFile,
    plan: Plan,
    bundle: Bundle,
    texts: Mapping[str, str],
    build: Callable[[], nn.Module],
    outputs: int | None = None,
) -> None:
    """Check what loss(), metrics(), after_update(), scheduler() and the optimizer do in the stages of a plan.

    codegen does this, and a run whose model.py has changed since.

    Args:
        texts: texts of the stage files, by name.
        build: returns the model; its parameters are not changed.
        outputs: number of tensors that the model returns; None: unknown.

    Raises:
        ModelError: it differs from what they do in a plain loop.
    """
    _check_metrics(model_file, plan.stages[-1].replicas)
    _check_passed_values(model_file, len(plan.stages), plan.stages[-1].replicas)
    has = model_file.has
    if bundle.proof == "values":
        if has("dataset"):
            _check_target_kept(model_file, build())
        if has("dataset") and has("loss"):
            check_outputs_only(model_file, bundle, texts, outputs)
            _check_validation(model_file, bundle, build())
        _check_changes(model_file, plan, bundle)
        if (bundle.tied or plan.chunks > 1) and all(map(has, ("loss", "dataset", "optimizer"))):
            _check_repeated_calls(model_file, bundle)
    _prove_update(model_file, bundle, build)


def check_built_alone(model_file: ModelFile) -> None:
    """Check that the model is built without what dataset() computes; raises VerificationError."""
    if not model_file.has("dataset"):
        return
    function = model_file.ref.function
    for line, variable in collected(model_file.module, "dataset", function, builds=True):
        what = f"{line}: dataset() changes {variable}, which {function}() reads, but the model is built first"
        raise VerificationError(what, "compute it where it is read, or pass it with --set")


def check_variables(model: nn.Module, model_file: ModelFile) -> None:
    """Check that no variable changes that stage files have as a constant: in training, when a sample is read, or in
    dataset() if the model is traced before that is called. Raises VerificationError."""
    functions, after_dataset = [*_IN_TRAINING, "dataset"], not model_file.has("example_inputs")
    changed = changed_in_training(model, model_file.module, functions, after_dataset=after_dataset)
    for line, function, variable in changed:
        what = f"{line}: {function}() changes {variable}, which forward reads, but stages have its value as a constant"
        remedy = "keep it in a buffer that forward changes"
        if function == "dataset":
            remedy = "let the samples contain it, as an input of the model"
        if function in ("loss", "metrics"):  # perhaps auxiliary losses, in a list that forward fills and loss() clears
            remedy = f"if forward puts values there, return them as part of the output; otherwise {remedy}"
        raise VerificationError(what, remedy)


def _check_metrics(model_file: ModelFile, replicas: int) -> None:
    """Check that metrics() collects nothing for summarize_metrics() or loss() if each replica of the last stage sees a
    part only; raises VerificationError."""
    remedies = {
        "summarize_metrics": "let metrics() return these values as sums (tensors are allowed)",
        "loss": "compute the value from the output and target of loss()",
    }
    for reader in filter(model_file.has, remedies if replicas > 1 and model_file.has("metrics") else ()):
        for line, variable in collected(model_file.module, "metrics", reader):
            raise VerificationError(
                f"{line}: {reader}() reads {variable}, which metrics() changes, but the last stage has {replicas} "
                "replicas, and each sees only its own minibatches",
                f"{remedies[reader]}, or give the last stage one replica",
            )


def _check_passed_values(model_file: ModelFile, stages: int, replicas: int) -> None:
    """Check that no variable carries a value from one function of the user to one in another process; raises
    VerificationError."""
    why = "with several stages these run in different processes"
    if stages == 1:
        why = f"each of the {replicas} replicas sees only its own minibatches"
    for changing, reading in _APART.items() if stages > 1 or replicas > 1 else ():
        for function, reader in product(*(filter(model_file.has, each) for each in (changing, reading))):
            if stages == 1 and (function not in _OF_MINIBATCHES or reader in _OF_MINIBATCHES):
                continue
            where = "the optimizer's step" if reader == "optimizer" and function != "dataset" else f"{reader}()"
            for line, variable in collected(model_file.module, function, reader):
                raise VerificationError(
                    f"{line}: {function}() changes {variable}, which {where} reads, but {why}",
                    "pass the value on in the inputs, the target or the model's output, or compute it where it is read"
                    + ", or train with one worker" * (stages == 1),
                )


def _prove_update(model_file: ModelFile, bundle: Bundle, build: Callable[[], nn.Module]) -> None:
    """Check that updates of the stages equal those of the model, if it fits into this machine's memory; raises
    ModelError."""
    if len(bundle.stages) < 2 or not model_file.has("optimizer"):
        return
    with random_state_kept():
        model = build()
        if fits_in_memory(model):
            names = first_names(dict(model.named_parameters(remove_duplicate=False)))
            tied = {names[tied.names[0]] for tied in bundle.tied}
            stages = [{names[name] for name in stage.parameters if name in names} - tied for stage in bundle.stages]
            check_update(model_file, model, [*stages, *({name} for name in tied)])


def _check_target_kept(model_file: ModelFile, model: nn.Module) -> None:
    """Check that forward does not write into a target that lies in the memory of an input, as with `return x, x` in
    collate(): the target goes to the last stage before the first one computes. Raises ModelError."""
    inputs = model_file.example_inputs(VERIFIED_SAMPLES)
    if not _writes_into(model, inputs):
        return
    batch: Any = ((), ())
    with suppress(PdtoolError):  # there may be no training set here
        batch = model_file.example_batch(VERIFIED_SAMPLES)
    written, target = ({*map(storage_address, tensors_in(part))} for part in batch)
    if written & target:
        what = "forward writes into its input, and the target lies in the same memory"
        raise model_file.error(what, "return a copy as the target, such as x.clone(), or let forward copy its input")


def _writes_into(model: nn.Module, inputs: ModelInputs) -> bool:
    """Whether forward changes its inputs; its buffers may change, too."""
    before = [tensor.clone() for tensor in inputs.tensors]
    with suppress(Exception), torch.no_grad(), random_state_kept():  # such as a minibatch that is too small
        inputs.call(model)
    return not all(map(has_same_content, before, inputs.tensors))


def _check_validation(model_file: ModelFile, bundle: Bundle, model: nn.Module) -> None:
    """Check that loss() and metrics() raise no error in a validation, where it would end the run after an epoch.

    Raises:
        ModelError: one of them does, for samples of the training set and for the first minibatch of the validation set.
    """
    try:
        tried(partial(_validate, model_file, model, bundle.batch_size), model.parameters())
    except ModelError as error:
        if "CUDA" in error.what:  # which that process does not have, but perhaps the run
            return
        if "not require grad" not in error.what:
            raise
        what = f"{error.what} (a validation computes without gradients)"
        raise ModelError(what, "compute gradients in loss() only if torch.is_grad_enabled()") from None
    except Exception:  # of forward, or that process has ended; others tell
        return


def _validate(model_file: ModelFile, model: nn.Module, batch_size: int) -> None:
    """Compute loss and metrics of two samples of the training set; if that fails, of the first validation minibatch."""

    def validate(split: str, samples: int) -> None:
        inputs, target = model_file.example_batch(samples, split)
        output = model_file.as_inputs(inputs).call(model)
        model_file.loss(output, target)
        model_file.metrics(output, target)

    model.eval()
    with torch.no_grad():
        try:
            validate("train", VERIFIED_SAMPLES)
        except Exception:  # metrics() may expect a target that only the validation set has
            validate("valid", batch_size)


def _check_changes(model_file: ModelFile, plan: Plan, bundle: Bundle) -> None:
    """Check that no function that training calls changes what forward reads besides the values of parameters and
    buffers, such as `layer.p`, as far as that is not found by reading the file.

    Raises:
        ModelError: one does, but stages have a constant in its place, or the tensor that it had.
    """
    model = model_file.build()  # the newest one, to which variables of model.py refer
    parts = {id(module) for module in model.modules()}
    of_model = any(_holds(value, parts) for value in vars(model_file.module).values())
    names = dict.fromkeys(name for name, _, _ in _CALLS)
    functions = [name for name in names if model_file.has(name) and (of_model or name == "after_update")]
    overridden = [m for m in model.modules() if "train" in vars(m) or type(m).train is not nn.Module.train]
    if not (functions or overridden):
        return
    inputs = model_file.example_inputs(min(bundle.batch_size, VERIFIED_SAMPLES))
    change = None
    with suppress(Exception):  # a trial that takes too long, or ends otherwise, tells nothing
        change = tried(partial(_change_of, model_file, model, inputs, functions, plan, bundle), model.parameters())
    if change is None or (change.by == "train" and not overridden):  # the model computes something else each time
        return
    by = "loss() or metrics()" if change.by == "loss" and model_file.has("metrics") else f"{change.by}()"
    if change.by in names:
        raise model_file.error_in(change.by, f"{by} {change.what}", change.remedy)
    raise model_file.error(f"{by} {change.what}", change.remedy)


def _holds(value: Any, parts: set[int], depth: int = _DEPTH) -> bool:
    """Whether a variable of the file is a part of the model, given by ids, or a container or object that holds one."""
    if id(value) in parts or not depth:
        return id(value) in parts
    held: Iterable[Any] = ()
    kind = type(value)  # isinstance would ask a proxy for its class
    if issubclass(kind, dict):
        held = dict.values(value)
    elif issubclass(kind, (list, tuple, set)):
        held = value
    elif not issubclass(kind, (ModuleType, FunctionType, nn.Module)):
        with suppress(AttributeError):
            held = object.__getattribute__(value, "__dict__").values()  # runs no code of its class
    return any(_holds(each, parts, depth - 1) for each in islice(held, _MOST_HELD))


class _Change(NamedTuple):
    """What a function of the user does to the model that its stages would not see."""

    by: str
    what: str = (
        "changes a value that forward reads and that is neither a parameter nor a buffer, but stages keep it as a "
        "constant"
    )
    remedy: str = "keep it in a buffer that forward changes"


def _change_of(
    model_file: ModelFile, model: nn.Module, inputs: ModelInputs, functions: Sequence[str], plan: Plan, bundle: Bundle
) -> _Change | None:
    """Return the first change by one of these functions, or by `train` if that is putting the model into a mode."""
    depth = len(bundle.stages) // plan.chunks
    of_worker = {"sampler": bundle.stages[::depth], "loss": bundle.stages[depth - 1 :: depth]}
    batch = None
    with suppress(Exception):  # there may be no training set here
        batch = model_file.example_batch(VERIFIED_SAMPLES)

    def outputs() -> Any:
        with state_kept(model):
            return outputs_in_both_modes(model, inputs)

    with suppress(ModelFailedError):  # such as a minibatch that is too small
        made, before = registered_state(model), outputs()
        if not has_same_content(before, outputs()):
            return _Change("train")
        # but for buffers that forward assigns
        state = {name: tensor for name, tensor in registered_state(model).items() if made.get(name) is tensor}
        values = {name: tensor.detach().clone() for name, tensor in state.items()}
        for function, is_training, call in (each for each in _CALLS if each[0] in functions):
            modes = _modes(in_mode(model, is_training))
            stages = of_worker.get(function, bundle.stages)
            own = {id(state.get(name)) for stage in stages for name in (*stage.parameters, *stage.buffers)}
            with state_kept(model):
                with suppress(Exception, SystemExit):  # the proof of the update, and others, tell
                    call(model_file, model, batch)
                now = registered_state(model)
                for name, tensor in state.items():
                    if name not in now or not has_values_of(now[name], tensor):
                        what = f"puts another tensor in the place of {name} in the model, but its stage keeps the first"
                        return _Change(function, what, WRITE_INTO_IT)
                    is_of_another = function in of_worker and id(tensor) not in own
                    if is_of_another and not has_same_content(tensor.detach(), values[name]):
                        what = f"writes into {name} of the model, but runs in another worker than the stage that has it"
                        return _Change(function, what, "let forward or after_update() change it")
                if moved := [path for path, now in _modes(model).items() if modes.get(path, now) != now]:
                    what = f"puts {moved[0] or 'the model'} into another mode, but stages keep their modes"
                    return _Change(function, what, LEAVE_THE_MODE)
            if not has_same_content(before, outputs()):
                return _Change(function)
    return None


def _modes(model: nn.Module) -> dict[str, bool]:
    """Whether each module of a model is in training mode."""
    return {path: module.training for path, module in model.named_modules()}


def _call_sampler(model_file: ModelFile, model: nn.Module, batch: Any) -> None:
    model_file.sampler(model_file.training_set(), 2)


def _call_loss(model_file: ModelFile, model: nn.Module, batch: Any) -> Any:
    """Call it, and return the output."""
    inputs, target = batch
    with state_kept(model):  # what forward changes is no matter
        output = model_file.as_inputs(inputs).call(model)
    model_file.loss(output, target)
    return output


@torch.no_grad()
def _call_loss_and_metrics(model_file: ModelFile, model: nn.Module, batch: Any) -> None:
    model_file.metrics(_call_loss(model_file, model, batch), batch[1])


def _call_after_update(model_file: ModelFile, model: nn.Module, batch: Any) -> None:
    """Call it for the first updates, with copies of the parameters and gradients of zero."""
    parameters = _copied_parameters(model)
    for update in range(1, TRIED_UPDATES + 1):
        model_file.after_update(parameters, update)


def _call_optimizer(model_file: ModelFile, model: nn.Module, batch: Any, *, schedules: bool = False) -> None:
    """Call its step, and that of its schedule, with copies of the parameters and gradients of zero."""
    optimizer = model_file.optimizer(_copied_parameters(model))
    scheduler: Any = model_file.scheduler(optimizer, TRIED_UPDATES) if schedules else None
    for _ in range(2):
        optimizer.step()
        if scheduler:
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))


# (function, whether in training mode, how it is called): a validation has several minibatches
_CALLS: Sequence[tuple[str, bool, Callable[[ModelFile, nn.Module, Any], None]]] = (
    ("sampler", True, _call_sampler),
    ("loss", True, _call_loss),
    *[("loss", False, _call_loss_and_metrics)] * 2,
    ("optimizer", True, _call_optimizer),
    ("scheduler", True, partial(_call_optimizer, schedules=True)),
    ("after_update", True, _call_after_update),
)


def _copied_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Copies of the model's parameters, by name, with gradients of zero."""
    copies = [(name, nn.Parameter(p.detach().clone(), p.requires_grad)) for name, p in model.named_parameters()]
    for _, copied in copies:
        copied.grad = torch.zeros_like(copied)
    return copies


def _check_repeated_calls(model_file: ModelFile, bundle: Bundle) -> None:
    """Check that after_update() and scheduler() may be called several times in one update.

    A worker calls them for each of its stages, and for each parameter that several stages hold.

    Raises:
        ModelError: the loss, the metrics or the learning rate depends on the number of calls.
    """
    if not any(map(model_file.has, _COMPUTED_AFTER)):
        return
    seen: list[dict[str, Any]] = []
    with suppress(Exception):  # of user code; others tell
        model = model_file.build()
        inputs, target = model_file.example_batch(bundle.batch_size)
        with random_state_kept(), torch.no_grad():
            output = model_file.as_inputs(inputs).call(model)
        for calls in (1, 2):
            work = partial(_seen_after_updates, model_file, model, output, target, calls)
            seen.append(tried(work, model.parameters()))
    for function, what in _COMPUTED_AFTER.items() if len(seen) == 2 else ():
        if not has_same_content(*(each[function] for each in seen)):
            function = function if model_file.has(function) else "after_update"  # which may change the learning rate
            raise model_file.error_in(
                function,
                f"{what} depends on how often {function}() is called, but a worker calls it several times per update: "
                "once for each of its stages, and once for each parameter that several stages hold",
                "compute the value from the number of the update, as in 0.99**update, and not from its previous value",
            )


def _seen_after_updates(
    model_file: ModelFile, model: nn.Module, output: Any, target: Any, calls: int
) -> dict[str, Any]:
    """Return loss and metrics of an output, and the values of parameter groups, after updates with so many calls in
    each."""
    parameters = _copied_parameters(model)
    optimizers = [model_file.optimizer(parameters) for _ in range(calls)]
    names = [name for name, value in vars(model_file.module).items() if value is optimizers[-1]]
    schedulers = [model_file.scheduler(optimizer, TRIED_UPDATES) for optimizer in optimizers]
    figures, values = [], []
    for update in range(1, TRIED_UPDATES + 1):
        for i, scheduler in enumerate(schedulers):
            vars(model_file.module).update(dict.fromkeys(names, optimizers[i]))  # as a worker does
            model_file.after_update(parameters[i::calls], update)
            if scheduler and not isinstance(scheduler, ReduceLROnPlateau):
                # The schedule may be shorter, and it warns because no optimizer is stepped.
                with suppress(Exception), warnings.catch_warnings(action="ignore"):
                    scheduler.step()
        if update in _COMPARED_UPDATES:
            seed_generators(0)
            figures.append((model_file.loss(output, target).detach(), model_file.metrics(output, target)))
            values.append([{k: v for k, v in g.items() if isinstance(v, _VALUES)} for g in optimizers[0].param_groups])
    return {"after_update": figures, "scheduler": values}
