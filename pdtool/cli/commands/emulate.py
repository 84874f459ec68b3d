"""`emulate`: run a plan's workers on a pretend cluster, plans/NAME.yaml -> runs/NAME-emulated/."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_json, show
from pdtool.errors import TargetMissedError, UsageError
from pdtool.options import EmulateOptions, Factor

if TYPE_CHECKING:
    from pdtool.artifacts.report import Emulation


_FACTOR = click.FloatRange(Factor.least, Factor.most)


@command(
    epilog="\b\nExamples:\n  pdtool emulate plans/vgg16-4x4.yaml\n"
    "  pdtool emulate plans/digits-2.yaml --compute real --epochs 20 --target accuracy=0.98"
)
@click.argument("plan", required=False)
@options.output("Folder of the emulation.  [default: a new one, runs/PLAN-emulated, runs/PLAN-emulated.2, ...]")
@options.against(EmulateOptions)
@options.text(
    "--scale",
    of=EmulateOptions,
    type=_FACTOR,
    show_default="what the cores here can carry",
    metavar="S",
    help="Divide bytes and bandwidths by S; times stay.",
)
@options.text(
    "--slowdown",
    of=EmulateOptions,
    type=_FACTOR,
    show_default="so that a minibatch takes 150 ms or more",
    metavar="T",
    help="Let everything take T times as long.",
)
@options.choice("--compute", of=EmulateOptions, help="Sleep the times of the profile, or train the model on this CPU.")
@options.model
@options.count(
    "--minibatches",
    of=EmulateOptions,
    help="In an epoch; timed are those in steady state.",
    unset="enough for steady state",
)
@options.count(
    "--epochs",
    of=EmulateOptions,
    help="Epochs at most; the first of several is to warm up.",
    unset="1, or 2 with --compute real",
)
@options.target
@options.seed
@options.timeout()
@options.as_json
def emulate(plan: str | None, output: str | None, model: str | None, as_json: bool, **settings: Any) -> None:
    """Run PLAN's workers on a pretend cluster of this machine.

    Each worker is a process in a network namespace, behind links of the plan's bandwidths. It sleeps in place of
    computing, and sends real tensors. This needs Linux, iproute2, and root or user namespaces.
    """
    from pdtool.api.emulating import check_emulation, emulated
    from pdtool.api.inputs import Inputs, candidate, planned

    _refuse_options_of_training(settings["compute"])
    asked = EmulateOptions(**settings)
    check_emulation(asked)
    path = candidate("plan", plan)
    inputs = Inputs.load(path, model) if asked.compute == "real" else None
    chosen, profile = (inputs.plan, inputs.profile) if inputs else planned(path)
    _print_emulation(*emulated(chosen, profile, inputs, output, asked), as_json)


def _refuse_options_of_training(compute: Literal["sleep", "real"]) -> None:
    """Raise UsageError for options that workers which sleep would not look at."""
    source = click.get_current_context().get_parameter_source
    for name in ("model", "seed"):
        if compute == "sleep" and source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(
                f"--{name}: workers that sleep train no model", f"add --compute real, or leave --{name} out"
            )


def _print_emulation(emulation: Emulation, folder: Path, as_json: bool) -> None:
    """Print the emulation; raises TargetMissedError when a plan did not reach the target."""
    from pdtool.cli.run_view import emulation_view

    if as_json:
        print_json(emulation)
    show(*emulation_view(emulation))
    note(f"wrote {folder}/ (emulation.json, and a run of each plan)")
    if missed := [plan.name for plan in emulation.plans if plan.target_reached is False]:
        epochs = max(plan.epochs for plan in emulation.plans)
        what = f"target {emulation.target} was not reached by {' and '.join(missed)} in {epochs} epochs"
        raise TargetMissedError(what, "give more --epochs")
