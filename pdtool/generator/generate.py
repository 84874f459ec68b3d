"""Generate a bundle: trace the model, write its stages, check them against it, and only then keep the files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pdtool.artifacts.bundle import Bundle, StageModule
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import PdtoolError, StaleError, UsageError
from pdtool.files import file_sha256, write_atomically, write_remedy
from pdtool.frontend.graph_digest import check_profile, graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs, named_leaves, tensors_in
from pdtool.frontend.operators import Traced, Value, named_state
from pdtool.frontend.tracing import trace_file
from pdtool.generator.composed import ModelFailedError, fits_in_memory
from pdtool.generator.kept_state import has_same_content
from pdtool.generator.output_writer import output_class_names
from pdtool.generator.replicated_state import buffers_read_back, kept_by_loss
from pdtool.generator.stage_file import StageWriter
from pdtool.generator.user_functions import check_built_alone, check_user_functions, check_variables
from pdtool.generator.verify import VERIFIED_SAMPLES, verify_shapes, verify_values
from pdtool.generator.wiring import Wiring

_AFTER_FORWARD = ("loss", "metrics", "after_update", "scheduler")
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
    model_sha256 = file_sha256(model_file.path)  # before the checks, in case someone edits it meanwhile
    stages = plan.stage_nodes(profile)
    check_built_alone(model_file)
    progress("tracing the model")
    traced = trace_file(model_file, model_file.build(), plan.batch_size)
    check_profile(traced, profile, model_file.ref.source)
    check_variables(traced.model, model_file)
    progress("writing the stages")
    fits = fits_in_memory(traced.model)
    texts, bundle = _written(plan, stages, traced, "values" if fits else "shapes")
    several = any(stage.in_flight > 1 for stage in plan.stages)
    progress("comparing the stages with the model" if fits else "checking shapes (the model is too large to run here)")
    bundle = bundle.model_copy(update={"differs_for_one_sample": _verify(traced, model_file, texts, bundle, several)})
    found = {
        "read_back": buffers_read_back(plan, bundle, model_file),
        "kept_by_loss": kept_by_loss(plan, model_file),
        "repeats_samples": _repeats_samples(model_file, min(plan.batch_size, _REPEATED_SAMPLES)),
        "model_sha256": model_sha256,
    }
    bundle = bundle.model_copy(update=found)
    outputs = len([leaf for _, leaf in named_leaves(traced.output, "output") if isinstance(leaf, Value)])
    check_user_functions(model_file, plan, bundle, texts, lambda: traced.model, outputs)
    _write(folder, texts | {Bundle.FILE: bundle.dump()})
    return bundle


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
    unknown |= {
        "model_sha256": None,
        "read_back": (),
        "kept_by_loss": (),
        "repeats_samples": True,
        "differs_for_one_sample": False,
    }
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
        shapes = [[*tensor.shape] for tensor in ModelInputs.of(inputs).tensors]
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
