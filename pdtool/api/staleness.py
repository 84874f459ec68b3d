"""Say what is stale: a profile, plan or bundle that the model, or the options that are given, do not fit any more.

`check --fresh` says it of each file of a plan; `train` and `profile --if-stale` ask whether a file can be used again.
The model is traced for that, so this module loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdtool.api.console import note, status
from pdtool.api.inputs import bundle_folder, file_name, find_model, was_made_from
from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, StaleError
from pdtool.files import file_sha256
from pdtool.frontend import compute_mode
from pdtool.frontend.graph_digest import first_difference, graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.operators import Traced
from pdtool.frontend.tracing import trace_file
from pdtool.frontend.user_code import find_source, model_name, parse_ref, undoing_user_changes
from pdtool.options.declaration import declared
from pdtool.options.plan_options import PartitionOptions, ProfileOptions
from pdtool.schedule import STRAIGHT
from pdtool.units import parse_bandwidth, parse_bytes, parse_seconds

Given = Mapping[str, Any]  # the options that were asked for, by parameter


def why_not_reused(path: str, ref: ModelRef, given: Given) -> str:
    """Say why the profile in a file is not the one that is asked for; "" when it is, which is noted.

    Raises:
        ModelError: the model cannot be traced.
    """
    if not Path(path).exists():
        return "it is not there"
    try:
        known = Profile.load(path)
    except ArtifactError:
        return "what is there cannot be read"
    with status("comparing the model with its profile"):
        why = why_profile_is_stale(known, path, ref, given)
    if not why:
        note(f"profile: reusing {path} (minibatch of {known.batch_size}, {known.device.kind} for {known.device.name})")
    return why


def why_profile_is_stale(profile: Profile, path: str, ref: ModelRef, given: Given) -> str:
    """Say why the profile in `path` is not the one that is asked for; "" when it is.

    The model is traced: an operator that changed in a module that model.py imports is seen, too.

    Raises:
        ModelError: the model cannot be traced.
    """
    if profile.model is None or (profile.model.source, profile.model.function) != (ref.source, ref.function):
        return f"it is of {profile.model or 'no model'}"
    if "model_settings" in given and profile.model.settings != ref.settings:
        return f"it is of {profile.model}"
    if given.get("device") == "auto":
        given = {**given, "device": compute_mode.default_device()}
    for option, recorded in _recorded_in_profile(profile).items():
        if option in given and given[option] != recorded:
            return f"it has {declared(ProfileOptions)[option].flag} {recorded}, not {given[option]}"
    return _why_model_differs(profile, path)


def _recorded_in_profile(profile: Profile) -> dict[str, Any]:
    recorded: dict[str, Any] = {
        "batch_size": profile.batch_size,
        "precision": profile.precision or "fp32",
        "compiled": profile.compiled,
    }
    if profile.device.kind == "measured":
        recorded["device"] = "cpu" if profile.is_measured_on_cpu else "cuda"
    if profile.threads:
        recorded["threads"] = profile.threads
    return recorded


def _why_model_differs(profile: Profile, path: str) -> str:
    assert profile.model
    with undoing_user_changes():
        file = ModelFile.load(profile.model, trusted=True)
        traced = trace_file(file, file.build(), profile.batch_size)
        findings = profile_findings(profile, path, profile.model.source, traced)
        return next((finding.words for finding in findings if finding.holds is False), "")


def why_plan_is_stale(plan: Plan, profile: Profile, path: str, given: Given) -> str:
    """Say why the plan is not one that is asked for, of this profile, which stands in `path`; "" when it is."""
    if plan.profile != path or not was_made_from(plan, profile):
        return f"it was made from another profile than {path} as it is"
    for name, value in given.items():
        flag = declared(PartitionOptions)[name].flag
        if name in _SAID_BY_PLAN:
            is_as_asked = _SAID_BY_PLAN[name](plan, profile, value)
        elif plan.edited:  # what it was asked for says nothing of it any more
            continue
        elif not hasattr(plan.asked, name):
            return f"it does not record {flag}"
        else:
            is_as_asked = getattr(plan.asked, name) == value
        if not is_as_asked:
            return f"it was made with another {flag} than {_text(value)}"
    return ""


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _has_levels(plan: Plan, profile: Profile, file: str) -> bool:
    from pdtool.artifacts.cluster import ClusterFile

    return plan.cluster.levels == ClusterFile.load(file).cluster().levels


def _has_memory(plan: Plan, profile: Profile, text: str) -> bool:
    asked = None if text == "none" else parse_bytes(text) - profile.reserved_bytes
    return plan.cluster.memory_bytes == asked


# Of options of which a plan speaks itself, whether it has the value that is asked for; others stand in `Plan.asked`.
_SAID_BY_PLAN: dict[str, Callable[[Plan, Profile, Any], bool]] = {
    "topology": lambda plan, _, text: plan.cluster.topology == text,
    "bandwidth": lambda plan, _, text: (
        [level.bandwidth_bytes_per_s for level in plan.cluster.levels] == list(map(parse_bandwidth, text.split(",")))
    ),
    "latency": lambda plan, _, text: (
        [level.latency_s for level in plan.cluster.levels] == list(map(parse_seconds, text.split(",")))
    ),
    "cluster": _has_levels,
    "memory": _has_memory,
    "replicas": lambda plan, _, replicas: tuple(stage.replicas for stage in plan.stages) == replicas,
    "strategy": lambda plan, _, name: plan.strategy == name,
    "straight": lambda plan, _, is_straight: is_straight is (plan.strategy == STRAIGHT.name),
    "schedule": lambda plan, _, name: name in ("auto", plan.schedule),
    "microbatches": lambda plan, _, count: plan.microbatches == count,
    "wire_dtype": lambda plan, _, name: plan.wire_dtype == name,
}


def is_fresh(model: str, output: str | None, settings: tuple[str, ...], given: Given) -> bool:
    """Return whether the file that `profile` would write is there and is what it would measure; say so if it is.

    Args:
        model: as the command takes it.
        output: file to write; None: profiles/NAME.json.
        settings: of the model, as `width=64`.
    """
    ref = parse_ref(model, settings)
    target = output or f"profiles/{file_name(model_name(find_source(ref.source), ref.function))}.json"
    return not why_not_reused(target, ref, given)


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


def freshness_findings(path: str, plan: Plan, profile: Profile) -> Iterator[FreshnessFinding]:
    """Compare a plan, which stands in `path`, with its profile, the model as it is now, and the stage files.

    Raises:
        ModelError: the model, which is compared first, cannot be traced.
    """
    model, traced = plan.model or profile.model, None
    with undoing_user_changes():
        if model is None:
            yield FreshnessFinding("profile", None, f"there is no model behind {plan.profile}")
        else:
            find_model(path, model.source)
            file = ModelFile.load(model)
            traced = trace_file(file, file.build(), plan.batch_size)
            yield from profile_findings(profile, plan.profile, model.source, traced)
        if was_made_from(plan, profile):
            yield FreshnessFinding("plan", True, f"{path} was made from {plan.profile} as it is")
        else:
            words = f"{plan.profile} has changed since {path} was made"
            yield FreshnessFinding("plan", False, words, "run `pdtool partition` again")
        yield from _bundle_findings(path, plan, traced)


def _bundle_findings(path: str, plan: Plan, traced: Traced | None) -> Iterator[FreshnessFinding]:
    """Compare the bundle with the plan and the model, and the stage files with the bundle."""
    folder = bundle_folder(path, plan)
    remedy = "run `pdtool codegen` again"
    if not (folder / Bundle.FILE).exists():
        yield FreshnessFinding("bundle", None, f"there is none in {folder}/; `pdtool run` makes it")
        return
    try:
        bundle = Bundle.load(folder / Bundle.FILE)
    except ArtifactError as error:
        yield FreshnessFinding("bundle", False, error.what, remedy)
        return
    if bundle.digests.get("plan") != plan.plan_sha256:
        yield FreshnessFinding("bundle", False, f"{folder}/ was not made from {path} as it is now", remedy)
    elif traced and bundle.graph_sha256 not in (None, graph_sha256(traced)):
        yield FreshnessFinding("bundle", False, f"{folder}/ was made of a model with other operators", remedy)
    else:
        yield FreshnessFinding("bundle", True, f"{folder}/ was made from {path} as it is")
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
