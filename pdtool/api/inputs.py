"""Read a command's inputs: a plan, its profile and its model, which must still fit together.

A plan edited by hand gets new figures. A run may have a different schedule than its plan, and different settings of
model.py, as long as the model's operators stay the same. If no path is given, `candidate` finds the only file there is.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdtool.api.console import note
from pdtool.artifacts.artifact import Artifact, ModelRef, fields_checked
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, StaleError, UsageError, suggestion
from pdtool.files import file_sha256
from pdtool.machines import is_first_worker
from pdtool.options.run_options import RunOptions
from pdtool.processes import start_server_of_workers
from pdtool.schedule import SCHEDULES, schedule_names

_KINDS = {"profile": ("profiles", "*.json", "pdtool profile"), "plan": ("plans", "*.yaml", "pdtool partition")}
Settings = Mapping[str, str | int | float | bool]

if TYPE_CHECKING:
    from pdtool.frontend.model_file import ModelFile, Setting


@dataclass(frozen=True)
class Inputs:
    """A plan with the profile and the model that it was made from.

    Attributes:
        path: path of the plan; `-` is stdin.
        model: the present place of the model.
        trusted: whether the model was named on the command line.
    """

    path: str
    plan: Plan
    profile: Profile
    model: ModelRef
    trusted: bool

    @classmethod
    def load(cls, plan: Plan | Path | str, model: str | None, *, starts_workers: bool = False) -> Inputs:
        """Take a plan, or read it, and its profile; recompute the predictions of a plan edited by hand.

        Codegen and the workers of a run trace the model, and check then that it still has the profiled operators.

        Args:
            starts_workers: whether this process will start workers. Their fork server then imports torch at the same
                time as this process.

        Raises:
            StaleError: the profile changed after the plan was made; or the model's file did, and no operator graph is
                recorded.
            ArtifactError: the plan, or an edit of it, is inconsistent.
        """
        chosen, profile, path = read_plan(plan)
        ref = chosen.model or profile.model
        if ref is None:  # not even with --model: we can read no model with such a plan's operators
            remedy = "plan from a profile that `pdtool profile` wrote"
            raise ArtifactError(path, f"{chosen.profile} comes without a model", remedy, field="model")
        if starts_workers:
            start_server_of_workers()
        inputs = cls(path, chosen, profile, _named(ref, model) if model else ref, trusted=model is not None)
        inputs._check_model(ref)
        return replace(inputs, plan=checked(chosen, profile))

    @property
    def folder(self) -> Path:
        """The default folder of the stage files."""
        return bundle_folder(self.path, self.plan)

    def model_file(self) -> ModelFile:
        """Import the user's model, and torch with it."""
        from pdtool.frontend.model_file import ModelFile

        return ModelFile.load(self.model, trusted=self.trusted, digests=self.plan.digests)

    def _check_model(self, recorded: ModelRef) -> None:
        """Compare the source file with the profiled one, without importing it.

        Raises:
            StaleError: it changed, and the plan does not record its operator graph.
            UsageError: the plan names a file outside the current folder, but the user does not.
        """
        from pdtool.frontend.user_code import check_local, find_source

        expected = self.plan.digests.get(recorded.source)
        if self.trusted:
            source = find_source(self.model.source)
        else:
            source = find_model(self.path, self.model.source)
            check_local(source)
        if not expected or file_sha256(source) == expected:
            return
        changed = f"{self.model.source} has changed since it was profiled"
        if not self.plan.graph_sha256:
            raise StaleError(self.path, changed, "profile and partition it again")
        note(
            f"{changed}. The plan stays valid if the operators are the same, which pdtool checks. "
            "HINTS and the costs of loss and optimizer still come from the profile"
        )


def find_model(path: str, source: str) -> Path:
    """Find the model's file that the plan in `path` names; raises StaleError if it does not exist."""
    from pdtool.frontend.user_code import find_source

    try:
        return find_source(source)
    except UsageError as error:
        is_there = Path(source).is_file()
        reason = "is not a Python file" if is_there else f"is not there (searched from {Path.cwd()})"
        what = f"it was made from {source}, which {reason}"
        remedy = "go to the folder where it was made, put the file back, or pass it to codegen and run with --model"
        raise StaleError(path, what, remedy) from error


def bundle_folder(path: str, plan: Plan) -> Path:
    """The folder of a plan's stage files: beside the plan in `path`; `plans/NAME` for a plan from stdin."""
    return Path("plans") / file_name(plan.name) if path == "-" else Path(path).with_suffix("")


def bundle_of(plan: Plan, folder: Path) -> Bundle | None:
    """Return the bundle in `folder` if codegen made it from the plan and its files are whole; None otherwise."""
    try:
        bundle = Bundle.load(folder / Bundle.FILE)
        bundle.check_files(folder)
    except ArtifactError:
        return None
    return bundle if bundle.digests.get("plan") == plan.plan_sha256 else None


def planned(plan: Plan | Path | str) -> tuple[Plan, Profile]:
    """Read a plan and its profile as Inputs.load does, for commands that do not need the model."""
    chosen, profile, _ = read_plan(plan)
    return checked(chosen, profile), profile


def profile_of(plan: Plan, path: str) -> Profile:
    """Read the profile that the plan in `path` was made from.

    Raises:
        StaleError: it has changed since.
        ArtifactError: its minibatch size differs; or the plan does not name it, because it came through a pipe.
    """
    profile = read_profile(plan, path)
    if not was_made_from(plan, profile):
        remedy = "run `pdtool partition` again, or keep this plan with `pdtool check --update`"
        raise StaleError(path, f"{plan.profile} has changed since the plan was made", remedy)
    if plan.batch_size != profile.batch_size:
        what = f"{plan.batch_size}, but {plan.profile} was measured with {profile.batch_size}"
        remedy = f"profile with --batch-size {plan.batch_size}, and partition again"
        raise ArtifactError(path, what, remedy, field="batch_size")
    return profile


def of_profile_as_it_is(plan: Plan, profile: Profile, path: str) -> Plan:
    """Return a plan without figures for a profile that was made again since.

    Raises:
        StaleError: the profile's operators or minibatch size have changed.
    """
    planned_for = (plan.graph_sha256 or profile.graph_sha256, plan.batch_size)
    if planned_for != (profile.graph_sha256, profile.batch_size):
        what = f"the plan was made for other operators or minibatches than those in {plan.profile}"
        raise StaleError(path, what, "run `pdtool partition` again")
    digests = {**profile.digests, plan.profile: profile.content_sha256}
    return plan.model_copy(update={"digests": digests, "predicted": None, "why": None})


def was_made_from(plan: Plan, profile: Profile) -> bool:
    """Whether the plan was made from `profile`'s content; a plan that records no digest fits any."""
    return (plan.digests.get(plan.profile) or plan.digests.get("-")) in (None, profile.content_sha256)


def path_of_profile(profile: Profile, path: str) -> str:
    """Return the path under which a plan finds its profile: `path`, or after a pipe a file in profiles/.

    That file is written unless it exists with the same content; other profiles of its name are kept.
    """
    if path != "-":
        return path
    text = profile.dump().encode()
    for file in sorted(Path("profiles").glob("*.json")):
        if file.is_file() and file.stat().st_size == len(text) and file.read_bytes() == text:
            return str(file)
    kept = Path(f"profiles/{file_name(profile.name)}.json")
    if kept.exists():
        kept = kept.with_stem(f"{kept.stem}-{profile.content_sha256[:8]}")
    profile.save(kept)
    note(f"wrote {kept}, where the plan finds its profile")
    return str(kept)


def read_profile(plan: Plan, path: str) -> Profile:
    """Read the profile that a plan in `path` names, whether or not it has changed.

    Raises:
        ArtifactError: it does not exist; or the plan does not name it, because it came through a pipe.
    """
    if plan.profile == "-":
        what = "the profile was read from stdin, so the plan does not say where it is"
        remedy = "write the profile to a file and put its path there, as `profile: profiles/net.json`"
        raise ArtifactError(path, what, remedy, field="profile")
    if not os.path.exists(plan.profile):
        what = f"its profile {plan.profile} is not there (searched from {Path.cwd()})"
        remedy = "go to the folder where the plan was made, or write it with `pdtool profile`"
        raise ArtifactError(path, what, remedy, field="profile")
    return Profile.load(plan.profile)


def _named(recorded: ModelRef, text: str) -> ModelRef:
    """Return the model named on the command line, with the recorded settings and, unless it names one, function.

    Raises:
        UsageError: an artifact cannot hold that name.
    """
    source, _, function = text.partition(":")
    with fields_checked(lambda fault: UsageError(f"--model {text!r:.80}: {fault}", "give it another path or name")):
        return ModelRef(source=source, function=function or recorded.function, settings=recorded.settings)


def checked(plan: Plan, profile: Profile) -> Plan:
    """Check that the plan can be executed, and recompute its predictions after an edit by hand."""
    plan.stage_nodes(profile)
    plan.check_schedule()
    if not plan.edited:
        return plan
    from pdtool.planner.choice.make_plan import refresh

    note("the plan was edited by hand: checking its stages and computing its predictions again")
    return refresh(plan, profile)


def rescheduled(inputs: Inputs, asked: RunOptions) -> Plan:
    """Return the plan with the same stages, run as `asked` says; None keeps the plan's value.

    Raises:
        UsageError: the schedule excludes an option, or cannot have these stages.
    """
    plan, microbatches, weights, update_every = inputs.plan, asked.microbatches, asked.weights, asked.update_every
    if asked.wire_dtype not in (None, plan.wire_dtype):
        from pdtool.planner.choice.make_plan import refresh

        plan = refresh(plan.model_copy(update={"wire_dtype": asked.wire_dtype}), inputs.profile)
    if (asked.schedule, microbatches, weights, update_every) == (None,) * 4:
        return plan
    from pdtool.planner.choice.make_plan import reschedule

    name = asked.schedule or plan.schedule
    kind = SCHEDULES[name]
    if not kind.flushes and microbatches not in (None, 1):
        raise UsageError(f"schedule {name} has no microbatches", "use --update-every, or --schedule 1f1b-flush")
    if kind.flushes and update_every:
        raise UsageError(f"schedule {name} updates after its microbatches", "give --microbatches, not --update-every")
    kept = plan.weights if name == plan.schedule else kind.policy_names[0]
    if weights and weights not in kind.policy_names:
        remedy = f"give {' or '.join(kind.policy_names)}" if len(kind.policies) > 1 else "leave --weights out"
        raise UsageError(f"schedule {name} excludes --weights {weights}", remedy)
    if kind.chunked != (plan.chunks > 1):
        chunked = schedule_names(lambda other: other.chunked)
        remedy = f"use another schedule, or partition with --schedule {chunked} for several stages"
        raise UsageError(f"schedule {name} cannot have {plan.chunks} stage(s) on each worker", remedy)
    if kind.flushes:
        interval = {"microbatches": microbatches or max(plan.microbatches, 4), "update_every": None}
    else:
        interval = {"microbatches": 1, "update_every": update_every or plan.update_every}
    return reschedule(plan, inputs.profile, {"schedule": name, "weights": weights or kept, **interval})


def as_it_is(artifact: Artifact, file: str) -> tuple[Artifact, ArtifactError | None]:
    """Return (the artifact, or an edited plan with new figures; the reason if there are none).

    Args:
        file: its path, for errors.

    Raises:
        ArtifactError, ScheduleError: the edited plan cannot be executed.
    """
    if not isinstance(artifact, Plan) or not artifact.edited:
        return artifact, None
    artifact.check_schedule()
    try:
        profile = profile_of(artifact, file)
    except ArtifactError as error:
        return artifact, error
    return checked(artifact, profile), None


def with_settings(inputs: Inputs, given: Sequence[str]) -> Inputs:
    """Return the inputs of a run with other settings of model.py, and note these; without any, return them unchanged.

    Args:
        given: settings, as `lr=0.01`.

    Raises:
        UsageError: no function of model.py takes one of them, or one changes the planned operators.
        ModelError: the model cannot be built with them.
    """
    from pdtool.frontend.user_code import parse_settings, undoing_user_changes

    if not given:
        return inputs
    changes = parse_settings(given)
    model = inputs.model.model_copy(update={"settings": {**inputs.model.settings, **changes}})
    changed = replace(inputs, model=model)
    with undoing_user_changes():
        file = changed.model_file()
        _check_names(file, changes)
        if any(inputs.model.settings.get(key) != value for key, value in file.model_settings.items()):
            _check_operators(file, inputs.profile, changes)
    if is_first_worker(os.environ):
        note(f"settings of this run: {', '.join(f'{key}={value}' for key, value in changes.items())}")
    return changed


def _check_names(file: ModelFile, changes: Mapping[str, Setting]) -> None:
    """Raise UsageError if no function has a parameter for a setting."""
    for key in (key for key in changes if not file.takes_setting(key)):
        takers = {function: names for function, names in file.setting_names.items() if names}
        listed = ", ".join(f"{function}({', '.join(names)})" for function, names in takers.items())
        known = f"you can set {listed}" if listed else "none of them has parameters to set"
        add = f"give one a parameter, as in optimizer(..., {key}=...); {known}"
        what = f"--set {key}: no function of {file.path.name} has a parameter {key}"
        raise UsageError(what, suggestion(key, [name for names in takers.values() for name in names], add))


def _check_operators(file: ModelFile, profile: Profile, changes: Mapping[str, Setting]) -> None:
    """Raise UsageError if these settings change the model's operators since the profile."""
    from pdtool.frontend.graph_digest import check_profile
    from pdtool.frontend.tracing import trace_file

    settings = " ".join(f"--set {key}={value}" for key, value in changes.items())
    remedy = f"profile it with {settings} and partition it again"
    if profile.graph_sha256 is None:
        raise UsageError(f"{settings} changes {file.ref.function}(), but the profile records no operators", remedy)
    try:
        check_profile(trace_file(file, file.build(), profile.batch_size), profile, file.ref.source)
    except StaleError as error:
        raise UsageError(f"{settings} changes the model's operators: {error.what}", remedy) from error


def candidate(kind: str, given: str | None) -> str:
    """Return the path given, or else the only profile in `profiles/` or plan in `plans/`.

    Raises:
        UsageError: there is none, or there are several; it lists them.
    """
    if given:
        return given
    folder, pattern, maker = _KINDS[kind]
    paths = sorted(str(path) for path in Path(folder).glob(pattern))
    if not paths:
        raise UsageError(f"no {kind} is named and {folder}/ contains none", f"name one, or make one with `{maker}`")
    if len(paths) > 1:
        raise UsageError(f"no {kind} is named and {folder}/ contains {len(paths)}", f"name one of {', '.join(paths)}")
    return paths[0]


def file_name(name: str) -> str:
    """Make a file name from an artifact's name, which never leads to another folder."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip(".") or "unnamed"


def default_plan_path(plan: Plan) -> str:
    """Return the path to which `partition` writes a plan by default."""
    return f"plans/{file_name(plan.name)}.yaml"


def located_plan(plan: Plan | Path | str) -> tuple[Plan, str]:
    """Return a plan and its path; for a Plan object, the path to which `partition` writes it.

    Raises:
        TypeError: it is neither a plan nor a path.
        ArtifactError: it is inconsistent.
    """
    if not isinstance(plan, (Plan, Path, str)):
        raise TypeError(f"a plan or its path is needed, not a {type(plan).__name__}")
    if isinstance(plan, Plan):
        path = default_plan_path(plan)
        plan.check_again(path)
        return plan, path
    return Plan.load(str(plan), may_be_pipe=True), str(plan)


def read_plan(plan: Plan | Path | str) -> tuple[Plan, Profile, str]:
    """Return a plan, its profile and its path; raises StaleError if the profile has changed since."""
    chosen, path = located_plan(plan)
    return chosen, profile_of(chosen, path), path


def assignments(settings: Settings | None) -> tuple[str, ...]:
    """Write settings as on the command line, with quotes around texts, so that "8" stays a text; raises UsageError."""
    if not isinstance(settings, Mapping | None):
        raise UsageError(f"settings={settings!r:.80} is not a dict of names and values", "pass one, as {'lr': 0.01}")
    for name, value in (settings or {}).items():
        if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"setting {name}={value!r:.80} is not a str, number or bool", "pass one of these")
    return tuple(f"{name}={value!r}" for name, value in (settings or {}).items())


def path_text(path: Path | str) -> str:
    """Return a path as a text.

    Raises:
        TypeError: it is not a path.
        UsageError: it is empty, as from an unset variable.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path is needed, not a {type(path).__name__}")
    if not str(path):
        raise UsageError("a path is empty", "name a file or folder, or leave it out")
    return str(path)


def optional_text(path: Path | str | None) -> str | None:
    """Return a path as a text, as `path_text` does; None stays None."""
    return None if path is None else path_text(path)
