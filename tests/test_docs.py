"""The documentation is true: commands in it are accepted, targets exist, every command and exit code stands in it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from pdtool import __version__, errors
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cli.app import main
from pdtool.partition.checker.check import Check

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:sh|console)\n(.*?)```", README, re.DOTALL)
LINES = [
    line.removeprefix("$ ")
    for block in BLOCKS
    for line in block.splitlines()
    if re.match(r"(\$ )?(\.venv/bin/pdtool|pdtool|make|torchrun|srun) ", line)
]
PDTOOL = [line[re.search(r"\bpdtool ", line).end() :] for line in LINES if not line.startswith("make")]


@pytest.mark.parametrize("line", PDTOOL)
def test_commands_in_the_readme_are_accepted(line):
    words = shlex.split(line.split(">")[0])
    name, command, arguments = main.resolve_command(click.Context(main), words)
    command.make_context(name, arguments)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make")])
def test_targets_in_the_readme_exist(line):
    assert re.search(rf"^{line.split()[1]}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("name", main.commands)
def test_every_command_stands_in_the_readme(name):
    assert any(line.startswith(f"{name} ") for line in PDTOOL)


def test_every_exit_code_stands_in_the_readme():
    known = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.PdtoolError)}
    for code in {0, *known, 130}:
        assert f"\n| {code} | " in README


def test_every_target_has_its_line():
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    described = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert targets == described


def test_ci_calls_the_readmes_test_command():
    assert "make test" in LINES
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_checked_in_examples_are_what_this_version_makes():
    """Else: make examples."""
    profile, plan = Profile.load(ROOT / "profiles" / "digits.json"), Plan.load(ROOT / "plans" / "digits-3.yaml")
    bundle = Bundle.load(ROOT / "plans" / "digits-3" / "bundle.yaml")
    assert not plan.edited
    assert [one.words for one in Check(plan, profile).findings() if one.holds is False] == []
    assert plan.digests["profiles/digits.json"] == profile.content_sha256
    assert bundle.digests["profiles/digits.json"] == profile.content_sha256


def test_this_version_stands_in_the_changelog():
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_names_what_a_model_file_may_hold():
    source = (ROOT / "pdtool/frontend/modelfile.py").read_text()
    for function in ("model", "example_inputs", "dataset", "loss", "optimizer", "scheduler", "metrics"):
        assert f"| `{function}(" in README
        assert function in source
