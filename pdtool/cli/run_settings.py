"""Settings of a run, `run --set lr=0.01`: for the functions of model.py, as far as the plan still holds with them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from typing import TYPE_CHECKING

from pdtool.cli.console.terminal import note
from pdtool.errors import StaleError, UsageError
from pdtool.machines import is_first_worker

if TYPE_CHECKING:
    from pdtool.artifacts.profile import Profile
    from pdtool.cli.inputs import Inputs
    from pdtool.frontend.model_file import ModelFile, Setting


def with_settings(inputs: Inputs, given: Sequence[str]) -> Inputs:
    """Return what a run starts from with other settings of model.py, and say them; as it is where none are given.

    Args:
        given: as `lr=0.01`.

    Raises:
        UsageError: no function of model.py takes one of them; or one changes the operators that were planned.
        ModelError: the model cannot be built with them.
    """
    from pdtool.frontend.user_code import parse_settings

    if not given:
        return inputs
    changes = parse_settings(given)
    model = inputs.model.model_copy(update={"settings": {**inputs.model.settings, **changes}})
    changed = replace(inputs, model=model)
    with chdir("."):  # the user's module may go to another folder
        file = changed.model_file()
        _check_names(file, changes)
        if any(inputs.model.settings.get(key) != value for key, value in file.model_settings.items()):
            _check_operators(file, inputs.profile, changes)
    if is_first_worker(os.environ):
        note(f"settings of this run: {', '.join(f'{key}={value}' for key, value in changes.items())}")
    return changed


def _check_names(file: ModelFile, changes: Mapping[str, Setting]) -> None:
    """Raise UsageError for a setting that no function has a parameter for."""
    for key in (key for key in changes if not file.takes_setting(key)):
        takers = {function: names for function, names in file.setting_names.items() if names}
        near = difflib.get_close_matches(key, [name for names in takers.values() for name in names], n=1)
        listed = ", ".join(f"{function}({', '.join(names)})" for function, names in takers.items())
        known = f"settings can be given to {listed}" if listed else "none of them takes a setting"
        add = f"give one a parameter, as in optimizer(..., {key}=...); {known}"
        what = f"--set {key}: no function of {file.path.name} has a parameter {key}"
        raise UsageError(what, f"did you mean {near[0]}?" if near else add)


def _check_operators(file: ModelFile, profile: Profile, changes: Mapping[str, Setting]) -> None:
    """Raise UsageError where the model has other operators with these settings than were profiled."""
    from pdtool.frontend.graph_digest import check_profile
    from pdtool.frontend.tracing import trace_file

    settings = " ".join(f"--set {key}={value}" for key, value in changes.items())
    remedy = f"profile it with {settings} and partition it again"
    if profile.graph_sha256 is None:
        raise UsageError(f"{settings} reaches {file.ref.function}(), and the profile records no operators", remedy)
    try:
        check_profile(trace_file(file, file.build(), profile.batch_size), profile, file.ref.source)
    except StaleError as error:
        raise UsageError(f"{settings} changes the model's operators: {error.what}", remedy) from error
