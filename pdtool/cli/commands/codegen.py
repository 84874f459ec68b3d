"""`codegen`: write a plan's stage files, plans/NAME.yaml -> plans/NAME/, and prove them equal to the model."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli import options
from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.output import print_json
from pdtool.cli.console.terminal import note, status
from pdtool.errors import UsageError

if TYPE_CHECKING:
    from pdtool.artifacts.bundle import Bundle
    from pdtool.cli.inputs import Inputs


@command(
    epilog="\b\nExamples:\n  pdtool codegen\n  pdtool codegen plans/digits-3.yaml -o /tmp/digits --model digits.py"
)
@click.argument("plan", required=False)
@options.output("Folder to write.  [default: PLAN without .yaml]")
@options.model
@options.as_json
def codegen(plan: str | None, output: str | None, model: str | None, as_json: bool) -> None:
    """Write one PyTorch file per stage of PLAN, and prove them right."""
    from pdtool.cli.inputs import Inputs

    if output == "-":
        raise UsageError("-o -: codegen writes a folder, which is not for stdout", "name a folder")
    inputs = Inputs.load(options.candidate("plan", plan), model)
    bundle = generated(inputs, Path(output) if output else inputs.folder)
    if as_json:
        print_json(bundle)


def generated(inputs: Inputs, folder: Path) -> Bundle:
    """Generate the bundle, and say on stderr what was proved."""
    from pdtool.cli.console.bundle_view import tied_lines
    from pdtool.generator.generate import generate

    target = folder.absolute()  # the user's module may go to another folder
    with chdir("."), status("generating") as step:
        bundle = generate(inputs.plan, inputs.profile, inputs.model_file(), target, step)
    proof = {
        "values": "proved: outputs, gradients and buffers equal the model's, in training and evaluation",
        "shapes": "the model is too large to run here: shapes and wiring are checked, values are not",
    }
    files = ", ".join(stage.file for stage in bundle.stages)
    note("\n".join([f"wrote {folder}/ ({files}, bundle.yaml)", *tied_lines(bundle), proof[bundle.proof]]))
    return bundle
