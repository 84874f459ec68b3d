"""The artifact Checkpoint: what was trained, and which files hold it; its presence makes a checkpoint complete."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from pdtool.artifacts.envelope import Artifact, FrozenModel
from pdtool.artifacts.fields import Bytes, Count, Digest, Label, Number

StageFile = Annotated[str, StringConstraints(pattern=r"^stage-[0-9]{1,6}\.safetensors$")]


class StoredFile(FrozenModel):
    """A file as it was written.

    Attributes:
        bytes: its size.
    """

    bytes: Bytes
    sha256: Digest


class CheckpointManifest(Artifact):
    """`checkpoints/epoch-N/checkpoint.json`.

    Attributes:
        epoch: epochs that were trained.
        epochs: that the run was to have in all; 0: an older checkpoint, which does not say.
        seed: of the run.
        metrics: of the validation after that epoch; finite.
        validation_losses: of each epoch until then, which learning-rate schedules may depend on; finite. Older
            checkpoints have none.
        minibatches: of each epoch until then; 0 where an older pdtool trained it, which did not say. Older checkpoints
            have none.
        tied: name of a parameter or buffer -> the first name of the same tensor in the model, where that is another.
            Older checkpoints have none.
        files: the safetensors files in the same folder, each with the state of one stage.
    """

    KIND: ClassVar[str] = "checkpoint"
    MAKER: ClassVar[str] = "pdtool run"

    format: Literal["pdtool/checkpoint/1"] = "pdtool/checkpoint/1"
    epoch: Count
    epochs: Number = 0
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    metrics: dict[Label, Annotated[float, Field(allow_inf_nan=False)]]
    files: dict[StageFile, StoredFile]
    validation_losses: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    minibatches: tuple[Number, ...] = ()
    tied: dict[str, str] = Field(default_factory=dict)
