"""The artifact Bundle: the stage modules that codegen wrote, and the tensors between them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, StringConstraints, model_serializer

from pdtool.artifacts.artifact import FrozenModel, YamlArtifact
from pdtool.artifacts.fields import Count, Digest, Identifier, Label, ModulePath, Name, Number, Title
from pdtool.errors import FieldError, StaleError
from pdtool.files import file_sha256, read_text, write_atomically

# A dimension: a number, or one that grows with the minibatch: `batch`, `49*batch`, `batch+1`.
Dim = (
    Annotated[int, Field(ge=0, le=10**12)]
    | Annotated[str, StringConstraints(pattern=r"^([0-9]{1,9}\*)?batch([+-][0-9]{1,9})?$")]
)
DType = Annotated[str, StringConstraints(pattern=r"^(b?float(16|32|64)|complex(64|128)|u?int(8|16|32|64)|bool)$")]


class TensorSpec(FrozenModel):
    """A tensor that crosses a stage border, or goes into or out of the pipeline.

    Attributes:
        name: the variable's name in the stage files.
        producer: index of the stage that computes it; -1: it is an input of the model, loaded by stage 0's workers.
        consumers: indices of the stages that take it, in order.
        shape: dimensions; those that depend on the minibatch's size are written with `batch`.
        dtype: `float32`, `int64`, ...
        gradient: whether each consumer sends a gradient of the same shape and dtype back to the producer.
        detached: whether none does because later stages detach it. The file has it only if it is true.
    """

    name: Identifier
    producer: Annotated[int, Field(ge=-1)]
    consumers: tuple[Number, ...]
    shape: tuple[Dim, ...]
    dtype: DType
    gradient: bool
    detached: bool = False

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value or name != "detached"}

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the shape for a minibatch of `batch` samples."""
        return tuple(_size(dim, batch) for dim in self.shape)


class StageModule(FrozenModel):
    """One stage file.

    Attributes:
        file: `stage_0.py`, beside bundle.yaml.
        class_name: the nn.Module in it.
        inputs: tensors its forward takes, in order of the arguments.
        outputs: tensors its forward returns, in order: one alone, several as a tuple. Empty for the last stage, which
            returns the model's own output.
        parameters, buffers: names of its state, as in the original model.
        opaque: paths of the modules that it takes from the model, which is then an argument of its constructor.
    """

    file: Annotated[str, StringConstraints(pattern=r"^stage_[0-9]{1,6}\.py$")]
    class_name: Identifier
    sha256: Digest
    inputs: tuple[Identifier, ...]
    outputs: tuple[Identifier, ...]
    parameters: tuple[Name, ...]
    buffers: tuple[Name, ...] = ()
    opaque: tuple[ModulePath, ...] = ()

    def is_in(self, path: Path) -> bool:
        """Whether the file is unchanged since codegen wrote it."""
        return file_sha256(path) == self.sha256


class TiedParameter(FrozenModel):
    """One parameter held by several stages; `names[i]` is its name in stage `stages[i]`."""

    stages: tuple[Number, ...]
    names: tuple[Name, ...]

    def sentence(self) -> str:
        """Say which parameters of which stages are one."""
        places = (f"{name} (stage {s})" for s, name in zip(self.stages, self.names, strict=True))
        return f"tied: {', '.join(places)} are one parameter: their gradients are summed before each update"


class Bundle(YamlArtifact):
    """`plans/NAME/bundle.yaml`.

    Attributes:
        FILE: its name in the folder.
        inputs: the model's inputs in order of its arguments, each a tensor with producer -1.
        arguments: the model's arguments, tensors as `input_ids` and constants as `use_cache=False`; () if all are
            tensors by position.
        autocast_off: lines where the model switches autocast off; the stages would not.
        proof: how codegen compared the files with the model: `values` (outputs, gradients and buffers of three
            consecutive minibatches, training and evaluation) or `shapes` (under fake tensors only).
        optional_gradients: whether a tensor may have no gradient in some minibatch, so that messages must say so: if
            the loss may ignore one of several outputs, or user code that is not looked into one of its inputs.
        model_sha256: digest of the model file whose functions codegen checked; None: as it was profiled.
        opaque_outputs: path of an opaque module -> for each of its calls, the shapes of the tensors that it returns. A
            dimension is None if it is unknown.
        output_classes: name of a class in the last stage's file -> `module:Class` of the user's class in the model's
            output that it stands for.
        repeats_samples: whether the first samples of the training set are the same when they are read again with equal
            seeds.
        read_back: the buffers, in stages with replicas, that forward changes in training and its next call reads.
        kept_by_loss: `line: variable` of the file's variables that loss() changes and reads, if the last stage has
            replicas.
        differs_for_one_sample: whether the stages compute something else than the model from a minibatch of one sample.
    """

    KIND: ClassVar[str] = "bundle"
    MAKER: ClassVar[str] = "pdtool codegen"
    FILE: ClassVar[str] = "bundle.yaml"

    name: Title
    batch_size: Count
    proof: Literal["values", "shapes"]
    inputs: tuple[Identifier, ...]
    arguments: tuple[Label, ...] = ()
    autocast_off: tuple[Label, ...] = ()
    stages: Annotated[tuple[StageModule, ...], Field(min_length=1)]
    tensors: tuple[TensorSpec, ...]
    tied: tuple[TiedParameter, ...] = ()
    optional_gradients: bool = False
    model_sha256: Digest | None = None
    opaque_outputs: dict[ModulePath, tuple[tuple[tuple[Dim | None, ...], ...], ...]] = Field(default_factory=dict)
    output_classes: dict[Identifier, Label] = Field(default_factory=dict)
    repeats_samples: bool = True
    read_back: tuple[Name, ...] = ()
    kept_by_loss: tuple[Label, ...] = ()
    differs_for_one_sample: bool = False

    @property
    def doubts(self) -> list[str]:
        """What may make training differ from that on one worker."""
        doubts = []
        if not self.repeats_samples:
            doubts.append(
                "dataset() or collate() makes other values of the same samples when it reads them again, although the "
                "generators of torch, numpy and Python are seeded alike. What a generator of its own draws depends on "
                "the plan and does not go on in a resumed run: seed it for each sample with "
                "int(torch.randint(2**31, ()))"
            )
        if self.read_back:
            doubts.append(
                f"forward changes buffers and reads them in the next minibatch: {', '.join(self.read_back)}. Each "
                "replica of their stage does so with its own minibatches only, until the end of an epoch. `pdtool "
                "partition --straight` plans without replicas"
            )
        if self.kept_by_loss:
            doubts.append(
                f"loss() changes a variable and reads it in a later call: {', '.join(self.kept_by_loss)}. Each replica "
                "of the last stage has one of its own, and calls loss() with its own minibatches only"
            )
        return doubts

    def check(self) -> None:
        described: set[str] = set()
        for i, tensor in enumerate(self.tensors):
            if tensor.name in described:
                raise FieldError(f"tensors[{i}].name", f"{tensor.name!r} appears twice")
            described.add(tensor.name)
            if tensor.producer >= len(self.stages):
                raise FieldError(
                    f"tensors[{i}].producer", f"there is no stage {tensor.producer}, only {len(self.stages)} stages"
                )
            if any(s <= tensor.producer or s >= len(self.stages) for s in tensor.consumers):
                sender = f"stage {tensor.producer} of {len(self.stages)}"
                fault = f"{sender} cannot send {tensor.name} to stages {list(tensor.consumers)}"
                raise FieldError(f"tensors[{i}].consumers", fault)
        for s, stage in enumerate(self.stages):
            for name in (*self.inputs, *stage.inputs, *stage.outputs):
                if name not in described:
                    raise FieldError(f"stages[{s}]", f"tensor {name!r} is not described in tensors")
        for i, tied in enumerate(self.tied):
            if len(tied.names) != len(tied.stages):
                raise FieldError(f"tied[{i}].names", f"{len(tied.names)} names for {len(tied.stages)} stages")
            if any(s >= len(self.stages) for s in tied.stages):
                raise FieldError(f"tied[{i}].stages", f"{list(tied.stages)} of {len(self.stages)} stages")

    def fits_opaque(self, path: str, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether an opaque module may return tensors of these shapes; True if nothing is known of such tensors."""
        calls = self.opaque_outputs.get(path, ())
        as_many = [call for call in calls if len(call) == len(shapes)]
        if calls and not as_many:
            return False
        known = [call for call in as_many if [*map(len, call)] == [*map(len, shapes)]]  # others: of another mode
        return not known or any(all(map(_fits, call, shapes)) for call in known)

    def check_files(self, folder: Path) -> None:
        """Raise StaleError if a stage file is missing or has changed since codegen wrote it."""
        for stage in self.stages:
            path = folder / stage.file
            if not path.is_file() or not stage.is_in(path):
                state = "has changed since codegen wrote it" if path.is_file() else "is missing"
                raise StaleError(path, state, "run `pdtool codegen` again (edited files are kept, as stage_0.py~)")

    def copy_files(self, folder: Path, target: Path) -> None:
        """Copy the bundle and its stage files from `folder` to another folder, which then contains nothing else.

        Raises:
            StaleError: one is missing, or has changed since codegen wrote it.
            PdtoolError: the folder cannot be written.
        """
        texts = {stage.file: read_text(folder / stage.file) for stage in self.stages}
        shutil.rmtree(target, ignore_errors=True)
        for name, text in texts.items():
            write_atomically(target / name, text)
        self.save(target / self.FILE)
        self.check_files(target)

    def trusting(self, folder: Path) -> Bundle:
        """Return the same bundle with the current stage files; raises StaleError if one is missing."""
        stages = []
        for stage in self.stages:
            path = folder / stage.file
            if not path.is_file():
                raise StaleError(path, "is missing", "run `pdtool codegen` again")
            stages.append(stage.model_copy(update={"sha256": file_sha256(path)}))
        return self.model_copy(update={"stages": tuple(stages)})

    @property
    def by_name(self) -> dict[str, TensorSpec]:
        """Tensor name -> tensor."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def opaque(self) -> list[str]:
        """The paths of the opaque modules of all stages."""
        return [path for stage in self.stages for path in stage.opaque]


def _fits(dims: Iterable[int | str | None], sizes: Sequence[int]) -> bool:
    """Whether a tensor has the sizes of the dimensions for some minibatch; unknown without a `batch`."""
    pairs = [(dim, size) for dim, size in zip(dims, sizes, strict=True) if dim is not None]
    batch = next((size for dim, size in pairs if dim == "batch"), None)
    return all(size == _size(dim, batch or 0) for dim, size in pairs if isinstance(dim, int) or batch is not None)


@lru_cache(maxsize=1024)  # a dimension of each minibatch that is loaded
def _size(dim: int | str, batch: int) -> int:
    if isinstance(dim, int):
        return dim
    match = re.fullmatch(r"(?:([0-9]+)\*)?batch([+-][0-9]+)?", dim)
    assert match  # the field's pattern
    return int(match[1] or 1) * batch + int(match[2] or 0)
