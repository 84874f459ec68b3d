"""Run a plan's workers, and its rivals', on a pretend cluster of this machine (`pdtool emulate`).

Workers sleep the times of the profile, or train the model on this CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pdtool.api.caller import unchanged_caller
from pdtool.api.console import note
from pdtool.api.inputs import Inputs, optional_text, planned, strategies_text
from pdtool.api.training import new_folder, write_stages
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation
from pdtool.artifacts.run_dir import RunDir
from pdtool.emulator import emulation as emulations
from pdtool.emulator.emulation import (
    assemble_emulation,
    check_minibatches,
    choose_scaling,
    minibatches_to_steady_state,
    scaling_warnings,
    sleeping_config,
    without_latency,
)
from pdtool.emulator.pretend_cluster import check_tools
from pdtool.emulator.sleeping_model import Scaling
from pdtool.errors import UsageError
from pdtool.host import check_may_start_processes, usable_cores
from pdtool.options.declaration import read_options
from pdtool.options.simulate_options import EmulateOptions
from pdtool.planner.choice.comparison import rival_plans
from pdtool.runtime.config import RunConfig
from pdtool.runtime.loading.minibatches import NO_LENGTH
from pdtool.units import counted

_BUSY_PART_OF_CORES = 0.5


@unchanged_caller()
def emulate(
    plan: Plan | Path | str,
    *,
    against: Sequence[str] = ("data-parallel",),
    compute: Literal["sleep", "real"] = "sleep",
    minibatches: int | None = None,
    epochs: int | None = None,
    target: str | None = None,
    seed: int = 0,
    output: Path | str | None = None,
    model: Path | str | None = None,
    **options: Any,
) -> Emulation:
    """Run a plan's workers on a pretend cluster of this machine, each behind links of the plan's bandwidths.

    Args:
        plan: the plan, or the path of its file.
        against: strategies of rivals to emulate as well.
        compute: "sleep" the times of the profile, or train the "real" model on this CPU.
        minibatches: in an epoch; None: enough for steady state.
        epochs: at most; None: 1, or 2 with "real", the first of which warms up.
        target: stop when a "real" model's validation reaches it, as "accuracy>=0.98".
        seed: seed of all random numbers of a "real" model.
        output: folder of the emulation; None: a new one in runs/.
        model: the model's file, if it has moved; for "real".
        options: other options of `pdtool emulate --help`: `scale`, `slowdown`, `timeout`.

    Returns:
        Times and bytes of each plan, scaled back to the cluster itself.

    Raises:
        UsageError: the options make no sense together, or the folder holds an emulation.
        PdtoolError: this machine cannot make such links, or the workers would not fit in its memory.
        WorkerDiedError: a worker ended or did not answer.
    """
    given: dict[str, Any] = {"against": strategies_text(against), "compute": compute, "minibatches": minibatches}
    given |= {"epochs": epochs, "target": target, "seed": seed, "model": optional_text(model)}
    asked = read_options("emulate", EmulateOptions, given | options)
    check_emulation(asked)
    return emulated(plan, optional_text(output), asked)[0]


def check_emulation(asked: EmulateOptions) -> None:
    """Check that this machine has the tools for an emulation, and that the options suit sleeping or computing workers.

    Raises:
        UsageError: they do not.
        PdtoolError: a tool is missing.
    """
    if asked.compute == "sleep" and asked.target is not None:
        what = f"sleeping workers do not learn, so they cannot reach --target {asked.target}"
        raise UsageError(what, "add --compute real")
    for name in ("model", "seed"):
        if asked.compute == "sleep" and getattr(asked, name):
            what = f"--{name} has no effect: sleeping workers train no model"
            raise UsageError(what, f"add --compute real, or leave --{name} out")
    if asked.compute == "real" and any(factor not in (None, 1.0) for factor in (asked.scale, asked.slowdown)):
        what = "--compute real runs the model itself, so --scale and --slowdown do not apply"
        raise UsageError(what, "leave out --scale and --slowdown")
    check_may_start_processes()
    check_tools()


def emulated(plan: Plan | Path | str, output: str | None, asked: EmulateOptions) -> tuple[Emulation, Path]:
    """Emulate a plan and its rivals as `asked` says; save the emulation, and return it with its folder.

    Args:
        output: the folder; None: a new one.
    """
    inputs = Inputs.load(plan, asked.model) if asked.compute == "real" else None
    chosen, profile = (inputs.plan, inputs.profile) if inputs else planned(plan)
    if output == "-":
        raise UsageError("-o - is not possible: an emulation writes a folder, not a file", "name a folder")
    if output and RunDir(Path(output)).emulation_file.exists():
        raise UsageError(f"{output} already contains an emulation", "name another folder with -o")
    cluster = chosen.cluster
    others = _others(chosen, rival_plans(profile, cluster, chosen, asked.against))
    plans = {name: without_latency(other, profile) for name, other in {"this plan": chosen, **others}.items()}
    for each in plans.values():
        if doubt := check_minibatches(each, profile, asked.minibatches):
            note(f"warning: {doubt}")
    scalings = _scalings(plans, profile, asked)
    _warn_of_busy_cores()
    _warn_of_another_device(profile, asked.compute)
    own = nullcontext(Path(output)) if output else new_folder(Path("runs") / f"{chosen.name}-emulated")
    with own as folder, RunDir(folder).held():
        if inputs:
            _check_length(inputs, asked)
        configs: dict[str, RunConfig] = {}
        for name, each in plans.items():
            out = RunDir(folder).emulated(name).path
            if inputs:
                configs[name] = _training_config(replace(inputs, plan=each), out, asked)
            else:
                configs[name] = sleeping_config(each, profile, out, scalings[name], asked)
        reports = emulations.emulate(
            configs, cluster, scalings, lambda name: note(f"emulating {name} ({plans[name].config})")
        )
    emulation = assemble_emulation(plans, reports, scalings, asked)
    emulation.save(RunDir(folder).emulation_file)
    return emulation, folder


def _others(chosen: Plan, rivals: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return the rivals that differ from the chosen plan; two emulations of one plan would differ only by noise."""
    others = {name: plan for name, plan in rivals.items() if _run_by(plan) != _run_by(chosen)}
    for name in [name for name in rivals if name not in others]:
        note(f"{name} is the same as this plan, so it is not emulated again")
    return others


def _warn_of_busy_cores() -> None:
    """Warn if other programs keep the cores busy, because sleeping workers would wake late."""
    cores, busy = len(usable_cores()), os.getloadavg()[0]
    if busy > _BUSY_PART_OF_CORES * cores:
        what = f"other programs keep {busy:.1f} of {counted(cores, 'core')} busy"
        note(f"warning: {what}, so emulated times will be too long")


def _warn_of_another_device(profile: Profile, compute: Literal["sleep", "real"]) -> None:
    """Warn if a model computes here but its simulated times are for another device."""
    if compute == "real" and not profile.is_measured_on_cpu:
        name = profile.device.name
        note(f"warning: the simulated times are for {name} ({profile.device.kind}), but the model runs on this CPU")


def _run_by(plan: Plan) -> tuple[object, ...]:
    """Return the facts that decide how a plan's workers run."""
    return plan.stages, plan.schedule, plan.weights, plan.microbatches, plan.update_every, plan.chunks, plan.copies


def _scalings(plans: Mapping[str, Plan], profile: Profile, asked: EmulateOptions) -> dict[str, Scaling]:
    """Return the scaling that each plan needs, which may differ; warn if the user's is too small."""
    if asked.compute == "real":
        return dict.fromkeys(plans, Scaling())
    factors = asked.scale, asked.slowdown
    scalings = {name: choose_scaling(plan, profile, *factors) for name, plan in plans.items()}
    for name, scaling in scalings.items() if any(factors) else ():
        for warning in scaling_warnings(plans[name], profile, scaling):
            note(f"warning: {name}, with --scale {scaling.scale:g} and --slowdown {scaling.slowdown:g}: {warning}")
    return scalings


def _check_length(inputs: Inputs, asked: EmulateOptions) -> None:
    """Check that the number of minibatches in an epoch is known; raises UsageError for a stream without a length."""
    if asked.minibatches or not asked.target:
        return
    from pdtool.frontend.user_code import undoing_user_changes

    with undoing_user_changes():
        file = inputs.model_file()
        samples = file.samples(file.dataset("train"), "dataset('train')")
    if samples is None:
        raise UsageError(NO_LENGTH, "give it with --minibatches")


def _training_config(inputs: Inputs, out: Path, asked: EmulateOptions) -> RunConfig:
    """Generate the stages of a plan, and return the configuration of a run that trains them."""
    in_steady_state = None if asked.target else minibatches_to_steady_state(inputs.plan, inputs.profile)
    return RunConfig(
        plan=inputs.plan,
        bundle=write_stages(inputs, RunDir(out).stages),
        bundle_dir=RunDir(out).stages,
        model=inputs.model,
        trusted=inputs.trusted,
        out=out,
        epochs=asked.epochs_in_all,
        steps=asked.minibatches or in_steady_state,
        target=asked.target,
        seed=asked.seed,
        device="cpu",
        transport="gloo",
        threads=inputs.profile.threads,
        timeout_s=asked.timeout_s,
    )
