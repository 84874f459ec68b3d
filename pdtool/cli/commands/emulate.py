"""`emulate`: run a plan's workers on a pretend cluster, plans/NAME.yaml -> runs/NAME-emulated/."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pdtool.cli import options
from pdtool.cli.console.output import print_json
from pdtool.cli.console.terminal import note, show
from pdtool.errors import TargetMissedError, UsageError

if TYPE_CHECKING:
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.report import Emulation, Report
    from pdtool.cli.inputs import Inputs
    from pdtool.emulate.emulate_plans import EmulationSettings
    from pdtool.emulate.sleeping_model import Scaling
    from pdtool.run.config import RunConfig, Target

_FACTORS = click.FloatRange(1, 1e6)


@click.command(
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
    show_default="so that a minibatch takes 60 ms",
    metavar="T",
    help="Let everything take T times as long.",
)
@options.choice(
    "--compute", choices=("sleep", "real"), help="Sleep the times of the profile, or train the model on this CPU."
)
@options.model
@options.count("--minibatches", help="In an epoch, of which the second is measured.", unset="enough for steady state")
@options.count("--epochs", help="Epochs at most; the first is to warm up.", unset="2", within=click.IntRange(2, 10_000))
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
    scale: float | None,
    slowdown: float | None,
    minibatches: int | None,
    epochs: int | None,
    target: str | None,
    seed: int,
    timeout: str,
    as_json: bool,
) -> None:
    """Run PLAN's workers on a pretend cluster of this machine.

    Each worker is a process in a network namespace, behind links of the plan's bandwidths. It sleeps in place of
    computing, and sends real tensors. This needs Linux, iproute2, and root or user namespaces.
    """
    from pdtool.cli.console.report_view import emulation_view
    from pdtool.cli.inputs import Inputs, planned
    from pdtool.emulate.emulate_plans import EmulationSettings, check_minibatches, choose_scaling, sleeping_config
    from pdtool.emulate.emulate_plans import emulate as on_pretend_cluster
    from pdtool.emulate.namespaces import check_tools
    from pdtool.partition.strategies.rival_plans import rival_plans
    from pdtool.run.config import Target
    from pdtool.run.run_folder import locked
    from pdtool.units import parse_seconds

    check_tools()
    path = options.candidate("plan", plan)
    chosen, profile = planned(path)
    plans = {"this plan": chosen} | rival_plans(profile, chosen.cluster.cluster(), chosen, against)
    folder = _folder(output, Path("runs") / f"{chosen.name}-emulated")
    if compute == "real":
        scaling = _unscaled(scale, slowdown)
    else:
        scaling = choose_scaling(list(plans.values()), profile, scale, slowdown)
    if target and compute == "sleep":
        raise UsageError(f"--target {target}: workers that sleep learn nothing", "add --compute real")
    settings = EmulationSettings(
        scaling=scaling,
        minibatches=minibatches,
        epochs=epochs or 2,
        target=Target.parse(target) if target else None,
        seed=seed,
        timeout_s=parse_seconds(timeout),
    )
    for each in plans.values():
        check_minibatches(each, minibatches)
    with locked(folder):
        configs = {}
        for name, each in plans.items():
            out = folder / name.replace(" ", "-")
            if compute == "real":
                configs[name] = _training_config(replace(Inputs.load(path, model), plan=each), out, settings)
            else:
                configs[name] = sleeping_config(each, profile, out, settings)
        reports = on_pretend_cluster(
            configs, chosen.cluster.cluster(), scaling, lambda name: note(f"emulating {name} ({plans[name].config})")
        )
    emulation = _emulation(plans, reports, scaling, compute, settings.target)
    emulation.save(folder / "emulation.json")
    if as_json:
        print_json(emulation)
    show(*emulation_view(emulation))
    note(f"wrote {folder}/ (emulation.json, and a run of each plan)")
    if missed := [plan.name for plan in emulation.plans if plan.target_reached is False]:
        what = f"target {emulation.target} was not reached by {' and '.join(missed)} in {settings.epochs} epochs"
        raise TargetMissedError(what, "give more --epochs")


def _folder(output: str | None, default: Path) -> Path:
    """Return the folder that is asked for, else a new one; raises UsageError when it holds an emulation."""
    from pdtool.cli.commands.run import new_folder

    folder = Path(output) if output else new_folder(default)
    if (folder / "emulation.json").exists():
        raise UsageError(f"{folder} holds an emulation already", "name another folder with -o")
    return folder


def _unscaled(scale: float | None, slowdown: float | None) -> Scaling:
    """Return the scaling of a model that computes; raises UsageError when another is asked for."""
    from pdtool.emulate.sleeping_model import Scaling

    if (scale or 1.0, slowdown or 1.0) != (1.0, 1.0):
        what = "with --compute real the model computes: neither its bytes nor its times can be scaled"
        raise UsageError(what, "leave --scale and --slowdown out")
    return Scaling()


def _training_config(inputs: Inputs, out: Path, settings: EmulationSettings) -> RunConfig:
    """Generate the stages of a plan, and return the configuration of a run that trains them."""
    from pdtool.cli.commands.codegen import generated
    from pdtool.emulate.emulate_plans import minibatches_to_steady_state
    from pdtool.run.config import RunConfig

    steps = settings.minibatches or (None if settings.target else minibatches_to_steady_state(inputs.plan))
    return RunConfig(
        plan=inputs.plan,
        bundle=generated(inputs, out / "stages"),
        bundle_dir=out / "stages",
        model=inputs.model,
        trusted=inputs.trusted,
        out=out,
        epochs=settings.epochs,
        steps=steps,
        target=settings.target,
        seed=settings.seed,
        device="cpu",
        transport="gloo",
        threads=inputs.profile.threads,
        timeout_s=settings.timeout_s,
    )


def _emulation(
    plans: Mapping[str, Plan],
    reports: Mapping[str, Report],
    scaling: Scaling,
    compute: Literal["sleep", "real"],
    target: Target | None,
) -> Emulation:
    """Return the artifact: times and bytes as they would be on the cluster itself."""
    from pdtool.artifacts.report import EmulatedPlan, Emulation

    chosen = next(iter(plans.values()))
    emulated = []
    for name, plan in plans.items():
        report, predicted = reports[name], plan.predicted
        time_s = report.measured.bottleneck_s / scaling.slowdown
        trained_s = report.epochs * report.minibatches * report.batch_size / (report.throughput_samples_per_s or 1.0)
        emulated.append(
            EmulatedPlan(
                name=name,
                config=plan.config,
                schedule=plan.schedule,
                workers=plan.workers,
                minibatches=report.minibatches,
                bottleneck_s=time_s,
                throughput_samples_per_s=plan.batch_size / time_s if time_s else 0.0,
                simulated_s=(predicted.simulated_s or predicted.bottleneck_s) if predicted else 0.0,
                sent_bytes=round(sum(stage.sent_bytes * stage.replicas for stage in report.stages) * scaling.scale),
                epochs=report.epochs,
                training_s=trained_s / scaling.slowdown,
                target_reached=report.target_reached,
            )
        )
    return Emulation(
        plan=chosen.name,
        batch_size=chosen.batch_size,
        cluster=chosen.cluster,
        compute=compute,
        scale=scaling.scale,
        slowdown=scaling.slowdown,
        cores=os.cpu_count() or 1,
        target=str(target) if target else None,
        plans=tuple(emulated),
        digests=dict(chosen.digests),
    )
