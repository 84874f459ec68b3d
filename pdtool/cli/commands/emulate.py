"""`emulate`: run a plan's workers on a pretend cluster, plans/NAME.yaml -> runs/NAME-emulated/."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_json, show
from pdtool.emulator.emulation import (
    _configs,
    _others,
    _scalings,
    _settings,
    _warn_of_another_device,
    _warn_of_busy_cores,
)
from pdtool.errors import TargetMissedError, UsageError

if TYPE_CHECKING:
    from pdtool.artifacts.report import Emulation
    from pdtool.options import Target


class _Factor(click.FloatRange):
    """A number from 1 to a million; what is no number is not in the range."""

    min: float
    max: float

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        factor: float = super().convert(value, param, ctx)
        if math.isnan(factor):
            self.fail(f"{value} is not in the range {self.min}<=x<={self.max}.", param, ctx)
        return factor


_FACTORS = _Factor(1, 1e6)


@command(
    epilog="\b\nExamples:\n  pdtool emulate plans/vgg16-4x4.yaml\n"
    "  pdtool emulate plans/digits-2.yaml --compute real --epochs 20 --target accuracy=0.98"
)
@click.argument("plan", required=False)
@options.output("Folder of the emulation.  [default: a new one, runs/PLAN-emulated, runs/PLAN-emulated.2, ...]")
@options.against("data-parallel")
@click.option(
    "--scale",
    type=_FACTORS,
    show_default="what the cores here can carry",
    metavar="S",
    help="Divide bytes and bandwidths by S; times stay.",
)
@click.option(
    "--slowdown",
    type=_FACTORS,
    show_default="so that a minibatch takes 150 ms or more",
    metavar="T",
    help="Let everything take T times as long.",
)
@options.choice(
    "--compute", choices=("sleep", "real"), help="Sleep the times of the profile, or train the model on this CPU."
)
@options.model
@options.count("--minibatches", help="In an epoch; timed are those in steady state.", unset="enough for steady state")
@options.count(
    "--epochs", help="Epochs at most; the first of several is to warm up.", unset="1, or 2 with --compute real"
)
@options.target
@options.seed
@options.timeout("300s")
@options.as_json
def emulate(
    plan: str | None,
    output: str | None,
    model: str | None,
    compute: Literal["sleep", "real"],
    against: tuple[str, ...],
    as_json: bool,
    **asked: Any,
) -> None:
    """Run PLAN's workers on a pretend cluster of this machine.

    Each worker is a process in a network namespace, behind links of the plan's bandwidths. It sleeps in place of
    computing, and sends real tensors. This needs Linux, iproute2, and root or user namespaces.
    """
    from pdtool.api.inputs import Inputs, planned
    from pdtool.artifacts.run_dir import locked
    from pdtool.emulator.emulation import assemble_emulation, without_latency
    from pdtool.emulator.emulation import emulate as on_pretend_cluster
    from pdtool.emulator.pretend_cluster import check_tools
    from pdtool.planner.choice.comparison import rival_plans

    _refuse_options_of_training(compute)
    check_tools()
    asked["target"] = _target(compute, asked)
    path = options.candidate("plan", plan)
    inputs = Inputs.load(path, model) if compute == "real" else None
    chosen, profile = (inputs.plan, inputs.profile) if inputs else planned(path)
    cluster, folder = chosen.cluster.cluster(), _folder(output, Path("runs") / f"{chosen.name}-emulated")
    others = _others(chosen, rival_plans(profile, cluster, chosen, against))
    plans = {name: without_latency(plan, profile) for name, plan in {"this plan": chosen, **others}.items()}
    settings, scalings = _settings(plans, profile, compute, asked), _scalings(plans, profile, compute, asked)
    _warn_of_busy_cores()
    _warn_of_another_device(profile, compute)
    with locked(folder):
        configs = _configs(plans, inputs or profile, folder, scalings, settings)
        reports = on_pretend_cluster(
            configs, cluster, scalings, lambda name: note(f"emulating {name} ({plans[name].config})")
        )
    emulation = assemble_emulation(plans, reports, scalings, settings, compute)
    emulation.save(folder / "emulation.json")
    _print_emulation(emulation, folder, as_json)


def _refuse_options_of_training(compute: Literal["sleep", "real"]) -> None:
    """Raise UsageError for options that workers which sleep would not look at."""
    source = click.get_current_context().get_parameter_source
    for name in ("model", "seed"):
        if compute == "sleep" and source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(
                f"--{name}: workers that sleep train no model", f"add --compute real, or leave --{name} out"
            )


def _target(compute: Literal["sleep", "real"], asked: Mapping[str, Any]) -> Target | None:
    """Return the target; raises UsageError for what workers that sleep, or that compute, cannot do."""
    from pdtool.options import Target

    text, factors = asked["target"], (asked["scale"], asked["slowdown"])
    if compute == "sleep" and text is not None:
        raise UsageError(f"--target {text}: workers that sleep learn nothing", "add --compute real")
    if compute == "real" and any(factor not in (None, 1.0) for factor in factors):
        what = "with --compute real the model computes: neither its bytes nor its times can be scaled"
        raise UsageError(what, "leave --scale and --slowdown out")
    return None if text is None else Target.parse(text)


def _folder(output: str | None, default: Path) -> Path:
    """Return the folder that is asked for, else a new one; raises UsageError when it holds an emulation."""
    from pdtool.api.training import new_folder

    if output == "-":
        raise UsageError("-o -: an emulation writes a folder, which is not for stdout", "name a folder")
    folder = Path(output) if output else new_folder(default)
    if (folder / "emulation.json").exists():
        raise UsageError(f"{folder} holds an emulation already", "name another folder with -o")
    return folder


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
