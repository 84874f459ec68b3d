"""Settings of functions in model.py (`--set lr=0.01`): as texts, and those of a run that differ from the plan's.

A run may change any setting that leaves the model's operators as they were planned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING

from pdtool.api.console import note
from pdtool.api.inputs import Inputs
from pdtool.artifacts.profile import Profile
from pdtool.errors import StaleError, UsageError, suggestion
from pdtool.machines import is_first_worker

if TYPE_CHECKING:
    from pdtool.frontend.model_file import ModelFile, Setting

Settings = Mapping[str, str | int | float | bool]


def assignments(settings: Settings | None) -> tuple[str, ...]:
    """Write settings as on the command line, with quotes around texts, so that "8" stays a text; raises UsageError."""
    if not isinstance(settings, Mapping | None):
        raise UsageError(f"settings={settings!r:.80} is not a dict of names and values", "pass one, as {'lr': 0.01}")
    return tuple(f"{name}={_plain(name, value)!r}" for name, value in (settings or {}).items())


def _plain(name: str, value: object) -> str | int | float | bool:
    """Return the value of a setting without its subclass: that of a numpy number or an Enum has a repr of its own.

    Raises:
        UsageError: an artifact cannot hold it.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"{name!r:.80} is not the name of a setting", "pass a dict such as {'lr': 0.01}")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise UsageError(f"setting {name}={value!r:.80} is not a str, number or bool", "pass one of these")


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
        before, now = inputs.model.typed_settings, model.typed_settings
        if any(before.get(key) != now[key] for key in file.model_settings):
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
