"""No Python process of pdtool's own runs a file of the current folder that has the name of a module of Python's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import namespaces

CHECKOUT = Path(__file__).parents[2]
MAIN = "from pdtool.__main__ import main\nif __name__ == '__main__':\n    main()\n"
FOREIGN = "open('executed', 'w').write(str(sys.orig_argv)) if (sys := __import__('sys')) else None\n"
# What a user's dataset starts finds the files beside itself, and has the user's environment.
OWN_PROCESS = """
import os, subprocess, sys
def in_own_process(split, original=dataset):
    assert "PYTHONSAFEPATH" not in os.environ
    subprocess.run([sys.executable, "helpers/main.py"], check=True)
    return original(split)
dataset = in_own_process
"""


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize(
    "arguments",
    [
        "profile model.py --batch-size 8",
        "run --steps 2 --loader-workers 2",
        "probe --topology 2 --device cpu",
        pytest.param("emulate --minibatches 6 --compute real", marks=namespaces),
    ],
)
def test_a_file_of_the_current_folder_takes_no_module_of_pythons_place(road, tmp_path_factory, arguments):
    script = tmp_path_factory.mktemp("bin") / "pdtool"  # installed elsewhere, as pip installs it
    script.write_text(MAIN)
    model = road.path / "model.py"
    model.write_text(model.read_text() + OWN_PROCESS)
    road.write("helpers/main.py", "import helper\n")
    road.write("helpers/helper.py", "")
    road.pdtool("codegen")
    for name in ("signal", "selectors", "socket"):
        road.write(f"{name}.py", FOREIGN)
    command = [sys.executable, str(script), *arguments.split()]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    executed = road.path / "executed"
    assert not executed.exists(), executed.read_text()
    assert ended.returncode == 0, ended.stderr
