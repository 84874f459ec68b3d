"""Pictures of good output: whole stage files, as a person reads them, for what ordinary models do.

After a change that is wanted, `PYTHONPATH=tests python tests/generator/test_stage_files.py` writes them again; read
what it changed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from skeletons import plan_of, skeleton, texts_in

from pdtool.artifacts.artifact import ModelRef
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.expressions import literal
from pdtool.generator.generate import generate

FOLDER = Path(__file__).parent / "stage_files"
PICTURES = {  # name of the file -> the model, and the number of stages, of which the file shows the first
    "branch_by_mode": ("Autoencoder", 1),
    "writing_in_place": ("Recurrent", 1),
    "random_numbers": ("Dropping", 1),
    "expressions": ("Expressions", 1),
    "masks_and_casts": ("Masked", 1),
    "structures": ("Structured", 1),
    "opaque_module": ("Opaque", 1),
    "modules": ("Layers", 1),
}


class Pictured(ModelFile):
    """A model of stage_files/models.py."""

    def example_inputs(self, batch_size):
        return self.as_inputs(self.module.INPUTS[self.ref.function](batch_size))


def stage_file(name: str, folder: Path) -> str:
    """The text of the first stage of a model."""
    return stage_files(*PICTURES[name], folder)["stage_0.py"]


def stage_files(function: str, stages: int, folder: Path) -> dict[str, str]:
    """The texts of all stages of a model, which are proved equal to it."""
    model_file = Pictured.load(ModelRef(source=str(FOLDER / "models.py"), function=function), trusted=True)
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, stages), profile, model_file, folder)
    assert bundle.proof == "values"
    return texts_in(folder)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", PICTURES)
def test_a_stage_file_reads_as_a_person_would_write_it(name, tmp_path):
    assert stage_file(name, tmp_path / "b") == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("stages", [1, 2, 3, 8, 13])
def test_what_does_nothing_is_left_out_wherever_the_borders_are(stages, tmp_path):
    lines = "\n".join(stage_files("Masked", stages, tmp_path / "b").values()).splitlines()
    for text in ("dropout(", " + 0", "frequencies.to(", "alias"):
        assert not [line for line in lines if text in line]
    assert len([line for line in lines if " * 1.0" in line]) == 1  # what goes into ReLU(inplace=True) is a copy
    assert len([line for line in lines if ".to(torch.float32)" in line]) == 1  # under autocast it may do something


def test_each_operator_can_be_a_stage_also_one_that_does_nothing(tmp_path):
    assert len(stage_files("Masked", 27, tmp_path / "b")) == 27


if __name__ == "__main__":
    for name in PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{name}.txt").write_text(stage_file(name, Path(folder) / "b"))
            sys.stdout.write(f"wrote {FOLDER / name}.txt\n")


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1),
        torch.tensor(2**62 + 1),
        torch.tensor(True),
        torch.tensor(1 + 2j),
        torch.tensor(float("nan"), dtype=torch.bfloat16),
        torch.tensor([1, 0]),
    ],
    ids=str,
)
def test_a_constant_tensor_is_written_as_it_is(value):
    """On a GPU, torch.tensor makes the host wait for the device; a scalar can be filled in there."""
    text = literal(value)
    written = eval(text, {"torch": torch, "device": "cpu", "float": float, "complex": complex})
    assert written.dtype == value.dtype
    assert torch.equal(written, value) or (written.isnan() and value.isnan())
    assert ("torch.tensor(" in text) == bool(value.dim())
