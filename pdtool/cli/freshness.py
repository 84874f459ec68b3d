"""Say which of a plan's files are stale: `pdtool check --fresh`, one line for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cli.inputs import bundle_folder, find_model, was_made_from
from pdtool.errors import ArtifactError, StaleError
from pdtool.files import file_sha256
from pdtool.frontend.graph_digest import first_difference, graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.operators import Traced
from pdtool.frontend.tracing import trace_file
from pdtool.frontend.user_code import find_source


@dataclass(frozen=True)
class FreshnessFinding:
    """Whether one file is still what it was made to be.

    Attributes:
        claim: the file: `profile`, `plan`, `bundle`, `stage files`; `source` for a note on the model's file.
        holds: whether it is fresh; None for a note, and where there is nothing to compare.
        words: what was found.
        remedy: what to do about it.
    """

    claim: str
    holds: bool | None
    words: str
    remedy: str = ""


@dataclass(frozen=True)
class FreshnessCheck:
    """Compares a plan with its profile, the model as it is now, and the stage files beside the plan.

    Attributes:
        path: of the plan.
    """

    path: str
    plan: Plan
    profile: Profile

    def findings(self) -> Iterator[FreshnessFinding]:
        """Compare all of them, the model first; raises ModelError when it cannot be traced."""
        yield from self._profile()
        yield self._plan()
        yield from self._bundle()

    @cached_property
    def _model(self) -> ModelRef | None:
        return self.plan.model or self.profile.model

    @cached_property
    def _traced(self) -> Traced | None:
        """The model as it is now; None when the profile is of no model that can be read."""
        if self._model is None:
            return None
        find_model(self.path, self._model.source)
        file = ModelFile.load(self._model)
        return trace_file(file, file.build(), self.plan.batch_size)

    def _profile(self) -> Iterator[FreshnessFinding]:
        if self._model is None or self._traced is None:
            words = f"there is no model behind {self.plan.profile}"
            return iter([FreshnessFinding("profile", None, words)])
        return profile_findings(self.profile, self.plan.profile, self._model.source, self._traced)

    def _plan(self) -> FreshnessFinding:
        if was_made_from(self.plan, self.profile):
            return FreshnessFinding("plan", True, f"{self.path} was made from {self.plan.profile} as it is")
        words = f"{self.plan.profile} has changed since {self.path} was made"
        return FreshnessFinding("plan", False, words, "run `pdtool partition` again")

    def _bundle(self) -> Iterator[FreshnessFinding]:
        """Compare the bundle with the plan and the model, and the stage files with the bundle."""
        folder = bundle_folder(self.path, self.plan)
        remedy = "run `pdtool codegen` again"
        if not (folder / "bundle.yaml").exists():
            yield FreshnessFinding("bundle", None, f"there is none in {folder}/; `pdtool run` makes it")
            return
        try:
            bundle = Bundle.load(folder / "bundle.yaml")
        except ArtifactError as error:
            yield FreshnessFinding("bundle", False, error.what, remedy)
            return
        if bundle.digests.get("plan") != self.plan.plan_sha256:
            yield FreshnessFinding("bundle", False, f"{folder}/ was not made from {self.path} as it is now", remedy)
        elif self._traced and bundle.graph_sha256 not in (None, graph_sha256(self._traced)):
            yield FreshnessFinding("bundle", False, f"{folder}/ was made of a model with other operators", remedy)
        else:
            yield FreshnessFinding("bundle", True, f"{folder}/ was made from {self.path} as it is")
        yield _stage_files(bundle, folder, remedy)


def profile_findings(profile: Profile, path: str, source: str, traced: Traced) -> Iterator[FreshnessFinding]:
    """Compare a profile with the model, and the bytes of the model's file with those that were profiled.

    Args:
        path: of the profile.
        source: the model's file.
        traced: the model as it is now.
    """
    recorded = profile.digests.get(source)
    changed = recorded is not None and file_sha256(find_source(source)) != recorded
    if profile.graph_sha256 is None:
        has = "has changed since" if changed else "is as it was when"
        is_fresh, words = not changed, f"{path} records no operator graph, and {source} {has} it was profiled"
    elif profile.graph_sha256 == graph_sha256(traced):
        is_fresh, words = True, f"the operators of {source} are those of {path}"
    else:
        is_fresh, words = False, f"{source}: {first_difference(profile, traced, source)}"
    yield FreshnessFinding("profile", is_fresh, words, "" if is_fresh else "profile and partition it again")
    if changed and is_fresh:
        words = f"{source} has changed since it was profiled: its loss and its optimizer may cost something else"
        yield FreshnessFinding("source", None, f"{words}, and the plan keeps the HINTS that it was made with")


def _stage_files(bundle: Bundle, folder: Path, remedy: str) -> FreshnessFinding:
    try:
        bundle.check_files(folder)
    except StaleError as error:
        return FreshnessFinding("stage files", False, error.what, remedy)
    names = ", ".join(stage.file for stage in bundle.stages)
    return FreshnessFinding("stage files", True, f"{names} are as codegen wrote them")
