"""All workers of a run must be asked for the same: their settings are compared when they meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from pdtool import __version__
from pdtool.artifacts import run_dir
from pdtool.errors import UsageError
from pdtool.files import file_sha256
from pdtool.frontend.user_code import find_source
from pdtool.run.config import RunConfig
from pdtool.run.processes.collectives import all_gather

_OPTIONS = {
    "--epochs": "epochs",
    "--steps": "steps",
    "--target": "target",
    "--seed": "seed",
    "--precision": "precision",
    "--transport": "transport",
    "--wire-dtype": "wire_dtype",
    "--compile": "compiled",
    "--correction": "delay_compensation",
}
_DIGITS = 12  # of a digest that are shown


def run_settings(config: RunConfig) -> dict[str, str]:
    """Return what must be the same on all machines, by the name under which a user knows it."""
    plan = config.plan
    settings = {option: str(getattr(config, name)) for option, name in _OPTIONS.items()}
    settings |= {"--schedule": plan.schedule, "--weights": plan.weights}
    settings |= {"--microbatches": str(plan.microbatches), "--update-every": str(plan.update_every)}
    settings["--set"] = " ".join(f"{key}={value}" for key, value in sorted(config.model.settings.items()))
    settings["--trust"] = str(config.check_stage_files is None)
    digests = {
        "the plan": plan.plan_sha256,
        "bundle.yaml": config.bundle.content_sha256,
        "the model's file": file_sha256(find_source(config.model.source)),
    }
    if config.resume:
        digests["--resume"] = run_dir.read_manifest(run_dir.latest(config.resume)).content_sha256
    return settings | {name: digest[:_DIGITS] for name, digest in digests.items()} | {"pdtool's version": __version__}


def check_agreement(config: RunConfig, group: object) -> None:
    """Compare the settings of all workers of `group`; all call it together.

    Raises:
        UsageError: on every worker, when they differ: in what, and where which value was given.
        PeerError: a worker does not come.
    """
    machine = os.environ.get("GROUP_RANK")
    place = f"rank {os.environ['RANK']}" if machine is None else f"machine {machine}"
    own = (f"{place} ({socket.gethostname()})", run_settings(config))
    differences = describe_differences(all_gather(own, group, "the settings of the run"))
    if differences:
        raise UsageError(
            f"the workers were not asked for the same: {'; '.join(differences)}",
            "start all with the same command, on the same files",
        )


def describe_differences(workers: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Say for each setting that differs which value was given where.

    Args:
        workers: place and settings of each; a setting that a worker does not have is `none`.
    """
    names = dict.fromkeys(name for _, settings in workers for name in settings)
    differences = []
    for name in names:
        places: dict[str, dict[str, None]] = {}
        for place, settings in workers:
            places.setdefault(settings.get(name, "none"), {})[place] = None
        if len(places) > 1:
            values = ", ".join(f"{value} on {' and '.join(where)}" for value, where in places.items())
            differences.append(f"{name} is {values}")
    return differences
