"""Pictures of good output: whole stage files, as a person reads them, for what ordinary models do.

After a change that is wanted, `python tests/test_stage_files.py` writes them again; read what it changed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from test_codegen import plan_of, skeleton, texts_in

from pdtool.artifacts.envelope import ModelRef
from pdtool.codegen.generate import generate
from pdtool.frontend.modelfile import ModelFile

FOLDER = Path(__file__).parent / "stage_files"
PICTURES = {  # name of the file -> the model, and the number of stages, of which the file shows the first
    "branch_by_mode": ("Autoencoder", 1),
    "writing_in_place": ("Recurrent", 1),
    "random_numbers": ("Dropping", 1),
    "expressions": ("Expressions", 1),
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
    function, stages = PICTURES[name]
    model_file = Pictured.load(ModelRef(source=str(FOLDER / "models.py"), function=function), trusted=True)
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, stages), profile, model_file, folder)
    assert bundle.proof == "values"
    return texts_in(folder)["stage_0.py"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_stage_file_reads_as_a_person_would_write_it(name, tmp_path):
    assert stage_file(name, tmp_path / "b") == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    for name in PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{name}.txt").write_text(stage_file(name, Path(folder) / "b"))
            sys.stdout.write(f"wrote {FOLDER / name}.txt\n")
