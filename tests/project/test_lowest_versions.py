"""pdtool works with the lowest versions that setup.cfg allows, of all but torch.

`make check-lowest` tries all rows, and `make test` one each day. Both install these versions beside the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "lowest"
FAST_TESTS = [
    "tests/api/test_api.py",
    "tests/artifacts",
    "tests/cli/test_cli.py",
    "tests/cli/test_cli_help.py",
    "tests/schedule",
]


@pytest.mark.skipif(not FOLDER.exists(), reason="`make test` installs the lowest versions")
@pytest.mark.rows_of_the_day(days=len(FAST_TESTS))
@pytest.mark.parametrize("tests", FAST_TESTS)
def test_tests_pass_with_the_lowest_versions(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-W", "ignore::ImportWarning", tests]
    env = os.environ | {"PYTHONPATH": str(FOLDER)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
