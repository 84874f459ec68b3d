"""Find stale files: a profile, plan or bundle that no longer fits the model or the given options.

`check --fresh` checks each file of a plan. `train` and `profile --if-stale` (api/reuse.py) check a profile. They trace
the model, so this module loads torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdtool.api.inputs import bundle_folder, find_model, was_made_from
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, StaleError
from pdtool.files import file_sha256
from pdtool.frontend.graph_digest import first_difference, graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.operators import Traced
from pdtool.frontend.tracing import trace_file
from pdtool.frontend.user_code import find_source, undoing_user_changes
from pdtool.planner.choice.plan_check import Finding


def freshness_findings(path: str, plan: Plan, profile: Profile) -> Iterator[Finding]:
    """Compare the plan in `path` with its profile, the current model, and the stage files.

    Raises:
        ModelError: the model, which is compared first, cannot be traced.
    """
    model, traced = plan.model or profile.model, None
    with undoing_user_changes():
        if model is None:
            yield Finding("profile", None, f"{plan.profile} comes without a model")
        else:
            find_model(path, model.source)
            file = ModelFile.load(model)
            traced = trace_file(file, file.build(), plan.batch_size)
            yield from profile_findings(profile, plan.profile, model.source, traced)
        if was_made_from(plan, profile):
            yield Finding("plan", True, f"{path} was made from the current {plan.profile}")
        else:
            words = f"{plan.profile} has changed since {path} was made"
            yield Finding("plan", False, words, remedy="run `pdtool partition` again")
        yield from _bundle_findings(path, plan, traced)


def _bundle_findings(path: str, plan: Plan, traced: Traced | None) -> Iterator[Finding]:
    """Compare the bundle with the plan and the model, and the stage files with the bundle."""
    folder = bundle_folder(path, plan)
    remedy = "run `pdtool codegen` again"
    if not (folder / Bundle.FILE).exists():
        yield Finding("bundle", None, f"there is none in {folder}/. `pdtool run` makes it")
        return
    try:
        bundle = Bundle.load(folder / Bundle.FILE)
    except ArtifactError as error:
        yield Finding("bundle", False, error.what, remedy=remedy)
        return
    if bundle.digests.get("plan") != plan.plan_sha256:
        yield Finding("bundle", False, f"{folder}/ was not made from the current {path}", remedy=remedy)
    elif traced and bundle.graph_sha256 not in (None, graph_sha256(traced)):
        yield Finding("bundle", False, f"{folder}/ was made from a model with different operators", remedy=remedy)
    else:
        yield Finding("bundle", True, f"{folder}/ was made from the current {path}")
    try:
        bundle.check_files(folder)
    except StaleError as error:
        yield Finding("stage files", False, error.what, remedy=remedy)
    else:
        names = ", ".join(stage.file for stage in bundle.stages)
        yield Finding("stage files", True, f"{names} are unchanged since codegen wrote them")


def why_model_differs(profile: Profile, path: str) -> str:
    """Say what differs between a model and its profile in `path`; "" for no difference.

    This traces the model, so it also detects changed operators in modules that model.py imports.

    Raises:
        ModelError: the model cannot be traced.
    """
    assert profile.model
    with undoing_user_changes():
        file = ModelFile.load(profile.model, trusted=True)
        traced = trace_file(file, file.build(), profile.batch_size)
        findings = profile_findings(profile, path, profile.model.source, traced)
        return next((finding.words for finding in findings if finding.holds is False), "")


def profile_findings(profile: Profile, path: str, source: str, traced: Traced) -> Iterator[Finding]:
    """Compare a profile with the model, and the bytes of the model's file with the profiled ones.

    Args:
        path: path of the profile.
        source: the model's file.
        traced: the current model.
    """
    recorded = profile.digests.get(source)
    changed = recorded is not None and file_sha256(find_source(source)) != recorded
    if profile.graph_sha256 is None:
        has = "has changed since" if changed else "is unchanged since"
        is_fresh, words = not changed, f"{path} records no operator graph, and {source} {has} it was profiled"
    elif profile.graph_sha256 == graph_sha256(traced):
        is_fresh, words = True, f"{source} and {path} have the same operators"
    else:
        is_fresh, words = False, f"{source}: {first_difference(profile, traced, source)}"
    yield Finding("profile", is_fresh, words, remedy="" if is_fresh else "profile and partition it again")
    if changed and is_fresh:
        words = f"{source} has changed since it was profiled: the costs of its loss and optimizer may have changed"
        yield Finding("source", None, f"{words}, and the plan keeps its old HINTS")
