"""A Ctrl-C that comes while an object is destroyed, or torch is imported, is not forgotten."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from conftest import NET

from pdtool.cli.command_line import keep_interrupts
from pdtool.runtime.launch.process_group import StopSignal


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StopSignal(signal.SIGINT)], ids=["KeyboardInterrupt", "signal"])
def test_an_interrupt_during_the_end_of_an_object_comes_again(error, monkeypatch):
    """Once: "Exception ignored in", and the training went on to its end."""

    class Destroyed:
        def __del__(self) -> None:
            raise error

    def work() -> None:
        Destroyed()
        time.sleep(5)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    keep_interrupts()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - began_s < 4


def test_other_errors_during_the_end_of_an_object_are_printed_as_before(monkeypatch):
    class Destroyed:
        def __del__(self) -> None:
            raise ValueError("mine")

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(str(unraisable.exc_value)))
    keep_interrupts()
    Destroyed()
    assert printed == ["mine"]


LATE = """
import os, signal, sys

class Interrupting:  # while the C code of torch imports numpy
    def find_spec(self, name, path=None, target=None):
        if name == "numpy._core.numerictypes":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from pdtool.__main__ import main
main()
"""


def test_an_interrupt_while_torch_is_imported_comes_again(folder):
    """Once: codegen wrote its files and exited with 0, because the C code of torch forgot the exception."""
    folder.write("model.py", NET)
    done = subprocess.run(
        [sys.executable, "-c", LATE, "profile", "model.py"], cwd=folder.path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert not (folder.path / "profiles").exists()


def test_an_interrupt_of_code_without_a_module_comes_at_once(monkeypatch):
    """That of exec() in globals of its own: the handler looks at the name of each module that is executed."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        keep_interrupts()
        with pytest.raises(KeyboardInterrupt):
            exec("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(1000): pass", {})
    finally:
        signal.signal(signal.SIGINT, before)
