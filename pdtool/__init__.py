"""pdtool: turn an ordinary PyTorch model into a pipeline-parallel training job.

`pdtool.profile(...)`, `.partition`, `.codegen`, `.run` and the others are the commands in Python. `pdtool.Plan` and
other classes are the files that they exchange, and `pdtool.PdtoolError` is the base of all errors. Each is loaded at
its first use: importing pdtool loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdtool.api.emulating import emulate as emulate
    from pdtool.api.planning import check as check
    from pdtool.api.planning import partition as partition
    from pdtool.api.planning import simulate as simulate
    from pdtool.api.profiling import profile as profile
    from pdtool.api.reporting import export as export
    from pdtool.api.reporting import report as report
    from pdtool.api.reporting import show as show
    from pdtool.api.training import codegen as codegen
    from pdtool.api.training import run as run
    from pdtool.artifacts.artifact import Artifact
    from pdtool.artifacts.bundle import Bundle as Bundle
    from pdtool.artifacts.cluster import ClusterFile as ClusterFile
    from pdtool.artifacts.device import Devices as Devices
    from pdtool.artifacts.plan import Plan as Plan
    from pdtool.artifacts.profile import Profile as Profile
    from pdtool.artifacts.report import Emulation as Emulation
    from pdtool.artifacts.report import Report as Report
    from pdtool.artifacts.run_dir import CheckpointManifest as CheckpointManifest
    from pdtool.artifacts.run_dir import RunState as RunState
    from pdtool.errors import PdtoolError as PdtoolError

__version__ = "0.1.0"

_NAMES_OF = {
    "api.profiling": ("profile",),
    "api.planning": ("partition", "simulate", "check"),
    "api.training": ("codegen", "run"),
    "api.emulating": ("emulate",),
    "api.reporting": ("show", "report", "export"),
    "artifacts.profile": ("Profile",),
    "artifacts.cluster": ("ClusterFile",),
    "artifacts.device": ("Devices",),
    "artifacts.plan": ("Plan",),
    "artifacts.bundle": ("Bundle",),
    "artifacts.report": ("Report", "Emulation"),
    "artifacts.run_dir": ("RunState", "CheckpointManifest"),
    "errors": ("PdtoolError",),
}
_MODULES = {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'pdtool' has no attribute {name!r}")
    if _MODULES[name].startswith("api."):
        from pdtool.cli.command_line import install_terminal

        install_terminal()  # functions report like commands: on stderr, with bars on a terminal
    value = getattr(import_module(f"pdtool.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def as_html(artifact: Artifact) -> str:
    """Return the view of an artifact as HTML, for notebooks."""
    from pdtool.cli.view import html

    return html(artifact)


def __dir__() -> list[str]:
    return sorted((*_MODULES, "__version__"))
