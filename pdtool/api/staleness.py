"""Find stale files: a profile, plan or bundle that no longer fits the model or the given options.

`check --fresh` checks each file of a plan. `train` and `profile --if-stale` (api/reuse.py) check a profile. They trace
the model, so this module loads torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from pdtool.frontend.user_code import undoing_user_changes
from pdtool.planner.choice.plan_check import Finding
from pdtool.profiler.graph_costs import constraints

_AGAIN = "profile and partition it again"


def freshness_findings(path: str, plan: Plan, profile: Profile) -> Iterator[Finding]:
    """Compare the plan in `path` with its profile, the current model, and the stage files.

    Raises:
        ModelError: the model, which is compared first, cannot be traced.
    """
    model, current_sha256 = plan.model or profile.model, None
    if model is None:
        yield Finding("profile", None, f"{plan.profile} comes without a model")
    else:
        find_model(path, model.source)
        with undoing_user_changes():  # such as another current folder
            file = ModelFile.load(model)
            traced = trace_file(file, file.build(), plan.batch_size)
            findings, current_sha256 = list(_model_findings(profile, plan.profile, file, traced)), graph_sha256(traced)
        yield from findings
    yield from _option_findings(profile, plan.profile)
    if was_made_from(plan, profile):
        yield Finding("plan", True, f"{path} was made from the current {plan.profile}")
    else:
        words = f"{plan.profile} has changed since {path} was made"
        yield Finding("plan", False, words, remedy="run `pdtool partition` again")
    yield from _bundle_findings(path, plan, current_sha256)


def _bundle_findings(path: str, plan: Plan, current_sha256: str | None) -> Iterator[Finding]:
    """Compare the bundle with the plan and the model, and the stage files with the bundle.

    Args:
        current_sha256: digest of the model's operator graph; None if it is unknown.
    """
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
    elif current_sha256 and bundle.graph_sha256 not in (None, current_sha256):
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


def why_profile_is_stale(profile: Profile, path: str) -> str:
    """Say which input of the profile in `path` has changed since; "" for none.

    This traces the model, so it also detects changed operators in modules that model.py imports.

    Raises:
        ModelError: the model cannot be traced.
    """
    assert profile.model
    with undoing_user_changes():
        file = ModelFile.load(profile.model, trusted=True)
        traced = trace_file(file, file.build(), profile.batch_size)
        findings = list(_model_findings(profile, path, file, traced))
    findings += _option_findings(profile, path)
    return next((finding.words for finding in findings if finding.holds is False), "")


def _model_findings(profile: Profile, path: str, file: ModelFile, traced: Traced) -> Iterator[Finding]:
    """Compare a profile with the model and its HINTS, and the bytes of the model's file with the profiled ones.

    Args:
        path: path of the profile.
        file, traced: the current model.

    Raises:
        ModelError: HINTS names an unknown module.
    """
    source = file.ref.source
    recorded = profile.digests.get(source)
    changed = recorded is not None and file.sha256 != recorded
    if profile.graph_sha256 is None:
        has = "has changed since" if changed else "is unchanged since"
        is_fresh, words = not changed, f"{path} records no operator graph, and {source} {has} it was profiled"
    elif profile.graph_sha256 == graph_sha256(traced):
        is_fresh, words = True, f"{source} and {path} have the same operators"
    else:
        is_fresh, words = False, f"{source}: {first_difference(profile, traced, source)}"
    yield Finding("profile", is_fresh, words, remedy="" if is_fresh else _AGAIN)
    if is_fresh and constraints(file, traced, profile) != {"together": profile.together, "pin": profile.pin}:
        yield Finding("HINTS", False, f"HINTS of {source} have changed since it was profiled", remedy=_AGAIN)
    if changed and is_fresh:
        words = f"{source} has changed since it was profiled: the costs of its loss and optimizer may have changed"
        yield Finding("source", None, words)


def _option_findings(profile: Profile, path: str) -> Iterator[Finding]:
    """Find changed files that options of the profile name: a device of the user's, a profile to calibrate with."""
    named = (profile.asked.device, profile.asked.calibrate) if profile.asked else ()
    for name in (each for each in named if each in profile.digests and each != path):  # `path` replaced that profile
        if not Path(name).is_file():  # as in a clone that has the profile only
            yield Finding("profile", None, f"{name}, with which {path} was made, is not there")
        elif file_sha256(name) != profile.digests[name]:
            yield Finding("profile", False, f"{name} has changed since {path} was made with it", remedy=_AGAIN)
