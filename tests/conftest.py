"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from contextlib import chdir
from datetime import date
from pathlib import Path
from zlib import crc32

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, settings

from pdtool.cli import terminal
from pdtool.cli.commands.app import main

# Before anything imports torch, and for the processes that tests start: others hold the cores, and more threads spin.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes for each worker that compiles

terminal._TICK_S = 3600.0  # a busy machine is no reason to print other lines

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")  # no test is timed

# What starts the tests with `&` or nohup ignores these, and so would all processes that tests send them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes that xdist starts before and after midnight take the same rows.
DAY = int(os.environ.setdefault("PDTOOL_DAY", str(date.today().toordinal())))

NET = """
from collections import OrderedDict
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(width=8):
    layers = dict(first=nn.Linear(4, width), relu=nn.ReLU(), middle=nn.Linear(width, width), last=nn.Linear(width, 2))
    return nn.Sequential(OrderedDict(layers))

def dataset(split):
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

def metrics(output, target):
    return {"accuracy": ((output.argmax(1) == target).sum(), len(target))}
"""


# They take twenty seconds or more, the longest first: xdist would leave some for the end, and a core without work.
LONG_FILES = [
    "test_docs.py",
    "test_laws_memory.py",
    "test_run_endings.py",
    "test_train.py",
    "test_chaos.py",
    "test_cli_road.py",
    "test_emulate.py",
    "test_machine_rendezvous.py",
    "test_models.py",
    "test_laws_plain_loop.py",
    "test_process_state.py",
    "test_run_nodes.py",
    "test_laws_precision.py",
    "test_laws_training.py",
    "test_frontend.py",
    "test_probe.py",
    "test_run_causes.py",
    "test_run_failures.py",
    "test_road.py",
    "test_models_road.py",
    "test_selection.py",
    "test_reproduction.py",
    "test_laws_random_numbers.py",
    "test_safe_path.py",
    "test_zoo.py",
    "test_run_transport.py",
]
PLACES = {name: place for place, name in enumerate(LONG_FILES)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first; of tables that are marked so, the rows of the day are taken."""
    items.sort(key=lambda item: PLACES.get(item.path.name, len(PLACES)))
    if takes_whole_tables(config):
        return
    rows: Counter[str] = Counter()
    left_out = []
    for item in items:
        if mark := item.get_closest_marker("rows_of_the_day"):
            table = item.nodeid.partition("[")[0]
            rows[table] += 1
            if (rows[table] + crc32(table.encode()) + DAY) % mark.kwargs["days"]:  # not all first rows on one day
                left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    not_today = set(left_out)
    items[:] = [item for item in items if item not in not_today]


def takes_whole_tables(config: pytest.Config) -> bool:
    """Whether all rows are asked for: `make test-all`, or a test that is named by its id or by -k."""
    return "PDTOOL_ALL_ROWS" in os.environ or bool(config.option.keyword) or any("::" in a for a in config.args)


def of_the_day(count: int, *, days: int) -> range:
    """The seeds of a law to try today, of so many: all of them in so many days, or where all rows are asked for."""
    return range(count) if "PDTOOL_ALL_ROWS" in os.environ else range(DAY % days, count, days)


def pytest_collection_finish() -> None:
    """Where tests run workers, those of `pdtool run` come from the same fork server: it imports all they need once.

    What collection has imported is not garbage, so the collector can skip it: a million objects.
    """
    gc.collect()
    gc.freeze()
    if harness := sys.modules.get("harness"):
        harness.start_server()


class Folder:
    """An empty folder to work in, and the command `pdtool` in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> Path:
        """A file in it."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def pdtool(self, *arguments: str, code: int | None = 0, stdin: str | None = None) -> Result:
        """Run a command; it must exit with `code` (None: of an error), and never with a traceback."""
        result = CliRunner().invoke(main, list(arguments), input=stdin, prog_name="pdtool")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code or (code is None and result.exit_code), (
            f"exit code {result.exit_code}, not {code}:\n{result.output}"
        )
        return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """An empty current folder, in which models are profiled in as few rounds as may be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pdtool.profiler.measure._BUDGET_S", 0.0)
    return Folder(tmp_path)


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder with a small model.py that has been profiled and partitioned, to be copied."""
    folder = Folder(tmp_path_factory.mktemp("planned"))
    with chdir(folder.path):
        folder.write("model.py", NET)
        folder.pdtool("profile", "model.py", "--batch-size", "8")
        folder.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    return folder


@pytest.fixture
def road(folder: Folder, planned: Folder) -> Folder:
    """A current folder with a small model.py that has been profiled and partitioned."""
    shutil.copytree(planned.path, folder.path, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def generated(planned: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage files of the plan of `planned`, to be copied."""
    folder = Folder(tmp_path_factory.mktemp("generated"))
    shutil.copytree(planned.path, folder.path, dirs_exist_ok=True)
    with chdir(folder.path):
        folder.pdtool("codegen")
    return folder.path / "plans/model-2"


@pytest.fixture
def stages(road: Folder, generated: Path) -> Path:
    """The stage files of the plan in the folder of `road`, for tests that train: each would trace the model again."""
    return Path(shutil.copytree(generated, road.path / "plans/model-2"))
