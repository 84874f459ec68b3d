"""Slips on the command line and in pdtool.toml: what is said of them."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("toml", "code", "says"),
    [
        (b"[run]\nepochs = " + b"9" * 5000, 3, "is not TOML (Exceeds the limit"),
        (b"\xef\xbb\xbf[devices]\njson = true\n", 0, ""),
        (b"[profile]\nset = {}\n", 0, ""),
        (b"[run]\nset = []\n", 0, ""),
    ],
)
def test_a_project_file_is_read_or_its_fault_said(toml, code, says, folder):
    (folder.path / "pdtool.toml").write_bytes(toml)
    assert says in folder.pdtool("devices", code=code).stderr


def test_a_value_of_a_project_file_that_is_refused_is_said_to_be_of_it(folder):
    """Nobody has typed --epochs."""
    folder.write("pdtool.toml", "[run]\nepochs = 2.5\nset = ['width']\n")
    error = folder.pdtool("run", "plan.yaml", code=2).stderr
    assert "invalid value for '--epochs': '2.5' is not a whole number" in error
    assert "pdtool.toml gives run these options: epochs = '2.5', set = ['width']" in error


def test_a_name_in_capitals_suggests_the_same_name(folder):
    """Once: `did you mean v100?`."""
    assert "did you mean h100?" in folder.pdtool("devices", "H100", code=2).stderr


def test_what_init_says_can_be_typed(folder):
    assert "next: cd 'my model' && pdtool train model.py" in folder.pdtool("init", "my model").stderr
