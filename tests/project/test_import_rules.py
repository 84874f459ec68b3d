"""The structure of the package: who may import whom, no cycles, public modules, one meaning for a name.

`docs/architecture.md` tells the layers; planning never loads torch. Nothing here counts files or lines.
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
import samples

ROOT = Path(__file__).parents[2] / "pdtool"
FILES = sorted(ROOT.rglob("*.py"))
PARTS = ("profiler", "planner", "generator", "runtime")

# What lies in one layer may know its neighbours there, except the four parts, which meet in artifacts.
LAYERS = (
    ("errors", "units", "files", "host", "machines", "processes", "rendezvous"),
    ("graph", "options", "schedule"),
    ("artifacts",),
    ("frontend",),
    PARTS,
    ("emulator",),
    ("reports",),
    ("api",),
    ("cli",),
)
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# The modules of a folder that other folders import; a folder that is not named here has public modules only. A change
# to any other module concerns its folder alone.
PUBLIC = {
    "cli.commands": "app",
    "emulator": "emulation pretend_cluster sleeping_model",
    "frontend": "compute_mode graph_digest leaf_modules model_file model_io model_rules operators random_numbers "
    "tracing trial update_proof user_code user_modules variable_uses",
    "generator": "generate user_functions",
    "planner.choice": "comparison make_plan plan_check plan_figures strategies without_formulas",
    "planner.search": "cuts layouts search",
    "planner.simulator": "engine job result",
    "profiler": "estimate graph_costs measure pipedream_import probe",
    "reports": "chart figures graph_drawing page sentences slowness timeline_drawing",
    "runtime.launch": "diagnosis launcher worker_main",
    "runtime.messages": "open_channels pinned routes stage_io",
    "runtime.stage": "averaging component kept_values losses optimizer pipeline_stage stage_replica tied_parameters",
    "runtime.worker": "checkpoint start_worker",
    "options": "declaration plan_options run_options simulate_options target values",
    "schedule": "",  # what others use of it, the package itself names
}

HOMES = {
    "click": {"cli"},
    "rich": {"cli"},
    "yaml": {"artifacts"},
    "jinja2": {"reports"},
    "markupsafe": {"reports"},  # of jinja2
    "pydantic": {"artifacts"},
    "networkx": {"graph", "profiler"},
    "numpy": {"frontend", "generator", "planner", "runtime"},
    "torch": {"frontend", "profiler", "generator", "runtime", "emulator", "zoo"},
    "sympy": {"frontend", "generator"},  # a dependency of torch, whose sizes are its expressions
    "safetensors": {"runtime"},
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
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def statements(node: ast.AST, at_the_top: bool) -> Iterator[ast.AST]:
    """All nodes of a file, or those that run when it is imported: not in functions, nor for type checking only."""
    is_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    if at_the_top and (is_checking or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from statements(child, at_the_top)


@cache
def imports(path: Path, *, at_the_top: bool = False) -> set[str]:
    """Dotted names of the modules that a file imports: wherever, or at its top."""
    modules = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), at_the_top):
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


def folder_of(name: str) -> str:
    """`pdtool.planner` for pdtool.planner.formulas, and for the package itself."""
    return name if name in PACKAGES else name.rpartition(".")[0]


def of_other_folders(path: Path) -> set[str]:
    """Modules of other folders that a file imports; packages themselves, such as pdtool.schedule, are left out."""
    own = folder_of(module_name(path))
    return {name for name in imports(path) & MODULES.keys() - PACKAGES if folder_of(name) != own}


each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


@each_file
def test_a_file_imports_only_what_lies_below_it(path):
    part = part_of(path)
    if part in ("__init__", "__main__"):
        assert inside(path) <= {"artifacts", "api", "cli", "errors"}
        assert not inside(path) & {other.split(".")[1] for other in imports(path, at_the_top=True) if "." in other}
    elif part == "zoo":
        assert inside(path) == set(), "a model file imports nothing of pdtool"
    else:
        for other in inside(path):
            same = LAYER[other] == LAYER[part] and part not in PARTS
            assert LAYER[other] < LAYER[part] or same, f"{part} imports {other}"


@each_file
def test_a_file_imports_from_no_folder_below_its_own(path):
    own = folder_of(module_name(path))
    if own != "pdtool":  # the package itself, and __main__, name what the program offers
        assert {name for name in of_other_folders(path) if folder_of(name).startswith(f"{own}.")} == set()


@each_file
def test_other_folders_import_public_modules_only(path):
    for name in of_other_folders(path):
        folder, _, module = name.removeprefix("pdtool.").rpartition(".")
        assert folder not in PUBLIC or module in PUBLIC[folder].split(), f"{name} is for its own folder"


@pytest.mark.parametrize("folder", PUBLIC)
def test_a_public_module_is_there_and_imported_from_outside(folder):
    used = {name for path in FILES for name in of_other_folders(path)}
    assert {f"pdtool.{folder}.{module}" for module in PUBLIC[folder].split()} <= used


# Inside the planner: what each of these may know of the others; `choice` joins them.
PLANNER_MAY_KNOW = {
    "placement": set(),
    "stash_table": set(),
    "stage_costs": {"stash_table"},
    "formulas": {"placement", "stage_costs"},
    "plan_cost": {"placement", "stage_costs", "formulas"},
    "simulator": {"placement", "stage_costs", "formulas", "plan_cost"},
    "search": {"placement", "stage_costs", "formulas", "plan_cost"},
}


@pytest.mark.parametrize("name", PLANNER_MAY_KNOW)
def test_the_order_inside_the_planner(name):
    prefix = "pdtool.planner."
    for module, path in MODULES.items():
        if f"{module}.".startswith(f"{prefix}{name}."):
            known = {other.split(".")[2] for other in imports(path) if other.startswith(prefix)}
            assert known - {name} <= PLANNER_MAY_KNOW[name], module


@each_file
def test_each_library_has_its_home(path):
    for library in outside(path):
        assert library in HOMES, f"{library} is new here: give it a home in this test and in setup.cfg"
        assert part_of(path) in HOMES[library], f"{library} stays out of {part_of(path)}"


# --- structure --------------------------------------------------------------------------------------------------------

REPEATED_FILES = {"strategies.py": "what distinguishes a strategy's plans, and how the planner finds them"}


def test_no_import_cycle():
    """The package itself, which offers what it does not load, is left out."""
    files = MODULES.keys() - {"pdtool"}
    graph = nx.DiGraph((name, other) for name in files for other in imports(MODULES[name]) & files)
    cycles = [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]
    assert cycles == []


def test_no_cycle_of_folders():
    edges = {
        (folder_of(name), folder_of(other))
        for name, path in MODULES.items()
        for other in of_other_folders(path)
        if folder_of(name) != "pdtool" != folder_of(other)
    }
    cycles = [sorted(group) for group in nx.strongly_connected_components(nx.DiGraph(edges)) if len(group) > 1]
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


def test_no_text_stands_alone():
    """A `yield "..."` without brackets lost its second line, which is a statement of its own."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for child in getattr(node, "body", [])[1:] if isinstance(getattr(node, "body", None), list) else ():
                is_text = isinstance(child, ast.Expr) and isinstance(child.value, (ast.Constant, ast.JoinedStr))
                assert not is_text, f"{path}:{child.lineno}"


def test_one_formatter_decides():
    marker = "# fmt: " + "skip"
    for path in [*FILES, *Path(__file__).parents[1].rglob("*.py")]:
        assert marker not in path.read_text(encoding="utf-8"), path


# --- what is loaded when ----------------------------------------------------------------------------------------------


def test_the_rules_are_about_what_is_there():
    assert {part_of(path) for path in FILES} == {*LAYER, "__init__", "__main__", "zoo"}
    assert outside(ROOT / "graph.py") == {"networkx"}
    assert "pdtool.artifacts.plan" in imports(ROOT / "artifacts" / "__init__.py")
    assert "errors" in inside(ROOT / "schedule" / "execution.py")


def test_stage_files_of_the_examples_import_torch_only():
    for path in (ROOT.parent / "plans").glob("*/stage_*.py"):
        assert {name.split(".")[0] for name in imports(path)} == {"torch"}


def loaded(module: str) -> set[str]:
    """Modules of pdtool that are imported with one: by imports at the top of files, not inside functions."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += (imports(MODULES[name], at_the_top=True) | {name.rpartition(".")[0]}) & MODULES.keys()
    return seen


NEED_NO_TORCH = (
    *("api.console", "api.inputs", "api.planning", "api.reporting", "artifacts.run_dir", "cli.commands.app"),
    *("cli.artifact_views", "cli.run_view", "options", "planner.choice.plan_check", "profiler.pipedream_import"),
    *("reports.graph_drawing", "reports.page"),
)


@pytest.mark.parametrize("name", NEED_NO_TORCH)
def test_what_needs_no_torch_imports_none(name):
    with_torch = {
        module
        for module in loaded(f"pdtool.{name}")
        if any(library.split(".")[0] == "torch" for library in imports(MODULES[module], at_the_top=True))
    }
    assert with_torch == set()


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
        "import sys\nfrom pdtool.cli.commands.app import main\n"
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


def test_the_workers_server_loads_torch_while_run_does(tmp_path):
    """It is started before; a dry run needs none."""
    code = (
        "import os, sys\nfrom pdtool.api import inputs\nfrom pdtool.cli.commands.app import main\n"
        "inputs.start_server_of_workers = lambda: os._exit(8 if 'torch' in sys.modules else 9)\nmain()\n"
    )
    command = [sys.executable, "-c", code, "run", "plans/mnist-2.yaml", "-o", str(tmp_path / "run")]
    for options, status in (([], 9), (["--dry-run"], 0)):
        done = subprocess.run([*command, *options], cwd=ROOT.parent, capture_output=True, check=False)
        assert done.returncode == status, done.stderr


def test_help_costs_under_half_a_second_of_processor_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "pdtool", "--help"], cwd=ROOT.parent, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
