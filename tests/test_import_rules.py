"""The structure of the package: who may import whom, no cycles, small folders, one meaning for a name.

`docs/architecture.md` tells the layers; planning never loads torch.
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import networkx as nx
import pytest
import samples

ROOT = Path(__file__).parent.parent / "pdtool"
FILES = sorted(ROOT.rglob("*.py"))
PARTS = ("profile", "partition", "codegen", "run")

# errors, units, what is known of machines and processes <
# graph, cluster, schedule < artifacts < frontend < profile | partition | codegen | run < emulate < cli < api
# graph, cluster, schedule < artifacts < frontend < profile | partition | codegen | run < emulate < report < cli
LAYERS = (
    (
        "errors",
        "units",
        "printable",
        "machines",
        "machine_facts",
        "machine_rendezvous",
        "network_interfaces",
        "process_memory",
    ),
    ("graph", "cluster", "schedule"),
    ("artifacts",),
    ("frontend",),
    PARTS,
    ("emulate",),
    ("report",),
    ("cli",),
    ("api",),
)
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}

HOMES = {
    "click": {"cli"},
    "rich": {"cli"},
    "yaml": {"artifacts"},
    "jinja2": {"report"},
    "markupsafe": {"report"},  # of jinja2
    "pydantic": {"artifacts"},
    "networkx": {"graph"},
    "numpy": {"partition", "run"},
    "torch": {"frontend", "profile", "codegen", "run", "emulate", "zoo"},
    "sympy": {"frontend", "codegen"},  # a dependency of torch, whose sizes are its expressions
    "safetensors": {"run"},
    "sklearn": {"zoo"},
    "mlxtend": {"zoo"},
    "num2words": {"zoo"},
    "transformers": {"zoo"},
}


def part_of(path: Path) -> str:
    """`frontend` for pdtool/frontend/tracing.py; `errors` for pdtool/errors.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    """`pdtool.schedule` for pdtool/schedule/__init__.py, `pdtool.graph` for pdtool/graph.py."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever: also inside functions and for type checking only."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            members = {f"{node.module}.{alias.name}" for alias in node.names}  # some may be modules themselves
            modules |= {name if name in MODULES else node.module for name in members}
    return modules


def inside(path: Path) -> set[str]:
    """Parts of pdtool that a file imports, its own left out."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("pdtool.")}
    return names - {part_of(path)}


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


# Inside partition: what each of these may know of the others; the modules that are not named here join them.
PARTITION_MAY_KNOW = {
    "placement": set(),
    "stage_loads": set(),
    "cost": {"placement", "stage_loads"},
    "simulator": {"placement", "stage_loads", "cost"},
    "search": {"placement", "stage_loads", "cost"},
}


@pytest.mark.parametrize("name", PARTITION_MAY_KNOW)
def test_the_order_inside_partition(name):
    prefix = "pdtool.partition."
    for module, path in MODULES.items():
        if f"{module}.".startswith(f"{prefix}{name}."):
            known = {other.split(".")[2] for other in imports(path) if other.startswith(prefix)}
            assert known - {name} <= PARTITION_MAY_KNOW[name], module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_each_library_has_its_home(path):
    for library in outside(path):
        assert library in HOMES, f"{library} is new here: give it a home in this test and in setup.cfg"
        assert part_of(path) in HOMES[library], f"{library} stays out of {part_of(path)}"


# --- structure --------------------------------------------------------------------------------------------------------

MAX_MODULES = 12  # in a folder
# Two files have the same name only where a command is named like the thing that one looks for under that name.
REPEATED_FILES = {
    "profile.py": "the command, and the artifact that it writes",
    "devices.py": "the command, and finding a device in its table",
    "report.py": "the command, and the artifact that it draws",
    "probe.py": "the command, and the measurement that it starts",
}


def test_no_import_cycle():
    graph = nx.DiGraph((name, other) for name, path in MODULES.items() for other in imports(path) & MODULES.keys())
    cycles = [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]
    assert cycles == []


def test_a_class_name_means_one_thing():
    """Over the whole package, private names too; files of the zoo stand each for itself, as users' files do."""
    places = defaultdict(list)
    for path in FILES:
        if part_of(path) != "zoo":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_file_name_means_one_thing():
    places = defaultdict(list)
    for path in FILES:
        if not path.name.startswith("__"):
            places[path.name].append(str(path.relative_to(ROOT)))
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    assert repeated.keys() == REPEATED_FILES.keys(), repeated
    for name, files in repeated.items():
        assert len(files) == 2
        assert f"cli/commands/{name}" in files


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_can_be_taken_in_at_a_glance(folder):
    if folder == ROOT / "cli" / "commands":
        pytest.skip("it has a file for each command, however many these are")
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MAX_MODULES, sorted(modules)


def test_one_formatter_decides():
    marker = "# fmt: " + "skip"
    for path in [*FILES, *Path(__file__).parent.rglob("*.py")]:
        assert marker not in path.read_text(encoding="utf-8"), path


# --- what is loaded when ----------------------------------------------------------------------------------------------


def test_the_rules_are_about_what_is_there():
    assert {part_of(path) for path in FILES} == {*LAYER, "__init__", "__main__", "zoo"}
    assert outside(ROOT / "graph.py") == {"networkx"}
    assert "pdtool.artifacts.plan" in imports(ROOT / "artifacts" / "kinds.py")
    assert "errors" in inside(ROOT / "schedule" / "validate.py")


def test_stage_files_of_the_examples_import_torch_only():
    for path in (ROOT.parent / "plans").glob("*/stage_*.py"):
        assert {name.split(".")[0] for name in imports(path)} == {"torch"}


WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    ["schema", "plan"],
    ["devices"],
    ["help", "run"],
    ["makefile"],
    ["init", "project"],
    ["show", "profile.json"],
    ["show", "plan.yaml"],
    ["show", "cluster.yaml"],
    ["import", "graph.txt", "-o", "imported.json"],
    ["partition", "profile.json", "--topology", "2x2", "-o", "out.yaml"],
    ["simulate", "out.yaml", "--sweep", "bandwidth=1..10Gbit/s", "--svg", "out.svg", "--trace", "out.json"],
    ["report", "out.yaml", "-o", "out.html"],
    ["show", "out.yaml", "--graph", "-o", "out-graph.svg"],
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
        "import sys\nfrom pdtool.cli.app import main\n"
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
