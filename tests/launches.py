"""Launches in processes of their own, as `pdtool run` is one on each of several machines.

They come from the fork server of the tests, and so do their workers: a command would import torch, and its fork server
once more.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from socket import socket
from typing import Any

from click.testing import CliRunner
from harness import start_server

from pdtool.cli.commands.app import main
from pdtool.errors import PdtoolError
from pdtool.machines import Machines
from pdtool.profiler import measure
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch.launcher import launch

_LIMIT_S, _GRACE_S = 120.0, 10.0  # for a launch to end by itself, and by a signal
_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]
_Server = tuple[str, bytes | None]


class Launch:
    """A process that launches a job, and keeps what a command would print in `folder`."""

    def __init__(self, spec: RunConfig, folder: Path) -> None:
        start_server()
        rank = spec.machines.node_rank
        self._output, self._errors = folder / f"output-{rank}", folder / f"errors-{rank}"
        arguments = (spec, self._output, self._errors, _server_here())
        self._process = multiprocessing.get_context("forkserver").Process(target=_launch, args=arguments)
        self._process.start()

    def end(self) -> tuple[int | None, str, str]:
        """Wait for its end; return its exit code, the stages' replicas of the report, and what went to stderr."""
        self._process.join(_LIMIT_S)
        self._process.terminate()
        self._process.join(_GRACE_S)
        output = self._output.read_text() if self._output.exists() else ""
        return self._process.exitcode, output, self._errors.read_text()


def _launch(spec: RunConfig, output: Path, errors: Path, server: _Server) -> None:
    _use_fork_server(server)
    with errors.open("w") as told:
        try:
            output.write_text(launch(spec, notify=lambda line: told.write(f"{line}\n")).config)
        except PdtoolError as error:
            told.write(str(error))
            sys.exit(error.exit_code)


def _server_here() -> _Server:
    """Return the fork server's address and, from Python 3.14, its key."""
    return _SERVER._forkserver_address, getattr(_SERVER, "_forkserver_authkey", None)


def _use_fork_server(server: _Server) -> None:
    """Let workers come from the server that this process came from; multiprocessing would start another one."""
    _SERVER._forkserver_address, _SERVER._forkserver_authkey = server
    _SERVER.ensure_running = forkserver.ensure_running = lambda: None


class Command:
    """A process that runs a command of pdtool in a folder, at once with others."""

    def __init__(self, folder: Path, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        start_server()
        descriptor, path = tempfile.mkstemp()
        os.close(descriptor)
        self._output = Path(path)
        given = (folder, self._output, arguments, dict(environment), _server_here())
        self._process = multiprocessing.get_context("forkserver").Process(target=_command, args=given)
        self._process.start()

    def end(self) -> tuple[int | None, str]:
        """Wait for its end; return its exit code, and what it printed."""
        self._process.join(_LIMIT_S)
        self._process.terminate()
        self._process.join(_GRACE_S)
        output = self._output.read_text()
        self._output.unlink()
        return self._process.exitcode, output


def _command(
    folder: Path, output: Path, arguments: Sequence[str], environment: Mapping[str, str], server: _Server
) -> None:
    _use_fork_server(server)
    os.environ.update(environment)
    os.chdir(folder)
    measure._BUDGET_S = 0.0  # as the fixture `folder` has it
    result = CliRunner().invoke(main, arguments, prog_name="pdtool")
    error = result.exception
    output.write_text(result.output + ("" if error is None or isinstance(error, SystemExit) else repr(error)))
    sys.exit(result.exit_code)


def machines(folder: Path, *specs: RunConfig) -> list[Launch]:
    """Launch on several machines, which meet: on each one its spec."""
    endpoint = f"127.0.0.1:{free_port()}"
    launched = (replace(spec, machines=Machines(len(specs), rank, endpoint)) for rank, spec in enumerate(specs))
    return [Launch(spec, folder) for spec in launched]


def end(launches: list[Launch]) -> list[tuple[int | None, str, str]]:
    """Wait for all, and return what `Launch.end` does of each."""
    return [launch.end() for launch in launches]


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
