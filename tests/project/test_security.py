"""SECURITY.md is true: each promise names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
[SECTION] = re.findall(r"## What pdtool promises\n\n.*?\n\n(.*?)\n## ", TEXT, re.DOTALL)
PROMISES = [promise for promise in re.split(r"\n\n|\n(?=- )", SECTION) if not promise.endswith(":")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[:40])
def test_a_promise_names_tests_that_exist(promise: str) -> None:
    named = NAMED.findall(promise)
    assert named, "it names no test"
    assert promise.count("tests/") == len(named)
    for path, function in named:
        code = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(code) if isinstance(node, ast.FunctionDef)}
        assert function in functions or not function, f"{path} has no {function}"
