"""Artifacts that `train` and `--if-stale` reuse: those made with the same options from the same inputs.

A command depends only on its options and pdtool.toml, never on earlier commands. An artifact made with other options is
kept, and the new one gets its own name from the digest of its options, so that the same options find it again. While
one `train` profiles and partitions, others in the same folder wait (`one_at_a_time`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pdtool.api.console import muted, note, status
from pdtool.api.inputs import default_plan_path, file_name, was_made_from
from pdtool.api.planning import NO_LIMIT, PlanRequest, was_edited
from pdtool.artifacts.artifact import Artifact, ModelRef
from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, PdtoolError, StaleError, UsageError
from pdtool.files import write_remedy
from pdtool.options.declaration import Option, declared
from pdtool.options.plan_options import PartitionOptions, ProfileOptions
from pdtool.options.values import Flag
from pdtool.planner.placement import plan_name
from pdtool.units import format_bits_rate, format_bytes, format_seconds

_DIGEST_LENGTH = 8
_POLL_S = 0.2
_MAX_WAIT_S = 3600.0  # wait for another pdtool that profiles: a large model takes minutes


def own_path(path: str, kind: type[Artifact], is_other: Callable[[Any], str], *made_from: Any) -> tuple[str, str]:
    """Return the path of an artifact made with some options, and why it is not `path`.

    Args:
        is_other: says with which other options an artifact was made; "" for the same ones.
        made_from: the options and other inputs of the artifact.
    """
    try:
        why = is_other(kind.load(path)) if Path(path).exists() else ""
    except ArtifactError:  # nobody can use it
        why = ""
    if not why:
        return path, ""
    content = [vars(each) if is_dataclass(each) else each for each in made_from]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    return str(Path(path).with_stem(f"{Path(path).stem}-{digest[:_DIGEST_LENGTH]}")), f"keeping {path}: {why}"


def why_not_reused(path: str, ref: ModelRef, asked: ProfileOptions) -> str:
    """Say why the profile in a file is not the requested one; "" if it is, with a note.

    Raises:
        ModelError: the model cannot be traced.
    """
    from pdtool.api.staleness import why_profile_is_stale  # it loads torch

    if not Path(path).exists():
        return "it does not exist"
    try:
        known = Profile.load(path)
    except ArtifactError:
        return "the existing file cannot be read"
    with status("comparing the model with its profile"):
        why = other_profile(known, ref, asked) or why_profile_is_stale(known, path)
    if not why:
        settings = "".join(f", {key}={value}" for key, value in ref.settings.items())
        of = f"minibatch of {known.batch_size}{settings}, {known.device.kind} for {known.device.name}"
        note(f"profile: reusing {path} ({of})")
    return why


def fresh_profile(model: str, output: str | None, asked: ProfileOptions) -> Profile | None:
    """Return the profile that `profile` would write if it exists and is up to date; otherwise None, and note why.

    Args:
        model: in the form for the command.
        output: file to write; None: profiles/NAME.json.
    """
    from pdtool.frontend.user_code import find_source, model_name, parse_ref

    ref = parse_ref(model, asked.model_settings)
    target = output or f"profiles/{file_name(model_name(find_source(ref.source), ref.function))}.json"
    why = why_not_reused(target, ref, asked)
    if why:
        note(f"profile: making {target}: {why}")
    return None if why else Profile.load(target)


def other_profile(profile: Profile, ref: ModelRef, asked: ProfileOptions) -> str:
    """Say with which other options, or for which other model, a profile was made; "" for the same."""
    if profile.model is None or profile.model != ref:
        return f"it is for {profile.model or 'no model'}, not for {ref}"
    if (had := profile.asked) is None:
        return "it does not record its options"
    known_same = {"model_settings": True, "device": _is_device(profile, had.device, asked.device)}
    known_same["threads"] = asked.threads in (had.threads, profile.threads)
    for name, option in declared(ProfileOptions).items():
        before, now = getattr(had, name), getattr(asked, name)
        if not known_same.get(name, before == now):
            return _made_with(option, before, now)
    return ""


def _is_device(profile: Profile, had: str, asked: str) -> bool:
    """Whether a profile is for the requested device: of the same name, or of the one here that `auto` stands for."""
    from pdtool.frontend.compute_mode import default_device

    if profile.device.kind == "estimated":
        return had == asked
    measured = "cpu" if profile.is_measured_on_cpu else "cuda"
    return measured == (default_device() if asked == "auto" else asked)


def why_plan_not_reused(path: str, request: PlanRequest) -> str:
    """Say why the plan in a file is not the requested one, or not from the current profile; "" if it is, with a note.

    Raises:
        StaleError: it is not, but someone edited it.
        ArtifactError: it cannot be read; someone may have edited it.
    """
    if not Path(path).exists():
        return "it does not exist"
    plan = Plan.load(path)
    why, edited = other_plan(plan, request), ", edited by hand" if was_edited(path) else ""
    if _is_same_path(plan.profile, request.path) and not was_made_from(plan, request.profile):
        why = f"it was made from an earlier version of {request.path}"
    if not why:
        note(f"partition: reusing {path} ({plan.config}, schedule {plan.schedule}{edited})")
    elif edited:
        remedy = "partition to another file with -o and repeat your edits there, or remove this one"
        raise StaleError(path, f"was edited by hand and would be replaced, because {why}", remedy)
    return why


def fresh_plan(profiles: Sequence[str], output: str | None, asked: PartitionOptions) -> Plan | None:
    """Return the plan that `partition` would write if it exists and is up to date; otherwise None, and note why.

    Args:
        profiles: paths of the profiles, as `partition` gets them.
        output: file to write; None: plans/NAME-TOPOLOGY.yaml.

    Raises:
        UsageError: there are several profiles, or the only one is stdin; or see `PlanRequest.read`.
        StaleError, ArtifactError: see `why_plan_not_reused`.
    """
    if len(profiles) > 1 or profiles[0] == "-":
        what = f"--if-stale compares a plan with the file of one profile, not with {' '.join(profiles)}"
        raise UsageError(what, "name one file, or leave --if-stale out")
    with muted():  # what `partition` says, if it is run
        request = PlanRequest.read(profiles[0], asked)
    target = output or default_plan_path(plan_name(request.profile, request.cluster, request.options.strategy))
    why = why_plan_not_reused(target, request)
    if why:
        note(f"partition: making {target}: {why}")
    return None if why else Plan.load(target)


def other_plan(plan: Plan, request: PlanRequest) -> str:
    """Say with which other options, or from which other profile, a plan was made; "" for the same."""
    if not _is_same_path(plan.profile, request.path):
        return f"it was made from {plan.profile}, not {request.path}"
    if plan.asked is None:
        return "it does not record its options"
    asked, clusters = request.options, (plan.cluster, request.cluster)
    figures = {
        "topology": (plan.cluster.topology, request.cluster.topology),
        "bandwidth": tuple(_each(c, "bandwidth_bytes_per_s", format_bits_rate) for c in clusters),
        "latency": tuple(_each(c, "latency_s", format_seconds) for c in clusters),
        "memory": tuple(_memory(c, request.profile) for c in clusters),
        "wire_dtype": (plan.wire_dtype, request.profile.wire_dtype),
        "samples_per_update": (
            _samples_per_update(plan.asked, plan.batch_size),
            _samples_per_update(asked, request.profile.batch_size),
        ),
    }
    of_plan = (field.name for field in fields(asked) if field.name != "update_every")  # which no option asks for
    figures |= {name: (getattr(plan.asked, name), getattr(asked, name)) for name in of_plan}
    for name, (before, now) in figures.items():
        if before != now:
            return _made_with(declared(PartitionOptions)[name], before, now)
    return "" if plan.cluster == request.cluster else "it was made for another cluster"


def _is_same_path(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


def _each(cluster: Cluster, name: str, in_words: Callable[[float], str]) -> str:
    return ",".join(in_words(getattr(level, name)) for level in cluster.levels)


def _memory(cluster: Cluster, profile: Profile) -> str:
    """Return `--memory` as it was given: a cluster has what is left for tensors."""
    tensor_bytes, sharing = cluster.memory_bytes, cluster.levels[-1].size
    return NO_LIMIT if tensor_bytes is None else format_bytes(profile.memory_for(tensor_bytes, sharing))


def _samples_per_update(asked: PlanOptions, batch_size: int) -> int | None:
    return asked.update_every and asked.update_every * batch_size


def _made_with(option: Option, before: Any, now: Any) -> str:
    if isinstance(option.value, Flag):
        return f"it was made with {option.switched(on=before)}, not {option.switched(on=now)}"
    return f"it was made with {option.flag} {_text(before)}, not {_text(now)}"


def _text(value: Any) -> str:
    return "left out" if value is None else "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a folder while artifacts are made in it, because two measured at once would both be too slow.

    Raises:
        PdtoolError: it cannot be made, or another pdtool has locked it for an hour.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PdtoolError(f"{folder}/ could not be made ({error.strerror})", write_remedy(error)) from error
    descriptor, since = os.open(folder, os.O_RDONLY), 0.0
    try:
        while not _is_locked(descriptor):
            if not since:
                note(f"waiting for another pdtool that is writing files in {folder}/")
                since = time.monotonic()
            if time.monotonic() - since > _MAX_WAIT_S:
                what = f"another pdtool has locked {folder}/ for an hour"
                raise PdtoolError(what, "end it, or work in a copy of this folder")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Take the lock of a folder; also True if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
