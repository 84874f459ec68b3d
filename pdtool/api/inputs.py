"""Read a command's inputs: a plan, its profile and its model, which must still fit together.

A plan edited by hand gets new figures. If no path is given, `given_or_only` finds the only file there is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdtool.api.console import note
from pdtool.artifacts.artifact import Artifact, ModelRef, fields_checked
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, StaleError, UsageError, with_article
from pdtool.files import file_sha256, quoted
from pdtool.processes import start_server_of_workers

_KINDS = {"profile": ("profiles", "*.json", "pdtool profile"), "plan": ("plans", "*.yaml", "pdtool partition")}

if TYPE_CHECKING:
    from pdtool.frontend.model_file import ModelFile


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
            "It keeps the HINTS and the costs of loss and optimizer that were profiled"
        )


def find_model(path: str, source: str) -> Path:
    """Find the model's file that the plan in `path` names; raises StaleError if it does not exist."""
    from pdtool.frontend.user_code import find_source

    try:
        return find_source(source)
    except UsageError as error:
        is_there = Path(source).is_file()
        reason = "is not a Python file" if is_there else f"is not there (searched from {Path.cwd()})"
        what = f"its model file {source} {reason}"
        remedy = (
            "go to the folder where the plan was made, put the file back, or pass it to codegen and run with --model"
        )
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
        remedy = f"run `pdtool partition` again, or keep this plan with `pdtool check {quoted(path)} --update`"
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
        what = f"the plan and {plan.profile} differ in operators or in batch size"
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
        what = "the profile was read from stdin, so the plan does not name its file"
        remedy = "write the profile to a file and put its path there, such as `profile: profiles/net.json`"
        raise ArtifactError(path, what, remedy, field="profile")
    if not os.path.exists(plan.profile):
        what = f"its profile {plan.profile} is not there (searched from {Path.cwd()})"
        remedy = "go to the folder where the plan was made, or make the profile again with `pdtool profile`"
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
    from pdtool.planner.choice.plan_figures import refresh

    note("the plan was edited by hand: checking its stages and computing its predictions again")
    return refresh(plan, profile)


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


def given_or_only(kind: str, given: str | None) -> str:
    """Return the path given, or else the only profile in `profiles/` or plan in `plans/`.

    Raises:
        UsageError: the path is empty, or there is none, or there are several; it lists them.
    """
    if given is not None:
        return path_text(given)
    folder, pattern, maker = _KINDS[kind]
    paths = sorted(str(path) for path in Path(folder).glob(pattern))
    if not paths:
        raise UsageError(f"no {kind} is named and {folder}/ contains none", f"name one, or make one with `{maker}`")
    if len(paths) > 1:
        raise UsageError(
            f"no {kind} is named, and {folder}/ contains {len(paths)} {kind}s", f"name one of {', '.join(paths)}"
        )
    return paths[0]


def file_name(name: str) -> str:
    """Make a file name from an artifact's name, which never leads to another folder."""
    return re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "unnamed"


def default_plan_path(name: str) -> str:
    """Return the path to which `partition` writes a plan of this name by default."""
    return f"plans/{file_name(name)}.yaml"


def located_plan(plan: Plan | Path | str) -> tuple[Plan, str]:
    """Return a plan and its path; for a Plan object from no file, the path to which `partition` writes it.

    Raises:
        TypeError: it is neither a plan nor a path.
        ArtifactError: it is inconsistent.
    """
    if not isinstance(plan, (Plan, Path, str)):
        raise TypeError(f"a plan or its path is needed, not {with_article(type(plan).__name__)}")
    if isinstance(plan, Plan):
        path = plan.path or default_plan_path(plan.name)
        plan.check_again(path)
        return plan, path
    return Plan.load(str(plan), may_be_pipe=True), str(plan)


def read_plan(plan: Plan | Path | str) -> tuple[Plan, Profile, str]:
    """Return a plan, its profile and its path; raises StaleError if the profile has changed since."""
    chosen, path = located_plan(plan)
    return chosen, profile_of(chosen, path), path


def path_text(path: Path | str) -> str:
    """Return a path as a text.

    Raises:
        TypeError: it is not a path.
        UsageError: it is empty, as from an unset variable.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path is needed, not {with_article(type(path).__name__)}")
    if not str(path):
        raise UsageError("a path is empty", "name a file or folder, or leave it out")
    return str(path)


def strategies_text(against: Sequence[str]) -> str:
    """Return the names of strategies, or a single one, as on the command line; raises UsageError."""
    names = list(against) if isinstance(against, Iterable) and not isinstance(against, str) else [against]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"against={against!r:.80} is not a list of strategies", "write against=['gpipe']")
    return ",".join(names)


def optional_text(path: Path | str | None) -> str | None:
    """Return a path as a text, as `path_text` does; None stays None."""
    return None if path is None else path_text(path)
