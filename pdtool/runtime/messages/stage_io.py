"""The inputs, outputs and gradients of one stage, as messages to and from other stages.

                          forward                                    backward
    receive_inputs   ◀─── tensors of stages before    receive_gradients ◀─── gradients of stages after
    send_outputs     ───▶ tensors to stages after     send_gradients    ───▶ gradients to stages before

Receives are posted a few minibatches before they are needed, so that messages travel while the stage computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import PdtoolError
from pdtool.runtime.loading.minibatch_source import MinibatchSource
from pdtool.runtime.loading.minibatches import DataPass
from pdtool.runtime.messages.open_channels import Channels
from pdtool.runtime.messages.pinned import DeviceUpload
from pdtool.runtime.messages.routes import Direction, Edge, Receiver, Route, Sender, target_name
from pdtool.runtime.meter import WorkerMeter


@dataclass
class _Traffic:
    """The messages of one stage in one direction.

    Attributes:
        posting: those receivers that post a receive for each message.
        unposted: minibatches to receive in this phase whose receives are not yet posted, in order.
        posted: minibatches whose receives are posted.
    """

    receivers: list[tuple[Route, Receiver]]
    posting: list[tuple[Route, Receiver]]
    senders: list[tuple[Route, Sender]]
    unposted: Iterator[int] = field(default_factory=lambda: iter(()))
    posted: deque[int] = field(default_factory=deque)


class StageIO:
    """Inputs, target, outputs and gradients of one stage on this worker, by minibatch.

    Args:
        channels: this worker's channels.
        prefetch: how many minibatches ahead receives are posted.
    """

    def __init__(
        self, bundle: Bundle, stage: int, channels: Channels, *, prefetch: int, device: torch.device, meter: WorkerMeter
    ) -> None:
        self._module, self._model_inputs, self._tensors = bundle.stages[stage], bundle.inputs, bundle.by_name
        self._is_last = stage == len(bundle.stages) - 1
        self._prefetch, self._device, self._meter = prefetch, device, meter
        self._forward = _traffic(stage, "forward", channels)
        self._backward = _traffic(stage, "backward", channels)
        self._source: MinibatchSource | None = None
        self._unloaded: Sequence[int] = ()
        self._loaded: dict[str, Tensor] = {}
        self._upload = DeviceUpload(device) if device.type == "cuda" else None

    def begin_phase(
        self, data: DataPass, source: MinibatchSource | None, forwards: Sequence[int], backwards: Sequence[int]
    ) -> None:
        """Begin a phase: an epoch of training, or a validation.

        Args:
            source: loads the minibatches; None unless this is the first stage.
            forwards, backwards: minibatches whose inputs and whose gradients are received, in order; for a long epoch
                ranges, which take no memory.
        """
        self._data, self._source = data, source
        assert not self._unloaded, f"minibatches {list(self._unloaded)} were to be loaded and never asked for"
        if source:
            source.begin_pass(data, forwards)
            self._unloaded = forwards
        self._are_outputs_checked = self._is_last  # the stage returns the model's own output
        for traffic, minibatches in ((self._forward, forwards), (self._backward, backwards)):
            if traffic.receivers:
                traffic.unposted = iter(minibatches)
                for _ in range(self._prefetch):
                    self._post_next_receive(traffic)

    def end_phase(self) -> None:
        """Wait until every send has completed: received, or stored in shared memory; raises PeerError."""
        for traffic in (self._forward, self._backward):
            assert not traffic.posted, f"minibatches {list(traffic.posted)} were posted and never received"
            with self._meter.waiting:
                for _, sender in traffic.senders:
                    sender.flush()

    def receive_inputs(self, minibatch: int) -> tuple[list[Tensor], Any]:
        """Receive the inputs of the stage's module, or load them at the first stage; at the last one also the target.
        Raises PeerError.

        Returns:
            The module's inputs, [samples, ...] each, in training with requires_grad if the stage before needs a
            gradient; and at the last stage the target in the form for the user's loss, else None.
        """
        received, is_training = self._receive(self._forward, minibatch), self._data.split_name == "train"
        by_name = {edge.name: tensor.requires_grad_(is_training and edge.tensor.gradient) for edge, tensor in received}
        if self._source:
            if not self._loaded:
                self._load(self._source, minibatch)
            by_name |= self._loaded | (self._upload.finish() if self._upload else {})
        target = None
        if self._is_last:
            split = self._data.split
            target = split.unflatten([by_name[target_name(i)].to(self._device) for i in range(len(split.leaves))])
        return [by_name[name].to(self._device) for name in self._module.inputs], target

    def send_outputs(self, minibatch: int, outputs: Sequence[Tensor]) -> None:
        """Send each output, and at the first stage the data that later stages need, directly to its consumers.

        Args:
            outputs: outputs of the stage, [samples, ...] each; the last stage sends none.

        Raises:
            PdtoolError: the outputs of the first minibatch of the phase differ from the bundle's description.
        """
        if not self._are_outputs_checked:
            self._check_outputs(outputs, self._data.minibatches.samples(minibatch))
        by_name = {} if self._is_last else dict(zip(self._module.outputs, outputs, strict=True))
        by_name |= self._loaded
        self._send(self._forward, minibatch, by_name)
        self._loaded = {}
        if self._source and self._upload and self._unloaded:
            self._load(self._source, self._unloaded[0])  # copied to the device while it computes

    def receive_gradients(self, minibatch: int) -> list[Tensor | None]:
        """Wait for the gradients of the outputs.

        Returns:
            For each output the sum of its consumers' gradients, of the output's shape; None for an output without
            gradient, and for the loss.
        """
        if self._is_last:
            return [None]
        total: dict[str, Tensor] = {}
        for edge, gradient in self._receive(self._backward, minibatch):
            total[edge.name] = total[edge.name] + gradient if edge.name in total else gradient
        return [total.get(name) for name in self._module.outputs]

    def send_gradients(self, minibatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Send each input's gradient to the stage that made the input; zeros if there is none.

        Args:
            gradients: gradients of the stage's inputs, of their shapes.
        """
        self._send(self._backward, minibatch, dict(zip(self._module.inputs, gradients, strict=True)))

    def _check_outputs(self, outputs: Sequence[Any], samples: int) -> None:
        """Check that a stage file, which may be edited by hand, returns the tensors that later stages expect."""
        names = self._module.outputs
        if len(outputs) != len(names):
            raise self._does_not_fit(f"{len(outputs)} tensors", f"{len(names)}")
        for name, output in zip(names, outputs, strict=True):
            tensor = self._tensors[name]
            shape, is_tensor = tensor.sizes(samples), isinstance(output, Tensor)
            if not is_tensor or tuple(output.shape) != shape:
                returned = f"of shape {list(output.shape)}" if is_tensor else f"that is {type(output).__name__}"
                expected = f"a tensor of shape {list(shape)} for {samples} samples"
                raise self._does_not_fit(f"an output {name!r} {returned}", expected)
        self._are_outputs_checked = True

    def _does_not_fit(self, returned: str, expected: str) -> PdtoolError:
        what = f"{self._module.file} returns {returned}, but bundle.yaml says {expected}"
        return PdtoolError(what, "fix it, or write it again with `pdtool codegen`")

    def _load(self, source: MinibatchSource, minibatch: int) -> None:
        """Load the next minibatch, and start copying this stage's part of it to a GPU."""
        next_one, self._unloaded = self._unloaded[0], self._unloaded[1:]
        assert next_one == minibatch, f"minibatch {minibatch} was asked for, but {next_one} comes next"
        with self._meter.loading:
            inputs, target = source.load(minibatch)
        targets = {target_name(i): leaf for i, leaf in enumerate(target)}
        self._loaded = dict(zip(self._model_inputs, inputs, strict=True)) | targets
        if self._upload:
            taken = set(self._module.inputs) | (targets.keys() if self._is_last else set())
            self._upload.start({name: tensor for name, tensor in self._loaded.items() if name in taken})

    def _receive(self, traffic: _Traffic, minibatch: int) -> list[tuple[Edge, Tensor]]:
        """The received tensor of each incoming edge."""
        if not traffic.receivers:
            return []
        oldest, samples = traffic.posted.popleft(), self._data.minibatches.samples(minibatch)
        assert oldest == minibatch, f"minibatch {minibatch} was asked for, but {oldest} was posted first"
        messages = []
        for route, receiver in traffic.receivers:
            if route.has(minibatch):
                start_s = perf_counter()
                with nullcontext() if route.is_local else self._meter.waiting_for(route.sender):
                    parts = receiver.receive(minibatch, samples)
                if not route.is_local:
                    self._meter.message_received(route.consumer, minibatch, start_s, parts)
                messages.append((route, parts))
        self._post_next_receive(traffic)
        return [
            (edge, tensor)
            for route, parts in messages
            for edge, tensor in zip(route.edges, route.unpack(parts), strict=True)
            if tensor is not None
        ]

    def _send(self, traffic: _Traffic, minibatch: int, by_name: Mapping[str, Tensor | None]) -> None:
        """Start sending the tensor of each outgoing edge; do not modify it until the send completes."""
        samples = self._data.minibatches.samples(minibatch)
        for route, sender in traffic.senders:
            if route.has(minibatch):
                start_s = perf_counter()
                parts = route.pack(by_name, samples, self._device)
                sent_bytes = sender.send(minibatch, parts)
                if not route.is_local:
                    self._meter.message_sent(route.consumer, minibatch, start_s, sent_bytes)

    def _post_next_receive(self, traffic: _Traffic) -> None:
        for minibatch in islice(traffic.unposted, 1):
            for route, receiver in traffic.posting:
                if route.has(minibatch):
                    receiver.expect(minibatch, self._data.minibatches.samples(minibatch))
            traffic.posted.append(minibatch)


def _traffic(stage: int, direction: Direction, channels: Channels) -> _Traffic:
    """The stage's ends of channels; messages of several stages are received, and summed, in their order."""
    receivers = [(r, end) for r, end in channels.receivers if (r.direction, r.destination) == (direction, stage)]
    senders = [(r, end) for r, end in channels.senders if (r.direction, r.source) == (direction, stage)]
    receivers.sort(key=lambda channel: channel[0].source)
    posting = [(route, end) for route, end in receivers if type(end).expect is not Receiver.expect]
    return _Traffic(receivers, posting, senders)
