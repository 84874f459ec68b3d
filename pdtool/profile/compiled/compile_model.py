"""Put a model through torch.compile: in segments, whose times are measured, and as a whole, for the step they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pdtool.errors import describe_error
from pdtool.frontend.operators import Operator
from pdtool.profile.compiled.segment_module import segment_module
from pdtool.profile.compiled.segments import Seconds, cut_into_segments
from pdtool.profile.execute import OnProgress, ProfiledModel, Work

_MAX_SEGMENTS = 16  # each takes seconds to compile
_MIN_SEGMENT_S = {"cpu": 1e-2, "cuda": 1e-3}  # of a shorter one much is calling it, and copies at its borders
_MAX_REASON = 300  # characters, why something cannot be compiled
OnNote = Callable[[str], None]  # called with a line for the user
Segments = dict[str, list[Operator]]  # by name


@dataclass(frozen=True)
class CompiledModel:
    """A model that went through torch.compile.

    Attributes:
        model: the same, compiled as a whole, and with an operator in place of each segment that was compiled.
        segments: name of such an operator -> names of those in its place.
        is_whole: whether it could be compiled as a whole, too.
    """

    model: ProfiledModel
    segments: Mapping[str, Sequence[str]]
    is_whole: bool


def compile_model(model: ProfiledModel, seconds: Seconds, note: OnNote, progress: OnProgress) -> CompiledModel:
    """Compile a model, and run it once forward and backward, when torch.compile does its work.

    Operators of a segment that cannot be compiled are left to run one by one; `note` is told which, and why.

    Args:
        seconds: of each operator, forward and backward together.
        progress: called with (passes done, passes in all), of which each segment has two.

    Raises:
        ModelError: no segment can be compiled.
    """
    total_s = sum(seconds.get(op.name, 0.0) for op in model.computed)
    shortest_s = max(_MIN_SEGMENT_S[model.run.device.type], total_s / _MAX_SEGMENTS)
    cut = cut_into_segments(model.computed, model.outputs, seconds, shortest_s)
    segments = {_name(segment): segment for segment in cut}
    note(f"torch.compile takes the model in {len(segments)} segment(s), and as a whole: some seconds for each")
    compiled = _compiled_segments(model, segments, note, progress)
    in_segments = _with_operators(model, segments, compiled)
    module: Any = torch.compile(model.traced.model)
    whole = replace(in_segments, traced=replace(in_segments.traced, model=module))
    reason = _failure(whole.train_step)
    if reason:
        note(f"warning: torch.compile fails for the model as a whole, so that coverage is not known: {reason}")
    names = {name: [op.name for op in segments[name]] for name in compiled}
    return CompiledModel(in_segments if reason else whole, names, not reason)


def _name(segment: Sequence[Operator]) -> str:
    first, last = segment[0].name, segment[-1].name
    return first if first == last else f"{first} to {last}"


def _compiled_segments(
    model: ProfiledModel, segments: Segments, note: OnNote, progress: OnProgress
) -> dict[str, Operator]:
    """Return what each segment becomes that can be compiled."""
    compiled = {name: _compiled(model, name, segment) for name, segment in segments.items()}
    failures: dict[str, str] = {}
    while failure := _first_failure(_with_operators(model, segments, compiled), compiled, progress):
        del compiled[failure[0]]
        failures |= [failure]
    if not compiled:
        reason = next(iter(failures.values()), "there is nothing to compile")
        remedy = "leave --compile out; on a CPU torch.compile needs a C++ compiler, g++ or what $CXX names"
        raise model.model_file.error(f"torch.compile fails for all of the model: {reason}", remedy)
    for name, reason in failures.items():
        note(f"warning: torch.compile fails for {name}, whose operators are measured one by one: {reason}")
    return compiled


def _compiled(model: ProfiledModel, name: str, segment: Sequence[Operator]) -> Operator:
    """Return one operator in place of a segment, which torch.compile takes when it is first run."""
    made = {value for op in segment for value in op.outputs}
    inside = {op.name for op in segment}
    inputs = tuple(dict.fromkeys(value for op in segment for value in op.values if value not in made))
    taken = [value for op in model.computed if op.name not in inside for value in op.values] + model.outputs
    outputs = tuple(value for value in dict.fromkeys(taken) if value in made)
    return Operator(
        name=name,
        op="compiled",
        module="",
        target=torch.compile(segment_module(model.run, segment, inputs, outputs)),
        args=inputs,
        outputs=outputs,
        structure=list(range(len(outputs))),
        parameters=tuple(dict.fromkeys(parameter for op in segment for parameter in op.parameters)),
        opaque=any(op.opaque for op in segment),
    )


def _with_operators(model: ProfiledModel, segments: Segments, compiled: Mapping[str, Operator]) -> ProfiledModel:
    """Return the model with an operator in place of each compiled segment."""
    given = [op for op in model.traced.operators if op.is_input or op.constant]
    computed = [op for name, segment in segments.items() for op in ([compiled[name]] if name in compiled else segment)]
    return replace(model, traced=replace(model.traced, operators=(*given, *computed)))


def _first_failure(
    model: ProfiledModel, compiled: Mapping[str, Operator], progress: OnProgress
) -> tuple[str, str] | None:
    """Run a model forward and backward; return which of its compiled segments fails first, and why."""
    current, done = "", 0

    def run(name: str, work: Work) -> tuple[Any, None]:
        nonlocal current, done
        progress(done, 2 * len(model.computed) + 2)  # the loss has two, too
        current, done = name.removesuffix(" backward"), done + 1
        return work(), None

    reason = _failure(lambda: model.replay(run), lambda: current in compiled)
    return (current, reason) if reason else None


def _failure(work: Work, is_expected: Callable[[], bool] = lambda: True) -> str:
    """Do `work`; return why it failed, or nothing. Lack of memory, and what was not expected, are raised."""
    try:
        work()
    except Exception as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or not is_expected():
            raise
        reason = describe_error(error).partition("\n\nSet TORCHDYNAMO")[0]  # advice for developers of torch
        return " ".join(reason.split())[:_MAX_REASON]
    return ""
