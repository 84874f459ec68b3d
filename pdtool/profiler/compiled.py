"""Put a model through torch.compile: in segments, to measure their times, and as a whole, to measure the step.

Operators fused by torch.compile have no times of their own. So we measure the seconds of a segment, and divide them
among its operators in proportion to their times when they run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pdtool.frontend import compute_mode
from pdtool.frontend.operators import Operator, Value
from pdtool.profiler.execute import Executor, OnProgress, ProfiledModel, Work
from pdtool.units import counted

OnNote = Callable[[str], None]  # called with a line for the user
Seconds = Mapping[str, float]  # by name of an operator, or of a segment
Segments = dict[str, list[Operator]]  # by name
_MAX_SEGMENTS = 16  # each takes seconds to compile
_MIN_SEGMENT_S = {"cpu": 1e-2, "cuda": 1e-3}  # shorter ones spend much time on the call and copies at borders
_MAX_REASON = 300  # characters of the reason why something cannot be compiled


@dataclass(frozen=True)
class CompiledModel:
    """A model that went through torch.compile.

    Attributes:
        model: the model compiled as a whole, and with one operator for each compiled segment.
        segments: name of such an operator -> names of the segment's operators.
        is_whole: whether it could also be compiled as a whole.
    """

    model: ProfiledModel
    segments: Mapping[str, Sequence[str]]
    is_whole: bool


def compile_model(model: ProfiledModel, seconds: Seconds, note: OnNote, progress: OnProgress) -> CompiledModel:
    """Compile a model, and run it once forward and backward, which makes torch.compile do its work.

    If a segment cannot be compiled, its operators run one by one; `note` says which, and why.

    Args:
        seconds: forward and backward together, of each operator.
        progress: called with (passes done, passes in all); each segment has two passes.

    Raises:
        ModelError: no segment can be compiled.
    """
    total_s = sum(seconds.get(op.name, 0.0) for op in model.computed)
    shortest_s = max(_MIN_SEGMENT_S[model.run.device.type], total_s / _MAX_SEGMENTS)
    cut = cut_into_segments(model.computed, model.outputs, seconds, shortest_s)
    segments = {_name(segment): segment for segment in cut}
    note(f"compiling {counted(len(segments), 'segment')} and then the whole model, which takes some seconds for each")
    compiled = _compiled_segments(model, segments, note, progress)
    in_segments = _with_operators(model, segments, compiled)
    module: Any = compute_mode.compiled(model.traced.model)
    whole = replace(in_segments, traced=replace(in_segments.traced, model=module))
    if reason := _failure(whole.train_step):
        note(f"warning: torch.compile fails for the model as a whole, so coverage is unknown: {reason}")
    names = {name: [op.name for op in segments[name]] for name in compiled}
    return CompiledModel(in_segments if reason else whole, names, not reason)


def _name(segment: Sequence[Operator]) -> str:
    first, last = segment[0].name, segment[-1].name
    return first if first == last else f"{first} to {last}"


def _compiled_segments(
    model: ProfiledModel, segments: Segments, note: OnNote, progress: OnProgress
) -> dict[str, Operator]:
    """Return the compiled operator of each segment that can be compiled."""
    compiled = {name: _compiled(model, name, segment) for name, segment in segments.items()}
    failures: dict[str, str] = {}
    while failure := _first_failure(_with_operators(model, segments, compiled), compiled, progress):
        del compiled[failure[0]]
        failures |= [failure]
    if not compiled:
        reason = next(iter(failures.values()), "there is nothing to compile")
        remedy = "leave --compile out; on a CPU torch.compile needs a C++ compiler (g++ or $CXX)"
        raise model.model_file.error(f"torch.compile fails for every part of the model: {reason}", remedy)
    for name, reason in failures.items():
        note(f"warning: torch.compile fails for {name}, whose operators are measured one by one: {reason}")
    return compiled


def _compiled(model: ProfiledModel, name: str, segment: Sequence[Operator]) -> Operator:
    """Return one operator for a segment; torch.compile compiles it at its first run."""
    made = {value for op in segment for value in op.outputs}
    inside = {op.name for op in segment}
    inputs = tuple(dict.fromkeys(value for op in segment for value in op.values if value not in made))
    taken = [value for op in model.computed if op.name not in inside for value in op.values] + model.outputs
    outputs = tuple(value for value in dict.fromkeys(taken) if value in made)
    return Operator(
        name=name,
        op="compiled",
        module="",
        target=compute_mode.compiled(segment_module(model.run, segment, inputs, outputs)),
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
    """Do `work`; return why it failed, or nothing. Out-of-memory and unexpected errors are raised."""
    try:
        work()
    except Exception as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or not is_expected():
            raise
        return compute_mode.compiler_reason(error)[:_MAX_REASON]
    return ""


def cut_into_segments(
    operators: Sequence[Operator], outputs: Sequence[Value], seconds: Seconds, shortest_s: float
) -> list[list[Operator]]:
    """Cut operators into contiguous segments of `shortest_s` to four times that, or of one longer operator.

    Among the allowed borders, take one that the fewest tensors cross. Ties: prefer one between modules to one inside a
    module, and one before a long operator to one before a short one, which is likelier to be fused with its
    predecessor.

    Args:
        operators: in topological order.
        outputs: the tensors that the model returns.
        seconds: seconds of each operator; a missing one takes none.
    """
    crossing = _crossing_tensors(operators, outputs)

    def cost(border: int) -> tuple[int, int, float]:
        before, after = operators[border - 1], operators[border]
        return crossing[border], _common_depth(before.module, after.module), -seconds.get(after.name, 0.0)

    elapsed_s = [0.0, *accumulate(seconds.get(op.name, 0.0) for op in operators)]
    borders = [0]
    while candidates := list(_candidates(elapsed_s, borders[-1], shortest_s)):
        borders.append(min(candidates, key=cost))
    return [list(operators[start:end]) for start, end in pairwise([*borders, len(operators)])]


def _candidates(elapsed_s: Sequence[float], start: int, shortest_s: float) -> Iterator[int]:
    """Yield where the segment from `start` may end so that enough is left for another one."""
    last_s = elapsed_s[-1] - shortest_s
    ends = [i for i in range(start + 1, len(elapsed_s) - 1) if elapsed_s[start] + shortest_s <= elapsed_s[i] <= last_s]
    yield from ends[:1]
    yield from (end for end in ends[1:] if elapsed_s[end] <= elapsed_s[start] + 4 * shortest_s)


def _common_depth(path: str, other: str) -> int:
    """Count the modules around both of two modules: 2 for `layer.0.conv` and `layer.0.norm`."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _crossing_tensors(operators: Sequence[Operator], outputs: Sequence[Value]) -> list[int]:
    """Count for each position in `operators` the tensors that are made before it and used at it or later."""
    last_use = {value: index for index, op in enumerate(operators) for value in op.values}
    last_use.update(dict.fromkeys(outputs, len(operators)))
    changes = [0] * (len(operators) + 2)
    for index, op in enumerate(operators):
        for value in op.outputs:
            if value in last_use:
                changes[index + 1] += 1
                changes[last_use[value] + 1] -= 1
    return list(accumulate(changes))


def apportion(measured: Seconds, segments: Mapping[str, Sequence[str]], one_by_one: Seconds) -> dict[str, float]:
    """Give each operator of a segment its share of the segment's measured seconds.

    The shares of a segment's operators add up to its seconds. Other operators keep their own measured times.

    Args:
        measured: seconds of segments, and of operators outside segments.
        segments: name of a segment -> its operators.
        one_by_one: seconds of the operators when each runs alone, to which the shares are proportional.
    """
    shares: dict[str, float] = {}
    for name, seconds in measured.items():
        operators = segments.get(name, (name,))
        alone_s = [one_by_one.get(op, 0.0) for op in operators]
        if not any(alone_s):
            alone_s = [1.0] * len(operators)  # equal shares
        total_s = sum(alone_s)
        shares |= {op: seconds * s / total_s for op, s in zip(operators, alone_s, strict=True)}
    return shares


def segment_module(
    run: Executor, operators: Sequence[Operator], inputs: Sequence[Value], outputs: Sequence[Value]
) -> fx.GraphModule:
    """Return a module that takes `inputs`, runs the operators as `run` does, and returns a tuple of `outputs`.

    It shares parameters, buffers and modules with the model.
    """
    writer = _GraphWriter(run)
    for value in inputs:
        writer.nodes[value] = writer.graph.placeholder(f"input_{len(writer.nodes)}")
    for op in operators:
        writer.add(op)
    writer.graph.output(tuple(writer.nodes[value] for value in outputs))
    return fx.GraphModule(writer.attributes, writer.graph)


class _FunctionCall(nn.Module):
    """Calls a function that a graph cannot name, such as the `apply` of a user's autograd.Function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@dataclass
class _GraphWriter:
    """Appends operators to a graph.

    Attributes:
        attributes: tensors and modules that the graph takes from its module, by name.
        nodes: the node that computes each tensor.
    """

    run: Executor
    graph: fx.Graph = field(default_factory=fx.Graph)
    attributes: dict[str, Any] = field(default_factory=dict)
    nodes: dict[Value, fx.Node] = field(default_factory=dict)

    def add(self, op: Operator) -> None:
        """Append an operator whose inputs exist already."""
        if op.branch:
            for part in op.branch.training:
                self.add(part)
            for (value, _), output in zip(op.branch.results, op.outputs, strict=True):
                self.nodes[output] = self.nodes[value] if value else self._zeros(output)
            return
        result = self._call(op)
        for path, index in pytree.tree_flatten_with_path(op.structure)[0]:
            if index is not None:
                self.nodes[op.outputs[index]] = pytree.key_get(fx.Proxy(result), path).node

    def _call(self, op: Operator) -> fx.Node:
        args, kwargs = pytree.tree_map_only(Tensor, self._tensor, self.run.arguments(op, self.nodes))
        if op.target:
            return self.graph.call_function(op.target, args, kwargs)
        callee = self.run.callee(op)
        module = callee if isinstance(callee, nn.Module) else _FunctionCall(callee)
        return self.graph.call_module(self._attribute("module", module), args, kwargs)

    def _zeros(self, output: Value) -> fx.Node:
        """Return a stand-in for an output that only evaluation computes."""
        meta = output.meta(self.run.batch)
        options: dict[str, Any] = {"dtype": meta.dtype, "device": self.run.device}
        return self.graph.call_function(torch.zeros, (tuple(meta.shape),), options)

    def _tensor(self, tensor: Tensor) -> fx.Node:
        return self.graph.get_attr(self._attribute("tensor", tensor))

    def _attribute(self, kind: str, value: Tensor | nn.Module) -> str:
        name = f"{kind}_{len(self.attributes)}"
        self.attributes[name] = value
        return name
