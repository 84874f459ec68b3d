"""Generate a bundle: trace the model, write its stages, check them against it, and only then keep the files."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pdtool.artifacts.bundle import Bundle, StageModule
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import ModelError, PdtoolError, StaleError, UsageError
from pdtool.files import write_atomically, write_remedy
from pdtool.frontend.graph_digest import check_profile, graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs, named_leaves, tensors_in
from pdtool.frontend.operators import Traced, Value, first_names, named_state, storage_address
from pdtool.frontend.random_numbers import random_state_kept, seed_generators
from pdtool.frontend.tracing import trace_file
from pdtool.frontend.trial import tried
from pdtool.frontend.update_proof import TRIED_UPDATES, check_update
from pdtool.frontend.variable_uses import changed_in_training, collected
from pdtool.generator.composed import ModelFailedError, VerificationError, state_kept
from pdtool.generator.kept_state import has_same_content
from pdtool.generator.output_writer import output_class_names
from pdtool.generator.outputs_only import check_outputs_only
from pdtool.generator.replicated_state import buffers_read_back
from pdtool.generator.stage_file import StageWriter
from pdtool.generator.verify import VERIFIED_SAMPLES, outputs_in_both_modes, verify_shapes, verify_values
from pdtool.generator.wiring import Wiring
from pdtool.host import memory_limits

# Copies of all parameters in memory while values are compared: the model, its copy, the stages, and their gradients.
_COPIES = 6
_IN_TRAINING = ("optimizer", "collate", "sampler", "loss", "scheduler", "metrics", "summarize_metrics", "after_update")
_COMPUTED_AFTER = {
    "after_update": "what loss() or metrics() computes",
    "scheduler": "a value of a parameter group, such as the learning rate,",
}
_AFTER_FORWARD = ("loss", "metrics", "after_update", "scheduler")
_BY_EACH_STAGE = ("after_update", "scheduler", "optimizer")
# What the first functions change, the second do not see: with several stages they run in different processes.
_APART: dict[tuple[str, ...], tuple[str, ...]] = {
    ("dataset",): ("loss", "metrics", "summarize_metrics", *_BY_EACH_STAGE),
    ("collate", "sampler"): ("loss", "metrics", *_BY_EACH_STAGE),
    ("loss", "metrics"): ("collate", "sampler", *_BY_EACH_STAGE),
}
_OF_MINIBATCHES = {"collate", "loss", "metrics"}  # each replica calls these for its own
_VALUES = (bool, int, float, str, tuple, torch.Tensor)  # of a parameter group
_COMPARED_UPDATES = (1, 2, 3, TRIED_UPDATES)  # a value may change at first only
_REPEATED_SAMPLES = 8


def generate(
    plan: Plan,
    profile: Profile,
    model_file: ModelFile,
    folder: Path,
    progress: Callable[[str], None] = lambda step: None,
) -> Bundle:
    """Write `folder`/stage_K.py and bundle.yaml for `plan`.

    The files are written only after the composed stages are checked against the model (law 1). An older bundle in
    `folder` stays unchanged until then.

    Raises:
        TraceError: the model cannot be traced.
        StaleError: the model's operator graph has changed since it was profiled.
        ArtifactError: the plan does not fit the profile, or the profile not the model.
        VerificationError: the stages are not equal to the model, or the model cannot have the plan's replicas.
        UsageError: `folder` has files of these names that codegen did not write.
    """
    _check_target(folder)
    stages = plan.stage_nodes(profile)
    _check_built_alone(model_file)
    progress("tracing the model")
    traced = trace_file(model_file, model_file.build(), plan.batch_size)
    check_profile(traced, profile, model_file.ref.source)
    _check_variables(traced.model, model_file)
    progress("writing the stages")
    fits = fits_in_memory(traced.model)
    texts, bundle = _written(plan, stages, traced, "values" if fits else "shapes")
    several = any(stage.in_flight > 1 for stage in plan.stages)
    progress("comparing the stages with the model" if fits else "checking shapes (the model is too large to run here)")
    bundle = bundle.model_copy(update={"differs_for_one_sample": _verify(traced, model_file, texts, bundle, several)})
    found = {
        "read_back": buffers_read_back(plan, bundle, model_file),
        "repeats_samples": _repeats_samples(model_file, min(plan.batch_size, _REPEATED_SAMPLES)),
    }
    bundle = bundle.model_copy(update=found)
    outputs = len([leaf for _, leaf in named_leaves(traced.output, "output") if isinstance(leaf, Value)])
    check_user_functions(model_file, plan, bundle, texts, lambda: traced.model, outputs)
    _write(folder, texts | {Bundle.FILE: bundle.dump()})
    return bundle


def _check_built_alone(model_file: ModelFile) -> None:
    """Check that the model is built without what dataset() computes; raises VerificationError."""
    if not model_file.has("dataset"):
        return
    function = model_file.ref.function
    for line, variable in collected(model_file.module, "dataset", function, builds=True):
        what = f"{line}: dataset() changes {variable}, which {function}() reads, but the model is built first"
        raise VerificationError(what, "compute it where it is read, or pass it with --set")


def _check_variables(model: nn.Module, model_file: ModelFile) -> None:
    """Check that no variable changes that stage files have as a constant: in training, or in dataset() if the model is
    traced before that is called. Raises VerificationError."""
    functions = [*_IN_TRAINING, *["dataset"] * model_file.has("example_inputs")]
    for line, function, variable in changed_in_training(model, model_file.module, functions):
        what = f"{line}: {function}() changes {variable}, which forward reads, but stages have its value as a constant"
        remedy = "keep it in a buffer that forward changes"
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
        _check_constants(model_file, bundle)
        if (bundle.tied or plan.chunks > 1) and all(map(has, ("loss", "dataset", "optimizer"))):
            _check_repeated_calls(model_file, bundle)
    _prove_update(model_file, bundle, build)


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


def check_stage_files(
    plan: Plan, stages: Sequence[Sequence[str]], bundle: Bundle, folder: Path, traced: Traced
) -> None:
    """Check that `bundle` is what `generate` would write here for this plan and model; only then may we execute it.
    Raises StaleError.

    Args:
        stages: names of the operators of each stage.
        folder: the bundle's folder, for the error.
        traced: the model.
    """
    _, expected = _written(plan, stages, traced, bundle.proof)
    # An older bundle has fewer digests, and none of the next two; only a comparison tells the last ones.
    unknown: dict[str, Any] = {"digests": {}, "opaque_outputs": {}, "output_classes": {}}
    unknown |= {"read_back": (), "repeats_samples": True, "differs_for_one_sample": False}
    ours, theirs = (made.model_copy(update=unknown) for made in (expected, bundle))
    if ours.content_sha256 == theirs.content_sha256:
        return
    pairs = zip(bundle.stages, expected.stages, strict=False)
    files = [stage.file for stage, written in pairs if stage != written] or [Bundle.FILE]
    what = "differs from what codegen writes here for this plan and model"
    raise StaleError(folder / files[0], what, "run `pdtool codegen` again or, if you trust the file, use --trust")


def _written(
    plan: Plan, stages: Sequence[Sequence[str]], traced: Traced, proof: Literal["values", "shapes"]
) -> tuple[dict[str, str], Bundle]:
    """The stage files, file name -> text, and the bundle that describes them."""
    wiring = Wiring.of(traced, stages)
    wiring.check_outputs()
    writers = [StageWriter(wiring, s, plan.name) for s in range(len(stages))]
    texts = {f"stage_{writer.stage}.py": writer.text() for writer in writers}
    bundle = Bundle(
        name=plan.name,
        digests={**plan.digests, "plan": plan.plan_sha256},
        batch_size=plan.batch_size,
        proof=proof,
        inputs=tuple(wiring.names[op.outputs[0]] for op in traced.operators if op.is_input),
        arguments=traced.arguments,
        autocast_off=traced.autocast_off,
        stages=tuple(
            StageModule(
                file=file,
                class_name=writer.class_name,
                sha256=hashlib.sha256(texts[file].encode()).hexdigest(),
                inputs=tuple(wiring.names[v] for v in wiring.inputs(writer.stage)),
                outputs=tuple(wiring.names[v] for v in wiring.outputs(writer.stage)),
                parameters=tuple(wiring.parameters(writer.stage)),
                buffers=tuple(wiring.buffers(writer.stage)),
                opaque=tuple(writer.opaque),
            )
            for file, writer in zip(texts, writers, strict=True)
        ),
        tensors=tuple(wiring.tensors()),
        tied=tuple(wiring.tied),
        optional_gradients=wiring.has_optional_gradients,
        opaque_outputs=wiring.opaque_outputs(),
        output_classes=output_class_names(traced.output),
    )
    return texts, bundle.with_graph(graph_sha256(traced))


def _verify(traced: Traced, model_file: ModelFile, texts: dict[str, str], bundle: Bundle, several: bool) -> bool:
    """Compare stages and model to the extent of `bundle.proof`; return whether they differ for one sample.

    Args:
        several: whether a stage has several minibatches in flight.
    """
    if bundle.proof == "values":
        size = min(bundle.batch_size, VERIFIED_SAMPLES)
        try:
            return _verify_values(model_file, texts, bundle, size, several)
        except ModelFailedError:
            if size == bundle.batch_size:
                raise
            return _verify_values(model_file, texts, bundle, bundle.batch_size, several)
    inputs = model_file.example_inputs(bundle.batch_size)
    state, size = named_state(traced.model), bundle.batch_size
    output = traced.output_with(lambda leaf: leaf.meta(size) if isinstance(leaf, Value) else state[leaf.name], size)
    verify_shapes(texts, bundle, inputs, output)
    return False


def _verify_values(model_file: ModelFile, texts: dict[str, str], bundle: Bundle, size: int, several: bool) -> bool:
    """Compare values for minibatches of `size` samples and of one more, and of one as the last of an epoch may have."""
    sizes = (size, size, size + 1)
    batches = [model_file.example_inputs(samples) for samples in sizes]
    for samples, inputs in zip(sizes, batches, strict=True):
        shapes = [[*tensor.shape] for tensor in inputs.tensors]
        expected = [[*bundle.by_name[name].sizes(samples)] for name in bundle.inputs]
        if shapes != expected:
            given, traced = (", ".join(map(str, each)) for each in (shapes, expected))
            what = f"a minibatch of {samples} samples has inputs of shape {given}, not {traced} as in the trace"
            raise model_file.error(what, "pad to a fixed length: only the minibatch size may vary")
    after_forward = {name: model_file.function(name) for name in _AFTER_FORWARD if model_file.has(name)}
    one_sample = None
    with suppress(PdtoolError):  # example_inputs cannot give one sample
        one_sample = model_file.example_inputs(1)
    return verify_values(model_file.build, texts, bundle, batches, after_forward, one_sample, several_in_flight=several)


def _repeats_samples(model_file: ModelFile, count: int) -> bool:
    """Whether the first samples of the training set are the same when they are read again with the same seeds."""
    if not model_file.has("dataset"):
        return True
    with suppress(Exception):  # there may be no training set here, or tensors of a kind that cannot be compared
        first, again = (tensors_in(model_file.example_batch(count)) for _ in range(2))
        return has_same_content(first, again)
    return True


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


def _check_constants(model_file: ModelFile, bundle: Bundle) -> None:
    """Check that no function that training calls changes what forward reads besides parameters and buffers, such as
    `layer.p`, as far as that is not found by reading the file.

    Raises:
        ModelError: one does, but stages have a constant in its place.
    """
    model = model_file.build()  # the newest one, to which variables of model.py refer
    parts = {id(module) for module in model.modules()}
    of_model = any(_holds(value, parts) for value in vars(model_file.module).values())
    functions = [name for name in _CALLS if model_file.has(name) and (of_model or name == "after_update")]
    overridden = [m for m in model.modules() if "train" in vars(m) or type(m).train is not nn.Module.train]
    if not (functions or overridden):
        return
    inputs = model_file.example_inputs(min(bundle.batch_size, VERIFIED_SAMPLES))
    changing = ""
    with suppress(Exception):  # a trial that takes too long, or ends otherwise, tells nothing
        changing = tried(partial(_changing, model_file, model, inputs, functions), model.parameters())
    if changing == "train" and not overridden:  # the model computes something else each time
        return
    if changing:
        named = "loss() or metrics()" if changing == "loss" and model_file.has("metrics") else f"{changing}()"
        what = f"{named} changes a value that forward reads and that is neither a parameter nor a buffer, but "
        what, remedy = f"{what}stages keep it as a constant", "keep it in a buffer that forward changes"
        if changing in _CALLS:
            raise model_file.error_in(changing, what, remedy)
        raise model_file.error(what, remedy)


def _holds(value: Any, parts: set[int]) -> bool:
    """Whether a variable of the file is a part of the model, given by ids, or a container with one."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else [value]
    return any(id(each) in parts for each in held)


def _changing(model_file: ModelFile, model: nn.Module, inputs: ModelInputs, functions: Sequence[str]) -> str:
    """Return the first of these functions that changes the model's outputs, apart from parameters and buffers; `train`
    if putting the model into a mode does; "" if none does."""

    def outputs() -> Any:
        with state_kept(model):
            return outputs_in_both_modes(model, inputs)

    with suppress(ModelFailedError):  # such as a minibatch that is too small
        before = outputs()
        if not has_same_content(before, outputs()):
            return "train"
        for function in functions:
            with state_kept(model), suppress(Exception, SystemExit):  # the proof of the update, and others, tell
                _CALLS[function](model_file, model)
            if not has_same_content(before, outputs()):
                return function
    return ""


def _call_sampler(model_file: ModelFile, model: nn.Module) -> None:
    model_file.sampler(model_file.training_set(), 2)


def _call_loss(model_file: ModelFile, model: nn.Module) -> None:
    """Call metrics(), too."""
    for _ in range(2):
        _validate(model_file, model, VERIFIED_SAMPLES)


def _call_after_update(model_file: ModelFile, model: nn.Module) -> None:
    """Call it for the first updates, with copies of the parameters and gradients of zero."""
    parameters = _copied_parameters(model)
    for update in range(1, TRIED_UPDATES + 1):
        model_file.after_update(parameters, update)


def _call_optimizer(model_file: ModelFile, model: nn.Module, *, schedules: bool = False) -> None:
    """Call its step, and that of its schedule, with copies of the parameters and gradients of zero."""
    optimizer = model_file.optimizer(_copied_parameters(model))
    scheduler: Any = model_file.scheduler(optimizer, TRIED_UPDATES) if schedules else None
    for _ in range(2):
        optimizer.step()
        if scheduler:
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))


_CALLS: dict[str, Callable[[ModelFile, nn.Module], None]] = {
    "sampler": _call_sampler,
    "loss": _call_loss,
    "optimizer": _call_optimizer,
    "scheduler": partial(_call_optimizer, schedules=True),
    "after_update": _call_after_update,
}


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


def fits_in_memory(model: nn.Module) -> bool:
    """Whether this machine has the memory to compare the stages with a model."""
    needed = _COPIES * sum(p.nbytes for p in model.parameters())
    return needed < min((limit.free_bytes for limit in memory_limits()), default=math.inf)


def _check_target(folder: Path) -> None:
    """Check that only files of an older bundle would be replaced or removed; raises UsageError."""
    remedy = "pass another path with -o"
    if RunDir(folder).state_file.exists():
        raise UsageError(f"{folder} is the folder of a run", remedy)
    Bundle.check_target(folder / Bundle.FILE)
    found = next(folder.glob("stage_*.py"), None)
    if found and not (folder / Bundle.FILE).exists():
        raise UsageError(f"{found} was not written by `pdtool codegen` and would be replaced", remedy)


def _write(folder: Path, files: dict[str, str]) -> None:
    """Replace an older bundle by the files; remove stage files that no longer exist."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
        ) as draft:
            for name, text in files.items():
                write_atomically(Path(draft) / name, text)
            folder.mkdir(exist_ok=True)
            for path in folder.glob("stage_*.py"):
                if path.name not in files:
                    path.unlink()
            for name in sorted(files):  # bundle.yaml has the others' digests, so it reveals a half-replaced folder
                os.replace(Path(draft) / name, folder / name)
    except OSError as error:
        raise PdtoolError(f"{folder} could not be written ({error.strerror})", write_remedy(error)) from error
