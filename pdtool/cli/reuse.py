"""Whether a profile or a plan of an earlier command is what `pdtool train` would make, and can be used again.

What the command line does not ask for may be as the file has it. What it asks for, and the file does not record, makes
a plan stale, which takes seconds to make again, but never a profile, which takes minutes, nor a plan that was edited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pdtool.cli.console.terminal import note, status
from pdtool.errors import ArtifactError
from pdtool.units import parse_bandwidth, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import ModelRef
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile

ASKED_FOR = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT)
_NOT_OF_A_FILE = {"output", "as_json", "if_stale"}  # options that say nothing of what stands in it
Given = Mapping[str, Any]  # the options that were asked for, by parameter


def asked_for(context: click.Context) -> dict[str, Any]:
    """Return the options of a command that were given, wherever."""
    names = {param.name for param in context.command.params if isinstance(param, click.Option)} - _NOT_OF_A_FILE
    given = {name: value for name, value in context.params.items() if name in names}
    return {name: value for name, value in given.items() if context.get_parameter_source(name) in ASKED_FOR}


def reusable_profile(path: str, ref: ModelRef, given: Given) -> tuple[Profile | None, str]:
    """Return the profile in a file, if it is the one that is asked for; else None, and why it is not.

    Raises:
        ModelError: the model cannot be traced.
    """
    if not Path(path).exists():
        return None, "it is not there"
    known = readable_profile(path)
    if known is None:
        return None, "what is there cannot be read"
    with status("comparing the model with its profile"):
        why = why_profile_is_stale(known, path, ref, given)
    if why:
        return None, why
    note(f"profile: reusing {path} (minibatch of {known.batch_size}, {known.device.kind} for {known.device.name})")
    return known, ""


def readable_profile(path: str) -> Profile | None:
    """Read the profile in a file; None where there is none that can be read."""
    from pdtool.artifacts.profile import Profile

    try:
        return Profile.load(path)
    except ArtifactError:
        return None


def why_profile_is_stale(profile: Profile, path: str, ref: ModelRef, given: Given) -> str:
    """Say why the profile in `path` is not the one that is asked for; "" when it is.

    The model is traced: an operator that changed in a module that model.py imports is seen, too.

    Raises:
        ModelError: the model cannot be traced.
    """
    from pdtool.frontend.compute_mode import default_device

    if profile.model is None or (profile.model.source, profile.model.function) != (ref.source, ref.function):
        return f"it is of {profile.model or 'no model'}"
    if "model_settings" in given and profile.model.settings != ref.settings:
        return f"it is of {profile.model}"
    if given.get("device") == "auto":
        given = {**given, "device": default_device()}
    for option, recorded in _recorded_in_profile(profile).items():
        if option in given and given[option] != recorded:
            return f"it has {_spelled(option)} {recorded}, not {given[option]}"
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
    from pdtool.cli.freshness import profile_findings
    from pdtool.frontend.model_file import ModelFile
    from pdtool.frontend.tracing import trace_file

    assert profile.model
    with chdir("."):  # the user's module may go to another folder
        file = ModelFile.load(profile.model, trusted=True)
        traced = trace_file(file, file.build(), profile.batch_size)
    findings = profile_findings(profile, path, profile.model.source, traced)
    return next((finding.words for finding in findings if finding.holds is False), "")


def why_plan_is_stale(plan: Plan, profile: Profile, path: str, given: Given) -> str:
    """Say why the plan is not one that is asked for, of this profile, which stands in `path`; "" when it is."""
    from pdtool.cli.inputs import was_made_from

    if plan.profile != path or not was_made_from(plan, profile):
        return f"it was made from another profile than {path} as it is"
    for option, value in given.items():
        is_as_asked = _PLAN_OPTIONS.get(option)
        if is_as_asked is None and not plan.edited:
            return f"it does not record {_spelled(option)}"
        if is_as_asked and not is_as_asked(plan, profile, value):
            return f"it was made with another {_spelled(option)} than {_text(value)}"
    return ""


def _spelled(option: str) -> str:
    """Write a parameter as the command line does: `--batch-size`."""
    return "--" + {"compiled": "compile", "cost_model": "cost"}.get(option, option).replace("_", "-")


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _has_levels(plan: Plan, profile: Profile, file: str) -> bool:
    from pdtool.artifacts.cluster import ClusterFile

    cluster, asked = plan.cluster.cluster(), ClusterFile.load(file).cluster()
    return cluster.levels == asked.levels


def _has_memory(plan: Plan, profile: Profile, text: str) -> bool:
    asked = None if text == "none" else parse_bytes(text) - profile.reserved_bytes
    return plan.cluster.memory_bytes == asked


# Of each option that a plan records, whether the plan has the value that is asked for.
_PLAN_OPTIONS: dict[str, Callable[[Plan, Profile, Any], bool]] = {
    "topology": lambda plan, _, text: "x".join(str(level.size) for level in plan.cluster.levels) == text,
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
    "straight": lambda plan, _, is_straight: (plan.strategy == "straight") is is_straight,
    "schedule": lambda plan, _, name: name in ("auto", plan.schedule),
    "microbatches": lambda plan, _, count: plan.microbatches == count,
}
