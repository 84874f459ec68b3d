"""Trials of the user's code before training leave nothing behind: no variable, no file, no line in a log."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdtool.errors import ModelError, PdtoolError
from pdtool.frontend import trial
from pdtool.frontend.trial import tried

COUNTED: list[int] = []


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_trial_ends_though_user_code_ignores_its_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert tried(os.getpid) != os.getpid()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_files_are_written_for_the_trial_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(torch.ones(2), "ema.pt")
    save_file({"a": torch.ones(2)}, "ema.safetensors")
    Path("log.csv").write_text("1\n")
    before = all_files(tmp_path)
    with open("open.csv", "a") as log:
        log.write("before\n")

        def work() -> list[object]:
            log.write("lost\n")
            log.flush()
            torch.save(torch.load("ema.pt") + 1, "ema.pt.tmp")
            os.replace("ema.pt.tmp", "ema.pt")
            save_file({"a": load_file("ema.safetensors")["a"] + 1}, "ema.safetensors")
            with open("log.csv", "a") as file:
                file.write("2\n")
            os.makedirs("folder/inner", exist_ok=True)
            np.save("folder/inner/x.npy", np.ones(1))
            Path("new.txt").write_text("new")
            with open("log.csv", "br+") as file:
                assert file.read() == b"1\n2\n"
            with open("binary.bin", "bw") as file:
                file.write(b"1")
            os.remove("log.csv")
            sys.stdout.write("dropped")
            return [torch.load("ema.pt"), Path("log.csv").read_text(), Path("new.txt").read_text()]

        assert str(tried(work)) == str([torch.full((2,), 2.0), "1\n2\n", "new"])
    assert all_files(tmp_path) == before | {"open.csv": b"before\n"}
    assert not Path("folder").exists()


def test_variables_and_generators_stay_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()

    def work() -> int:
        COUNTED.append(1)
        torch.rand(3)
        sys.stdout.write("dropped")
        return len(COUNTED)

    assert [tried(work), tried(work)] == [1, 1]
    assert COUNTED == []
    assert torch.equal(torch.get_rng_state(), state)
    assert "dropped" not in "".join(capfd.readouterr())


class OwnError(Exception):
    """It cannot be made from its text alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def fails() -> None:
    raise ModelError("what", "remedy")


def fails_otherwise() -> None:
    raise OwnError(1, "own")


@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (fails, ModelError, "what; remedy"),
        (fails_otherwise, PdtoolError, "OwnError: own"),
        (lambda: os._exit(3), PdtoolError, "has ended without a result; let after_update.* raise an error instead"),
    ],
)
def test_errors_are_those_of_the_work(work, kind, text) -> None:
    with pytest.raises(kind, match=text):
        tried(work)


def test_what_no_forked_process_can_do_is_done_here() -> None:
    """As torch does it in a build for CUDA: loss() was not checked if it calls autograd."""
    own = os.getpid()

    def work() -> int:
        if os.getpid() != own:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        return os.getpid()

    assert tried(work) == own


def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_LIMIT_S", 0.1)
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])
    with pytest.raises(PdtoolError, match=r"the process that tries functions of your model file takes longer than"):
        tried(lambda: time.sleep(1000))
    with pytest.raises(ProcessLookupError):
        os.kill(children[-1], 0)
