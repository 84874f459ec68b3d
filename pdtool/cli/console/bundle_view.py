"""Bundles: the stage files and the tensors between them."""

from __future__ import annotations

from collections.abc import Iterator

from pdtool.artifacts.bundle import Bundle
from pdtool.cli.console.table import Lines, table


def bundle_view(bundle: Bundle) -> Lines:
    """List the stage files, the tensors between them, and tied parameters."""
    rows = []
    for stage in bundle.stages:
        takes, returns = ", ".join(stage.inputs), ", ".join(stage.outputs) or "the model's output"
        rows.append([stage.file, takes, returns, len(stage.parameters), len(stage.buffers)])
    title = f"{bundle.name}: minibatch of {bundle.batch_size}, proved by {bundle.proof}"
    yield table(
        ("file", "takes", "returns", "parameters", "buffers"),
        rows,
        names=3,
        title=title,
        drop=("buffers", "parameters"),
    )
    tensors = []
    for tensor in bundle.tensors:
        producer = "data" if tensor.producer < 0 else f"stage {tensor.producer}"
        consumers, shape = ", ".join(f"stage {s}" for s in tensor.consumers), "×".join(map(str, tensor.shape))
        tensors.append([tensor.name, producer, consumers, shape, tensor.dtype, "yes" if tensor.gradient else "no"])
    yield table(
        ("tensor", "from", "to", "shape", "dtype", "gradient back"), tensors, names=6, drop=("dtype", "gradient back")
    )
    yield from tied_lines(bundle)


def tied_lines(bundle: Bundle) -> Iterator[str]:
    """Tell which parameters several stages hold."""
    for tied in bundle.tied:
        places = (f"{name} (stage {s})" for s, name in zip(tied.stages, tied.names, strict=True))
        yield f"tied: {', '.join(places)} are one parameter; their gradients are summed before each update"
