"""`train`: the four commands one after the other, without those whose output is up to date."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pdtool.cli.click_options import CommandOption, asked_in, is_asked_for, makes_artifact, prefer_typed, typed
from pdtool.cli.command_line import command
from pdtool.cli.commands.steps import partition, profile, run
from pdtool.cli.terminal import note
from pdtool.options.declaration import declared
from pdtool.options.plan_options import PartitionOptions, ProfileOptions
from pdtool.options.run_options import RunOptions, excluded_by, not_replaced
from pdtool.schedule import SCHEDULES
from pdtool.units import counted

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import ModelRef


# `profile` and `partition` get the options that the plan records; the model is an argument.
_OF_PLAN = {"model"} | {param.name for step in (profile, partition) for param in step.params if makes_artifact(param)}


def _is_handed_on(step: click.Command, param: click.Parameter) -> bool:
    """Whether `train` passes an option to a command: those that change its artifact, and to `run` all others."""
    if step is not run or not isinstance(param, CommandOption):
        return makes_artifact(param)
    return not (param.declared and param.declared.of_plan and param.name in _OF_PLAN)


def _shared_options() -> Iterable[click.Parameter]:
    """Return the commands' own options, so that values are read and refused in the same way.

    Each comes from the first command that has it, or from a later one that takes any text: `profile` takes more
    devices.
    """
    named: dict[str | None, click.Parameter] = {}
    for step in (partition, run, profile):
        for param in step.params:
            if _is_handed_on(step, param):
                known = named.setdefault(param.name, param)
                if isinstance(known.type, click.Choice) and not isinstance(param.type, click.Choice):
                    named[param.name] = param
    return named.values()


@command(
    epilog="\b\nExamples:\n  pdtool train model.py --topology 4\n"
    "  pdtool train model.py --topology 4x4 --bandwidth 10Gbit/s,12GB/s --epochs 20 --target accuracy=0.98"
)
@click.argument("model")
@click.pass_context
def train(ctx: click.Context, /, model: str, **_: Any) -> None:
    """Train MODEL: profile, partition, codegen and run, as needed.

    Writes the same files as these commands: profiles/NAME.json, plans/NAME-TOPOLOGY.yaml, plans/NAME-TOPOLOGY/ and a
    new folder in runs/. A file is reused if it was made from the current model with the same options. A file made with
    other options is kept, and the new file gets another name.

    Each command also uses the defaults that pdtool.toml has for it.
    """
    from pdtool.api.console import muted
    from pdtool.api.inputs import file_name
    from pdtool.api.planning import cluster_asked_for
    from pdtool.api.resuming import as_asked
    from pdtool.api.reuse import one_at_a_time
    from pdtool.api.training import check_run
    from pdtool.frontend.user_code import check_trainable, find_source, is_local, model_name, parse_ref

    profiling = _step(ctx, profile, model)
    ref = parse_ref(model, profiling.params["model_settings"])
    source = find_source(ref.source)
    check_trainable(source, ref.function)
    name = file_name(model_name(source, ref.function))
    partitioning = _step(ctx, partition, "profiles/")
    running = _step(ctx, run, "plans/")  # read all before running the first, so that a slip is not found minutes later
    with muted():  # `partition` and `run` say the same, if they are run
        cluster = cluster_asked_for(asked_in(partitioning, PartitionOptions))
        plan_path = f"plans/{name}-{cluster.topology}.yaml"
        run_asked = as_asked(plan_path, asked_in(running, RunOptions), typed(running))
    check_run(run_asked, cluster.workers)
    if not is_local(source):
        running.params["model"] = ref.source
    with one_at_a_time(Path("profiles")):
        profile_path = _profile(profiling, ref, f"profiles/{name}.json", cluster.workers // running.params["nnodes"])
        plan_path = _partition(partitioning, profile_path, plan_path)
        _tell_of_stage_files(plan_path)
    running.params["plan"] = plan_path
    _invoke(running)


train.params[1:1] = _shared_options()


def _step(ctx: click.Context, step: click.Command, argument: str) -> click.Context:
    """Make the context of a command, from the project's defaults for it and the options of `train`.

    Options of `train` override the defaults of `run`, even if the plan already has them. A device that `profile`
    estimates for is not one that `run` can compute on.
    """
    context = step.make_context(step.name, ["--", argument], parent=ctx.parent)
    for param in step.params:
        name = param.name or ""
        if name in ctx.params and is_asked_for(ctx, name) and _is_handed_on(step, param):  # --quiet is no parameter
            value = ctx.params[name]
            if not isinstance(param.type, click.Choice) or value in param.type.choices:
                of_file = context.params[name] if param.multiple else ()
                context.params[name] = (*of_file, *value) if param.multiple else value
                context.set_parameter_source(name, ParameterSource.COMMANDLINE)
    prefer_typed(context)
    if step is run:
        _forget_what_the_plan_has(context, ctx)
    return context


def _forget_what_the_plan_has(running: click.Context, ctx: click.Context) -> None:
    """Let the plan, which follows the options of `train`, override the defaults of `run` and those of a resumed run."""
    settings = ctx.params["model_settings"]
    kept = not_replaced(running.params["model_settings"], settings)
    running.params["model_settings"] = (*kept, *(settings if running.params["resume"] else ()))
    of_plan = {name for name, option in declared(RunOptions).items() if option.of_plan}
    in_plan = of_plan & _OF_PLAN - {"model", "model_settings"}
    counting = {name for name, option in declared(PartitionOptions).items() if "microbatches" in option.excludes}
    asked = {name for name in in_plan | counting if is_asked_for(ctx, name)}
    excluded = excluded_by(ctx.params["schedule"]) if ctx.params["schedule"] in SCHEDULES else set()
    excluded |= {"update_every"} if asked & {"microbatches", *counting} else set()
    for name in (in_plan if asked else set()) | {name for name in excluded if not is_asked_for(ctx, name)}:
        running.params[name] = None
        running.set_parameter_source(name, ParameterSource.COMMANDLINE)  # so that a resumed run's does not count


def _invoke(context: click.Context) -> None:
    with context:
        context.command.invoke(context)


def _profile(context: click.Context, ref: ModelRef, path: str, workers: int) -> str:
    """Return the path of the model's profile; make it if it is missing.

    Args:
        path: its path, unless a profile with other options is there.
        workers: workers that will share this machine's cores; without `--threads`, profile with one worker's share.
    """
    from pdtool.api.reuse import other_profile, own_path, why_not_reused
    from pdtool.artifacts.profile import Profile
    from pdtool.frontend.compute_mode import default_device
    from pdtool.host import usable_cores

    params = context.params
    if params["device"] == "auto":
        params["device"] = default_device()
    fills_threads = params["device"] == "cpu" and params["threads"] is None
    if fills_threads:
        params["threads"] = max(1, len(usable_cores()) // workers)
    asked = asked_in(context, ProfileOptions)
    path, why_other = own_path(path, Profile, partial(other_profile, ref=ref, asked=asked), ref.model_dump(), asked)
    why = why_not_reused(path, ref, asked)
    if why:
        note(f"profile: making {path}: {why_other or why}")
        if fills_threads:
            note(f"using --threads {params['threads']}: {counted(workers, 'worker')} share the cores of this machine")
        params["output"] = path
        _invoke(context)
    return path


def _partition(context: click.Context, profile_path: str, path: str) -> str:
    """Return the path of a profile's plan; make it if it is missing. Raises StaleError or ArtifactError.

    Args:
        path: its path, unless a plan with other options is there.
    """
    from pdtool.api.console import muted
    from pdtool.api.planning import PlanRequest
    from pdtool.api.reuse import other_plan, own_path, why_plan_not_reused
    from pdtool.artifacts.plan import Plan

    asked = asked_in(context, PartitionOptions)
    with muted():  # `partition` says the same, if it is run
        request = PlanRequest.read(profile_path, asked)
    path, why_other = own_path(path, Plan, partial(other_plan, request=request), profile_path, asked)
    if why := why_plan_not_reused(path, request):
        note(f"partition: making {path}: {why_other or why}")
        context.params |= {"profile": (profile_path,), "output": path}
        _invoke(context)
    return path


def _tell_of_stage_files(plan_path: str) -> None:
    """Note that the plan's stage files exist; if not, `run` makes them and says so."""
    from pdtool.api.inputs import bundle_folder, bundle_of
    from pdtool.artifacts.plan import Plan

    plan = Plan.load(plan_path)
    folder = bundle_folder(plan_path, plan)
    if bundle_of(plan, folder):
        note(f"codegen: reusing {folder}/")
