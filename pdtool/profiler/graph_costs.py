"""The costs of the nodes of a model's graph, and the Profile made from them, with measured or estimated times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pdtool.artifacts.artifact import fields_checked
from pdtool.artifacts.device import Device
from pdtool.artifacts.profile import Node, Profile, SharedParameter
from pdtool.errors import PdtoolError, describe_error
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import tensors_in, tensors_of
from pdtool.frontend.model_rules import autograd_graph, check_loss_parameters, graph_leaves, unknown_module_remedy
from pdtool.frontend.operators import Traced, Value, storage_address, unique_name
from pdtool.profiler.execute import ProfiledModel
from pdtool.profiler.kernels import FLOP_FORMULAS

_AT = ", in "  # begins the note of which operator failed
_MAX_REASON = 300  # characters of the reason why a module is opaque
Seconds = Mapping[str, float]  # by node
_T = TypeVar("_T")
Counts = Mapping[str, int]  # by node


@dataclass(frozen=True, kw_only=True)
class GraphCosts:
    """The costs of a graph's nodes for one minibatch, by name; a missing node costs nothing.

    Attributes:
        forward_s, backward_s: seconds of each node.
        stash_bytes: bytes kept for its backward.
        saved_by: the node at which its output counts as stash.
        flops: flops of its forward.
        scratch_bytes: if they were measured; see artifacts.profile.Node.
        update_s: seconds of one optimizer step over all parameters.
        optimizer_state_bytes: for each byte of parameters.
        step_s: seconds of a whole step without the update; 0 if not measured.
    """

    forward_s: Seconds
    backward_s: Seconds
    stash_bytes: Counts
    saved_by: Mapping[str, str]
    flops: Counts
    scratch_bytes: Counts = field(default_factory=dict)
    update_s: float
    optimizer_state_bytes: float
    step_s: float = 0.0


def count_stash_and_flops(model: ProfiledModel) -> tuple[dict[str, int], dict[str, str], dict[str, int]]:
    """Count stash bytes and flops of each node in one forward of the whole graph with autograd.

    A storage that several operators save is counted once, at the first; parameters are not counted.

    Returns:
        Stash bytes, the node at which an output counts as stash (see artifacts.profile.Node), and flops, by node.
    """
    seen = set(map(storage_address, model.run.state.values()))
    saved: list[Tensor] = []
    stash_bytes: dict[str, int] = {}
    saved_by: dict[str, str] = {}
    flops: dict[str, int] = {}
    producers: dict[int, str] = {}  # of a storage that is the only output of a node
    node = ""

    def count(tensor: Tensor) -> Tensor:
        address = storage_address(tensor)
        if address not in seen:
            seen.add(address)
            saved.append(tensor)  # so that no other storage gets its address
            stash_bytes[node] = stash_bytes.get(node, 0) + tensor.untyped_storage().nbytes()
            if address in producers:
                saved_by[producers[address]] = node
        return tensor

    counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)

    def counted(work: Callable[[], _T]) -> _T:
        try:
            with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), counter:
                result = work()
            flops[node] = counter.get_total_flops()
        except Exception:  # perhaps torch allows no hooks there: in torch.func, or in autograd.grad of a leaf
            result = work()
            for tensor in _saved_tensors(tensors_in(result)):
                count(tensor)
        return result

    environment = model.environment()
    for op in model.traced.operators:
        if op.constant:
            continue
        if not op.is_input:
            node = op.name
            try:
                environment.update(zip(op.outputs, counted(partial(model.run, op, environment)), strict=True))
            except Exception as error:
                error.add_note(f"{_AT}{op.name} at {op.location},")
                raise
        if len(op.outputs) == 1:
            output = environment[op.outputs[0]]
            if output.untyped_storage().nbytes() == output.nbytes:
                producers[storage_address(output)] = op.name
    if model.with_loss:
        node = "loss"
        output = model.output(environment)
        known = [leaf for tensor in tensors_of(output) for leaf in graph_leaves(tensor)]
        check_loss_parameters(counted(partial(model.loss, output)), (*known, *model.run.state.values()))
    return stash_bytes, saved_by, flops


def _saved_tensors(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that the autograd graph of some outputs has saved, also those of earlier operators."""
    for node in autograd_graph(output.grad_fn for output in outputs if output.grad_fn):
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                with suppress(RuntimeError):  # they are freed
                    yield from tensors_in(getattr(node, name))


def make_profile(model: ProfiledModel, device: Device, costs: GraphCosts, **measured: Any) -> Profile:
    """Make the profile of a model with these costs on `device`.

    Args:
        measured: other fields of the profile.

    Raises:
        ModelError: HINTS names an unknown module, or a figure is too large for a profile.
    """
    remedy = "choose a smaller --batch-size, a faster --device, or another name for the file"
    with fields_checked(lambda fault: model.model_file.error(f"its profile cannot be written: {fault}", remedy)):
        nodes = tuple(_nodes(model, costs))
        spent_s = sum(n.forward_s + n.backward_s + n.update_s for n in nodes)
        step_s = costs.step_s + costs.update_s if costs.step_s else 0.0
        profile = Profile(
            name=model.model_file.name,
            model=model.model_file.ref,
            digests={model.model_file.ref.source: model.model_file.sha256},
            batch_size=model.batch,
            device=device,
            step_s=step_s,
            coverage=spent_s / step_s if step_s else 0.0,
            optimizer_state_bytes=costs.optimizer_state_bytes,
            nodes=nodes,
            shared=tuple(_shared_parameters(model, nodes)),
            opaque={path: " ".join(why.split())[:_MAX_REASON] for path, why in model.traced.opaque.items()},
            **measured,
        )
        return profile.model_copy(update=constraints(model.model_file, model.traced, profile))


def _nodes(model: ProfiledModel, costs: GraphCosts) -> Iterator[Node]:
    """Yield the nodes in topological order; divide the optimizer step by bytes of trained parameters."""
    used = {v for op in model.traced.operators for v in op.values} | set(model.outputs)
    trained = {name for name in model.traced.tied.values() if model.traced.model.get_parameter(name).requires_grad}
    all_bytes = max(1, sum(model.run.state[name].nbytes for name in trained))
    charged: set[str] = set()  # parameters whose update already belongs to a node
    for op in model.traced.operators:
        if op.constant:
            continue
        names = {model.traced.tied[name] for name in op.parameters}
        share = sum(model.run.state[name].nbytes for name in names & trained - charged) / all_bytes
        charged |= names
        outputs = [v for v in op.outputs if v in used]
        exact = [v for v in outputs if v.dtype != torch.float32]
        yield Node(
            name=op.name,
            op=op.op,
            module=op.module,
            inputs=model.traced.sources(op.values),
            update_s=costs.update_s * share,
            output_bytes=_bytes(model, outputs),
            gradient_bytes=_bytes(model, [v for v in outputs if v in model.traced.with_gradient]),
            exact_bytes=_bytes(model, exact),
            exact_gradient_bytes=_bytes(model, [v for v in exact if v in model.traced.with_gradient]),
            parameter_bytes=sum(model.run.state[name].nbytes for name in names & trained),
            frozen_bytes=sum(model.run.state[name].nbytes for name in names - trained),
            flops=costs.flops.get(op.name, 0),
            saved_by=costs.saved_by.get(op.name),
            **_times_and_memory(costs, op.name),
        )
    if model.with_loss:
        target_bytes = sum(t.nbytes for t in tensors_in(model.target))
        taken = {*model.traced.by_name, *dict(model.traced.model.named_modules())}
        target, loss = (unique_name(name, taken) for name in ("target", "loss"))
        yield Node(name=target, op="input", module="", output_bytes=target_bytes)
        sources = (*model.traced.sources(model.outputs), target)
        returned = _returned_parameters(model)
        share = sum(model.run.state[name].nbytes for name in returned - charged) / all_bytes
        yield Node(
            name=loss,
            op="loss",
            module="",
            inputs=sources,
            update_s=costs.update_s * share,
            parameter_bytes=sum(model.run.state[name].nbytes for name in returned),
            **_times_and_memory(costs, "loss"),
        )


def _returned_parameters(model: ProfiledModel) -> set[str]:
    """The trained parameters that the model returns, which the last stage holds, too."""
    tied = model.traced.tied
    names = {tied[name] for name in model.traced.output_state if name in tied}
    return {name for name in names if model.traced.model.get_parameter(name).requires_grad}


def _bytes(model: ProfiledModel, values: Iterable[Value]) -> int:
    return sum(value.meta(model.batch).nbytes for value in values)


def _times_and_memory(costs: GraphCosts, node: str) -> dict[str, Any]:
    return {
        name: getattr(costs, name).get(node, 0) for name in ("forward_s", "backward_s", "stash_bytes", "scratch_bytes")
    }


def _shared_parameters(model: ProfiledModel, nodes: Sequence[Node]) -> Iterator[SharedParameter]:
    returned, losses = _returned_parameters(model), [node.name for node in nodes if node.op == "loss"]
    for first in dict.fromkeys(model.traced.tied.values()):
        users = [op.name for op in model.computed if any(model.traced.tied[n] == first for n in op.parameters)]
        users += losses if first in returned else []
        if len(users) > 1 and model.traced.model.get_parameter(first).requires_grad:
            yield SharedParameter(name=first, bytes=model.run.state[first].nbytes, nodes=tuple(users))


def constraints(file: ModelFile, traced: Traced, profile: Profile) -> dict[str, Any]:
    """Return `together` and `pin` of a profile: from the trace, for nodes that belong to their user, and from HINTS.

    Raises:
        ModelError: HINTS names a module that the model does not have or compute.
    """

    def nodes_of(path: str) -> tuple[str, ...]:
        names = profile.graph.expand([path])
        if names == [path] and path not in profile.by_name:
            modules = dict(traced.model.named_modules())
            if path and path in modules:
                raise file.error(f"HINTS names {path!r}, but forward computes nothing in it", "leave it out")
            remedy = unknown_module_remedy(path, modules)
            raise file.error(f"HINTS names {path!r}, but the model has no such module", remedy)
        return tuple(names)

    together = [*traced.together, *_made_of_parameters(profile), *map(nodes_of, file.hints.no_split)]
    pin = {name: stage for path, stage in file.hints.pin.items() for name in nodes_of(path)}
    return {"together": tuple(group for group in together if len(group) > 1), "pin": pin}


def _made_of_parameters(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Yield (node, user) for each node that depends only on parameters, such as dropped weights, and has one user.

    Without inputs it could be in the first stage, which would then send its value with each minibatch.
    """
    from_parameters: set[str] = set()
    for node in profile.nodes:
        if node.op != "input" and from_parameters.issuperset(node.inputs):
            from_parameters.add(node.name)
    users_of = profile.graph.consumers.items()
    yield from ((name, *users) for name, users in users_of if name in from_parameters and len(users) == 1)


@contextmanager
def minibatch_errors(model_file: ModelFile, batch_size: int) -> Iterator[None]:
    """Say what to do if a minibatch does not fit, is too small to normalise over, or has no kernel on this CPU."""
    try:
        yield
    except PdtoolError:
        raise
    except Exception as error:
        text = describe_error(error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in text:
            what = f"a minibatch of {batch_size} does not fit in memory"
            remedy = "choose a smaller --batch-size"
        elif "could not create a primitive" in text:  # of oneDNN
            what = "torch has no kernel for a minibatch in this precision on this CPU"
            remedy = "leave out --precision bf16, or set torch.backends.mkldnn.enabled = False in the file"
        elif "modified by an inplace operation" in text:
            what = "the backward of a minibatch needs a value that was changed in place"
            remedy = "if forward reads a buffer and assigns it later, read a copy of it, as in self.scale.clone()"
        elif "more than 1 value per channel" in text:
            what = f"a minibatch of {batch_size} is too small for batch normalisation"
            remedy = "choose a larger --batch-size"
        else:
            where = next((note for note in getattr(error, "__notes__", []) if note.startswith(_AT)), "")
            raise model_file.error_at(error, f"a minibatch{where}") from error
        raise model_file.error(f"{what} ({error})", remedy) from error
