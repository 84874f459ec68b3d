"""The documentation is true: its commands and examples are run, every command, target and exit code stands in it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path

import click
import demo
import pytest
from conftest import Folder
from launches import Command
from torch.distributed import run as torchrun

from pdtool import __version__, errors
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cli.commands.app import main
from pdtool.planner.choice.plan_check import check_plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
GUIDE = ("getting-started", "model-file", "planning", "training", "clusters", "ci", "troubleshooting", "python")
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in GUIDE}
ALL_PAGES = "\n".join([README, *PAGES.values()])
BLOCK = re.compile(r"```(sh|python|console)\n(.*?)```", re.DOTALL)
COMMANDS = [line for kind, block in BLOCK.findall(ALL_PAGES) if kind == "sh" for line in block.splitlines()]
[WORKFLOW] = [block for kind, block in BLOCK.findall(README) if kind == "console"]
[DEMO] = [block for kind, block in BLOCK.findall(PAGES["getting-started"]) if kind == "console"]
COMMAND_AND_OUTPUT = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
DEMO_COMMANDS = re.findall(r"^\$ (.*)", DEMO, re.MULTILINE)
_MAX_README_LINES = 130

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(layers=2):
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(16, 2))

def dataset(split):
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters, lr=0.003):
    return torch.optim.Adam([p for _, p in named_parameters], lr=lr)

def metrics(output, target):
    return {"accuracy": ((output.argmax(1) == target).sum(), len(target))}
"""
PUBLISHED = "".join(
    f"node{i} -- Conv2d({i}) -- forward_compute_time={i}.0, backward_compute_time={i}.0, activation_size=4096.0, "
    f"parameter_size=8192.000\n"
    for i in range(1, 5)
) + "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(1, 4))

# What the pages ask for and a test machine lacks -> what stands in for it, and why.
STAND_INS = {
    "--device cuda": "--device cpu",  # no GPU
    "probe --topology 2x2": "probe --topology 2",  # four processes on two cores take 14 s; test_probe has 2x2
    "--rdzv-endpoint node0:29500": "--rdzv-endpoint 127.0.0.1:{port}",  # both machines are this one
    "--set lr=0.01": "--set lr=0.01 --epochs 1",
    "--epochs 40 --target none": "--epochs 21 --target none",  # it goes on as after two epochs
    "--epochs 60 --resume": "--epochs 22 --resume",
    "--epochs 12 --target 'accuracy>=0.97'": "--epochs 12 --steps 16 --target 'accuracy>=0.5'",  # it is enough
    "pdtool train model.py": "pdtool train model.py --epochs 1 --steps 8",  # test_train.py trains the starter's model
    "make -f": "make --dry-run -f",  # its commands are those that are run elsewhere
}
NOT_RUN = {
    "make demo": "its commands are those of the console block, which are run",
    "make test": "the tests would run themselves",
    "pdtool run plans/model-2.yaml -o runs/two": "the guide's two machines are run",
    "pdtool profile pdtool/zoo/llm.py": "it takes 16 s; its command line is parsed",
    "pdtool emulate": "it needs namespaces; test_emulate.py runs it where there are any",
    "torchrun": "each of its processes imports torch; test_run_nodes.py runs it; its command line is parsed",
    "srun": "there is no SLURM here; its command line is parsed",
}


# --- the commands are run ---------------------------------------------------------------------------------------------


class Program:
    """A line of a shell, as a process."""

    def __init__(self, line: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code, and what it printed."""
        output, _ = self.process.communicate(timeout=300)
        return self.process.returncode, output


class Shell:
    """The current folder with what a reader has, and the programs of this environment on the PATH."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "pdtool", folder.path / "pdtool", ignore=shutil.ignore_patterns("__pycache__"))
        programs = Path(sys.executable).parent
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment = {**os.environ, "PATH": path, "HOME": str(folder.path), "GLOO_SOCKET_IFNAME": "lo"}

    def start(self, line: str) -> Command | Program:
        line = self.stood_in(line)
        if "--node-rank" in line and line.startswith("pdtool "):
            return Command(self.folder.path, shlex.split(line, comments=True)[1:], self.environment)
        return Program(line, self.folder.path, self.environment)

    def stood_in(self, line: str) -> str:
        """The line with what stands in for what is not here."""
        for text, stand_in in STAND_INS.items():
            line = line.replace(text, stand_in.format(port=self.port))
        return line

    def run(self, line: str) -> str:
        """Run a line, which must exit with 0, and return what it prints.

        A command of pdtool is run in this process, which has imported torch already.
        """
        if line.startswith("cd "):
            folder, _, line = line.removeprefix("cd ").partition(" && ")
            with chdir(folder):
                return self.run(line)
        if line.startswith("for "):
            return "".join(map(self.run, self.commands_of(line)))
        program, *arguments = shlex.split(self.stood_in(line), comments=True)
        if Path(program).name == "pdtool" and ">>" not in arguments:
            return self.folder.pdtool(*arguments).output
        return self.run_at_once(line)

    def commands_of(self, loop: str) -> list[str]:
        """The commands of pdtool that a loop of the shell would call, as bash says."""
        told = f'pdtool() {{ echo pdtool "${{@@Q}}"; }}; {loop}'
        done = subprocess.run(["bash", "-c", told], env=self.environment, capture_output=True, text=True, check=True)
        assert done.stdout
        return done.stdout.splitlines()

    def run_at_once(self, *lines: str) -> str:
        """Run lines as processes at the same time; each must exit with 0. Returns what the last one prints.

        Commands of pdtool for several machines come from the fork server of the tests, which has torch imported.
        """
        output = ""
        for line, process in [(line, self.start(line)) for line in lines]:
            code, output = process.end()
            assert code == 0, f"{line}\nexit code {code}\n{output}"
        return output


def before(shell: Shell, line: str) -> None:
    """Make what a line takes for granted: files of the reader's, a new folder for a new run."""
    if line.startswith("pdtool run plans/other.yaml"):
        shell.run("pdtool partition profiles/mine.json --topology 2 --straight -o plans/other.yaml")
    if "plans/mine.yaml" in line and "--rdzv-endpoint" in line and "--node-rank 1" not in line:  # for two workers
        shell.run("rm -rf plans/mine runs/mine && cp plans/other.yaml plans/mine.yaml && cp -r plans/other plans/mine")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute or so, and many where others hold the cores
def test_the_guides_commands_run_in_order(folder):
    """All blocks of commands and of Python, page after page, in one folder, as one reader would type them."""
    shell = Shell(folder)
    for name in ("model", "package/module", "moved/model"):
        folder.write(f"{name}.py", MODEL if name == "model" else MODEL.replace("def model", "def function"))
    folder.write("vgg16.graph.txt", PUBLISHED)
    for page, text in PAGES.items():
        for kind, block in BLOCK.findall(text):
            if kind == "sh":
                run_lines(shell, block.splitlines())
            elif kind == "python":
                run_python(shell, page, block)
    assert (folder.path / "model.pt").is_file()
    assert "_PDTOOL_COMPLETE" in (folder.path / ".bashrc").read_text()


def run_lines(shell: Shell, lines: list[str]) -> None:
    """Run lines one after the other, those of two machines at the same time."""
    for line in lines:
        if line.startswith(tuple(NOT_RUN)):
            continue
        before(shell, line)
        if "--node-rank 0" in line:
            second = shell.run_at_once(line, line.replace("--node-rank 0", "--node-rank 1"))
            assert "this is machine 1 of 2" in second or not line.startswith("pdtool run")
        elif "--node-rank 1" not in line:
            shell.run(line)


def run_python(shell: Shell, page: str, block: str) -> None:
    """Run a block; one that is a model file is profiled."""
    if "def model(" in block:
        shell.run(f"pdtool profile {shell.folder.write(f'{page}-example.py', block).name}")
    else:
        exec(compile(block, f"docs/{page}.md", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_the_readmes_workflow(folder):
    """README's model file and README's commands print what README shows."""
    shutil.copy(ROOT / "pdtool/zoo/mnist.py", folder.path)
    prints_what_is_shown(Shell(folder), WORKFLOW)


def test_the_readmes_model_is_that_of_the_example_and_of_the_demo():
    [shown] = [block for kind, block in BLOCK.findall(README) if kind == "python"]
    _, _, code = (ROOT / "pdtool/zoo/mnist.py").read_text(encoding="utf-8").partition('"""\n\n')
    assert [line for line in shown.splitlines() if line] == [line for line in code.splitlines() if line]
    assert "pdtool/zoo/mnist.py" in demo.STEPS[0].command
    assert Plan.load(ROOT / "plans/mnist-2.yaml").profile == "profiles/mnist.json"


@pytest.mark.slow
def test_the_demo_prints_what_is_shown(folder):
    prints_what_is_shown(Shell(folder), DEMO)


def prints_what_is_shown(shell: Shell, console: str) -> None:
    """Run the commands of a block: what they print is shaped as there, whatever its figures."""
    for command, shown in COMMAND_AND_OUTPUT.findall(console):
        output = shell.run(command).replace("certificate: optimal: ", "certificate: ")  # the times decide that
        lines = [" ".join(line.split()) for line in output.splitlines()]
        for start in () if command.startswith("cat ") else shapes(shown):  # where the cuts are, the times decide
            if start == "passed over:":  # the times decide whether another plan is faster
                continue
            begin = start.replace("bottleneck: stage", "bottleneck:")  # or whether it is a link
            assert any(line.startswith(begin) for line in lines), f"{command}\nno line begins with {begin!r}"


def shapes(shown: str) -> list[str]:
    """How lines begin, up to their first figure; tables, of which the times decide rows and columns, are left out."""
    rows = [line for line in shown.splitlines() if len(re.split(r" {2,}", line)) > 4]
    return [" ".join(re.split("[0-9…]", line)[0].split()) for line in shown.splitlines() if line not in rows]


def test_make_demo_runs_the_commands_of_the_console_block():
    assert dry_make("demo")[-1].endswith("tests/demo.py")
    assert [command for command in DEMO_COMMANDS if not command.startswith("cat ")] == [s.command for s in demo.STEPS]


def test_the_demo_shows_lines_of_its_commands_and_no_others():
    output = "\n".join(["profile: still running, 5 s", "a", "b", "epoch 1/2: loss 3", "epoch 1/2, update 3", "wrote x"])
    step = demo.Step("", "pdtool run", r"^epoch \d+/\d+:", first=1)
    assert demo.story(step, output) == ["a", "epoch 1/2: loss 3"]


def dry_make(*arguments: str) -> list[str]:
    """The commands that make would run if nothing were there."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith(tuple(NOT_RUN))])
def test_commands_that_are_not_run_are_accepted(line):
    if line.startswith("make "):
        assert dry_make(line.split()[1])
    else:
        accepted(line[re.search(r"\bpdtool ", line).end() :])
        if line.startswith("torchrun "):
            given = torchrun.parse_args(shlex.split(line)[1:])
            assert (given.module, given.training_script) == (True, "pdtool")


@pytest.mark.parametrize("line", re.findall(rf"`pdtool ((?:{'|'.join(main.commands)}) [^`]*)`", ALL_PAGES))
def test_commands_in_the_text_are_accepted(line):
    accepted(line)


def accepted(line: str) -> None:
    name, command, arguments = main.resolve_command(click.Context(main), shlex.split(line))
    command.make_context(name, arguments)


# --- make -------------------------------------------------------------------------------------------------------------


def test_plans_are_made_freely_and_only_examples_as_a_pipeline():
    partition = ".venv/bin/pdtool partition profiles/"

    def made(target: str) -> list[str]:
        return [line.removeprefix(partition) for line in dry_make(target) if line.startswith(partition)]

    assert made("plans/lstm_lm-2x4.yaml") == ["lstm_lm.json --topology 2x4 --if-stale -o plans/lstm_lm-2x4.yaml"]
    for target in ("plans/mnist-2.yaml", "plans/mnist-2/bundle.yaml", "examples"):
        options = "--topology 2 --bandwidth 100Mbit/s --if-stale"
        assert made(target) == [f"mnist.json {options} -o plans/mnist-2.yaml"]


def test_every_target_has_its_line():
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    described = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert targets == described


def test_ci_calls_the_readmes_test_command():
    assert "make test" in COMMANDS
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


# --- everything stands in the documentation ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", main.commands)
def test_every_command_is_shown(name):
    assert any(re.search(rf"\bpdtool {name}\b", line) for line in COMMANDS)


def test_the_reference_of_commands_is_what_they_say(tmp_path):
    """Else: make docs. A process of its own writes it: click keeps the help option that a command was first given."""
    page, written = ROOT / "docs/cli.md", tmp_path / "cli.md"
    subprocess.run([sys.executable, ROOT / "tests/cli_reference.py", written], cwd=ROOT, check=True, env=os.environ)
    assert page.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= _MAX_README_LINES


def test_the_pages_of_the_documentation_build_strictly(tmp_path):
    """No broken link, no page that is left out, no class that the page of Python names in vain."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "cli.html").is_file()


def test_the_messages_in_troubleshooting_are_those_of_the_code():
    said = set(texts())
    for message in re.findall(r"^### `+ ?(.*?) ?`+ *$", PAGES["troubleshooting"], re.MULTILINE):
        assert any(message in text for text in said), message


def texts() -> Iterator[str]:
    """All texts of pdtool's code; a value that stands in one is written as `…`."""
    for path in (ROOT / "pdtool").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_options_in_pdtool_toml_exist():
    [text] = re.findall(r"```toml\n(.*?)```", PAGES["ci"], re.DOTALL)
    for name, table in tomllib.loads(text).items():
        if name in main.commands:
            assert table.keys() <= {parameter.name for parameter in main.commands[name].params}


def test_every_exit_code_is_documented():
    known = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.PdtoolError)}
    for code in {0, *known, 130}:
        assert f"\n| {code} | " in PAGES["ci"]


def test_checked_in_examples_are_what_this_version_makes():
    """Else: make examples."""
    profile, plan = Profile.load(ROOT / "profiles" / "mnist.json"), Plan.load(ROOT / "plans" / "mnist-2.yaml")
    bundle = Bundle.load(ROOT / "plans" / "mnist-2" / "bundle.yaml")
    assert not plan.edited
    assert [one.words for one in check_plan(plan, profile) if one.holds is False] == []
    assert plan.digests["profiles/mnist.json"] == profile.content_sha256
    assert bundle.digests["profiles/mnist.json"] == profile.content_sha256


def test_this_version_stands_in_the_changelog():
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_pages_name_what_a_model_file_may_hold():
    source = (ROOT / "pdtool/frontend/model_file.py").read_text()
    for constant in ("MAX_GRAD_NORM", "SCHEDULER_STEP", "DROP_LAST", "HINTS"):
        assert f"| `{constant} = " in PAGES["model-file"]
    training = ("optimizer", "scheduler", "metrics", "summarize_metrics", "after_update")
    for function in ("model", "example_inputs", "dataset", "sampler", "loss", *training):
        assert f"| `{function}(" in PAGES["model-file"]
        assert function in source
