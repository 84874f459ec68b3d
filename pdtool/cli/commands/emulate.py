"""`emulate`: run a plan's workers on a pretend cluster, plans/NAME.yaml -> runs/NAME-emulated/."""

from __future__ import annotations

import click

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_json, show
from pdtool.errors import TargetMissedError
from pdtool.options.simulate_options import EmulateOptions
from pdtool.units import counted


@command(
    epilog="\b\nExamples:\n  pdtool emulate plans/vgg16-4x4.yaml\n"
    "  pdtool emulate plans/mnist-2.yaml --compute real --epochs 20 --target accuracy=0.97"
)
@click.argument("plan", required=False)
@options.output_folder("Folder of the emulation.  [default: a new one, runs/PLAN-emulated, runs/PLAN-emulated.2, ...]")
@options.options_of(EmulateOptions)
@options.as_json
def emulate(plan: str | None, output: str | None, asked: EmulateOptions, as_json: bool) -> None:
    """Run PLAN's workers on a cluster that this machine emulates.

    Without PLAN, it takes the only plan in plans/.

    Each worker is a process in its own network namespace, behind links with the plan's bandwidths. It sleeps instead of
    computing, and sends real tensors. This needs Linux, iproute2, and root or user namespaces.
    """
    from pdtool.api.emulating import check_emulation, emulated
    from pdtool.api.inputs import given_or_only
    from pdtool.cli.run_view import emulation_view

    check_emulation(asked)
    emulation, folder = emulated(given_or_only("plan", plan), output, asked)
    if as_json:
        print_json(emulation)
    show(*emulation_view(emulation))
    note(f"wrote {folder}/ (emulation.json, and a run of each plan)")
    if missed := [each.name for each in emulation.plans if each.target_reached is False]:
        epochs = max(each.epochs for each in emulation.plans)
        what = f"target {emulation.target} was not reached by {' and '.join(missed)} in {counted(epochs, 'epoch')}"
        raise TargetMissedError(what, "pass a larger --epochs")
