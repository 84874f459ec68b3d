"""stdin, stdout and stderr that are closed or full, and terminals of any width."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest
import samples

from pdtool.cli import terminal


def shell(text: str) -> subprocess.CompletedProcess[str]:
    command = text.replace("pdtool", f"{sys.executable} -m pdtool", 1)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("pdtool show - <&-", 3, "no format field"),
        ("pdtool show plan.yaml >&-", 0, ""),
        ("pdtool show nofile 2>&-", 3, ""),
        ("pdtool --help >/dev/full", 1, "error: the output failed: No space left on device\n"),
        ("pdtool show nofile 2>/dev/full", 3, ""),
        ("pdtool init new <&- >&- 2>&-", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full_change_no_exit_code(command, code, says, folder):
    """Once: a traceback, and the exit code of a failure."""
    samples.plan().save("plan.yaml")
    ended = shell(command)
    assert "Traceback" not in ended.stderr
    assert (ended.returncode, says in ended.stderr) == (code, True)


def test_a_note_that_cannot_be_written_ends_nothing(monkeypatch):
    """A training goes on where the file of stderr is on a full disk."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("click.echo", full)
    terminal.note("epoch 1")


def test_nor_does_a_table_after_it(monkeypatch):
    """The console flushes the stream, and with it what the note left there."""
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        terminal.note("epoch 1")
        terminal.show("a table")
    with suppress(OSError):
        full.close()


def test_a_process_without_stderr_is_told_nothing(monkeypatch):
    """A service calls the Python API: `isatty` of None was asked for."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        terminal.note("epoch 1")
        is_shown = terminal.is_progress_shown()
    assert not is_shown


@pytest.mark.parametrize(("columns", "width"), [("³", 80), ("", 80), ("0", 80), ("-5", 80), ("20", 20)])
def test_only_a_number_is_a_width(columns, width, monkeypatch):
    with monkeypatch.context() as patch:  # only here: pytest -v reads it, too, and cannot write so wide
        patch.setenv("COLUMNS", columns)
        measured = terminal.console(err=False).width
    assert measured == width
