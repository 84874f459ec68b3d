"""The plan and options of a resumed run: the run's own, unless others are given; changes are noted.

An option has the first of these values that there is:

    (1)  the one given on the command line, or in the call of the API
    (2)  that of the resumed run, if a resumed run keeps the option (`_lasting_options`)
    (3)  that of pdtool.toml, which click takes as a default
    (4)  that of the plan, for options of a plan (`Option.of_plan`), which `rescheduled` leaves alone if they are None
    (5)  the declared default

A schedule of (1) also drops values of (2) and (3) that have no effect with it (`excluded_by`; for pdtool.toml,
`prefer_typed` in cli/click_options.py). A plan of (1) that is not the run's own drops the options of a plan of (2).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdtool.api.console import note
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.run_dir import Checkpoint, RunDir, RunState
from pdtool.errors import ArtifactError, UsageError
from pdtool.files import quoted
from pdtool.machines import is_first_worker
from pdtool.options.declaration import Option, declared
from pdtool.options.run_options import SAME_FOLDER, RunOptions, excluded_by, not_replaced
from pdtool.units import counted

if TYPE_CHECKING:
    from pdtool.runtime.config import RunConfig

_SETTINGS = "model_settings"  # each name is kept unless it is given anew


def recorded(asked: RunOptions) -> dict[str, Any]:
    """Return the options of a run for run.json: those that are set, in their form on the command line."""
    values = {name: getattr(asked, name) for name in _lasting_options()}
    kept = {name: value for name, value in values.items() if value not in (None, ())}
    return {name: value if isinstance(value, (bool, int, float, tuple)) else str(value) for name, value in kept.items()}


def as_asked(plan: str | None, asked: RunOptions, given: Collection[str]) -> RunOptions:
    """Return the options of a run, completed from the run that it resumes.

    A run without a checkpoint starts again, with its options. A bare --resume begins a run if a plan is named and the
    folder of -o has none, so that one command both starts and continues it.

    Args:
        plan: path of the plan; None: the run's.
        given: names of the options on the command line, or in the call.

    Raises:
        UsageError: run.json records a value that an option no longer takes.
        ArtifactError: run.json is damaged, and no plan is given.
    """
    run = _resumed_run(asked)
    state = _state(run, plan) if run else None
    if run is None or state is None:
        begins = run is not None and plan is not None and asked.resume == SAME_FOLDER and not run.checkpoints()
        return replace(asked, resume=None) if begins else asked
    is_own_plan = plan is None or (bool(state.plan_path) and os.path.abspath(plan) == os.path.abspath(state.plan_path))
    options = _lasting_options()
    of_plan = {name for name, option in options.items() if option.of_plan and name != _SETTINGS}
    left_out = set(given) | (of_plan if not is_own_plan else set())
    if asked.schedule and "schedule" in given:
        left_out |= excluded_by(asked.schedule)
    lasting: dict[str, Any] = {"epochs": state.epochs} | state.asked
    known = {name: options[name].value.read(options[name].flag, lasting[name]) for name in lasting.keys() & options}
    changes = {name: value for name, value in known.items() if name not in left_out}
    if _SETTINGS in known:
        changes[_SETTINGS] = (*not_replaced(known[_SETTINGS], asked.model_settings), *asked.model_settings)
    if not run.checkpoints() and asked.output in (None, str(run.path)):
        changes |= {"resume": None, "output": str(run.path)}
    return replace(asked, **changes)


def _resumed_run(asked: RunOptions) -> RunDir | None:
    folder = asked.resumed
    if folder and Checkpoint(folder).is_complete:
        folder = folder.parent.parent
    return RunDir(folder) if folder else None


def own_plan(asked: RunOptions) -> str | None:
    """Return the path of the plan of the run that is resumed, or of its own copy if the plan is gone.

    It is None if no run is resumed, or if it has not begun.

    Raises:
        UsageError: both are gone, or the run began in another folder.
        ArtifactError: run.json is damaged.
    """
    run = _resumed_run(asked)
    if run is None or not run.state_file.is_file():
        return None
    state = RunState.load(run.state_file)
    began_in, path = run.path.resolve() / state.folder, state.plan_path
    if state.folder and began_in.is_dir() and not began_in.samefile("."):
        folder, name = began_in.resolve(), os.path.relpath(run.path.resolve(), began_in)
        what = f"{run.path} began in {folder}, and this folder may have another plan and model of the same names"
        raise UsageError(what, f"`cd {quoted(folder)} && pdtool run --resume {quoted(name)}`, or name a plan")
    if os.path.isfile(path):
        return path
    if not run.plan_file.is_file():
        raise UsageError(f"{path or run.plan_file}, the plan of {run.path}, is missing", "name another plan")
    if path and is_first_worker(os.environ):
        note(f"{path} is missing, so {run.path} continues with its own copy of the plan, {run.plan_file}")
    return str(run.plan_file)


def _state(run: RunDir, plan: str | None) -> RunState | None:
    """Return the options of a run; None if they are not recorded, or damaged, which is noted."""
    try:
        if run.state_file.is_file():
            return RunState.load(run.state_file)
        fault = f"{run.state_file} is missing" if run.checkpoints() else ""
    except ArtifactError as error:
        if plan is None:
            raise
        fault = error.what
    if fault:
        note(f"warning: {fault}, so the options of the earlier run are unknown and not used")
    return None


def note_options(before: RunOptions, asked: RunOptions) -> None:
    """Note which options come from the resumed run, and whether it starts again."""
    if before.resume and not asked.resume:
        state = "has no checkpoint yet" if os.path.exists(str(asked.output)) else "does not exist"
        note(f"{asked.output} {state}, so the run starts from the beginning")
    values = {name: (option, getattr(asked, name)) for name, option in _lasting_options().items()}
    taken = [(option, value) for name, (option, value) in values.items() if value != getattr(before, name)]
    if taken:
        texts = " ".join(_typed(option, value) for option, value in taken)
        note(f"taken from the earlier run: {texts}")


def _typed(option: Option, value: Any) -> str:
    if isinstance(value, bool):
        return option.switched(on=value)
    return " ".join(f"{option.flag} {each}" for each in (value if isinstance(value, tuple) else (value,)))


def _lasting_options() -> dict[str, Option]:
    """Return the options that a resumed run keeps: all except its place, and those that only the user may give."""
    return {name: each for name, each in declared(RunOptions).items() if each.in_file and each.section != "Machines"}


def plan_resumed(config: RunConfig) -> Plan | None:
    """Return the plan of the resumed run; None if it cannot be read."""
    if config.resume:
        with suppress(ArtifactError, UsageError):
            folder = RunDir(config.resume).latest_checkpoint().path.parent.parent
            return Plan.load(RunDir(folder).plan_file)
    return None


def note_resumption(config: RunConfig, before: Plan | None) -> None:
    """Note after which epoch a resumed run continues, and what differs from then on.

    Args:
        before: the plan that it was trained with so far.
    """
    if not config.resume:
        return
    manifest = RunDir(config.resume).latest_checkpoint().manifest()
    left = config.epochs - manifest.epoch
    note(f"continuing after epoch {manifest.epoch} of {config.resume}, with {counted(left, 'epoch')} to train")
    if before:
        _note_other_updates(before, config.plan)
    if manifest.seed != config.seed:
        note(
            f"{config.resume} was trained with --seed {manifest.seed} and continues with --seed {config.seed}: the "
            f"order of the samples and dropout differ from those of --seed {manifest.seed}"
        )


def _note_other_updates(before: Plan, plan: Plan) -> None:
    """Warn if a resumed run averages a different number of samples in an update than before."""
    earlier, now = (each.predicted and each.predicted.samples_per_update for each in (before, plan))
    if not earlier or not now or earlier == now:
        return
    minibatches, rest = divmod(earlier, plan.batch_size)
    if not rest and plan.kind.flushes:
        remedy = f"pass --microbatches {minibatches}"
    elif not rest and minibatches >= max(stage.replicas for stage in plan.stages):
        remedy = f"pass --update-every {minibatches}"
    else:
        remedy = f"partition with --samples-per-update {earlier}"
        if rest:
            remedy = f"profile with a --batch-size that divides {earlier}, and {remedy}"
    note(
        f"warning: an update now averages {now} samples instead of {earlier}, with the same learning rate. "
        f"To average {earlier} as before, {remedy}"
    )
