"""The functions of pdtool leave the process that calls them as they found it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import NET, Folder
from namespaces import CAN_EMULATE

import pdtool
from pdtool.api.caller import unchanged_caller
from pdtool.errors import UsageError

# Prints what is another than before, after each call.
LAW = """
import gc, logging, multiprocessing, os, random, signal, sys, threading
from multiprocessing import shared_memory
from pathlib import Path
import numpy, torch
import pdtool
import model

KEPT = [logging.getLogger(), logging.getLogger("app"), logging.getLogger("torch")]


def descriptors():
    links = ((name, f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return {name: os.readlink(link) for name, link in links if os.path.lexists(link)}


def state():
    gc.collect()
    gc.freeze()  # what is alive now is not looked through again
    own = str(Path.cwd())
    return {
        "random": random.getstate(),
        "numpy": repr(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "path": [*sys.path, *sys.path_hooks],
        "arguments": [*sys.argv],
        "folder": os.getcwd(),
        "modules": {n: id(m) for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(own)},
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": [(task / "children").read_text() for task in Path("/proc/self/task").glob("*")][:1],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": descriptors(),
        "handlers": [signal.getsignal(number) for number in signal.Signals],
        "logging": [(log.level, log.disabled, log.handlers[:], logging.root.manager.disable) for log in KEPT],
        "settings": (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()),
    }


def call(name, *args, **kwargs):
    before = state()
    result = getattr(pdtool, name)(*args, **kwargs)
    after = state()
    for key in before:
        if before[key] != after[key]:
            print(f"{name}: {key}", before[key] if len(str(before[key])) < 999 else "", after[key])
    return result


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("app").setLevel(logging.DEBUG)
    torch.set_default_dtype(torch.float64)  # which is no default of the model file
    profile = call("profile", "model.py", batch_size=8, threads=1, device="cpu")
    call("profile", "model.py", batch_size=8, device="h100", output="estimated.json")
    plan = call("partition", profile, topology="2", strategy="straight", bandwidth="1GB/s", simplest="0%")
    call("simulate", plan, against=["gpipe"])
    call("check", plan)
    call("codegen", plan)
    call("check", plan, fresh=True)
    call("run", plan, steps=2, timeout="60s", output="run")
    EMULATE
    # a fork server and a resource tracker of the program's own, which it goes on to use
    multiprocessing.set_start_method("forkserver")
    memory = shared_memory.SharedMemory(create=True, size=8)
    with multiprocessing.Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
    plan = call("partition", profile, topology="2", strategy="straight", bandwidth="1GB/s", simplest="0%")
    call("codegen", plan)
    call("run", plan, epochs=2, steps=2, timeout="60s", resume="run")
    call("report", "plans/model-2.yaml", "run", output="page.html")
    call("export", "run", "model.pt")
    memory.close()
    memory.unlink()
    with multiprocessing.Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
    print("done")
"""
REAL = 'call("emulate", plan, compute="real", epochs=1, minibatches=8, output="emulated")'


def output_of(path: Path, law: str) -> str:
    (path / "model.py").write_text(NET)
    (path / "main.py").write_text(law)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "main.py"]
    ran = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.rows_of_the_day(days=2)
def test_each_function_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """First in a plain program, then in one that has processes of its own; with an emulation where there may be one."""
    assert output_of(tmp_path, LAW.replace("EMULATE", REAL if CAN_EMULATE else "")) == "done\n"


def test_a_second_thread_is_refused() -> None:
    """Both would change one process; the message was that the model file calls pdtool."""
    refused: list[str] = []

    def other() -> None:
        with pytest.raises(UsageError) as error:
            pdtool.show("nothing.yaml")
        refused.append(str(error.value))

    with unchanged_caller():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused == ["another thread of this program is calling pdtool; call it from one thread at a time"]


IN_A_POOL = """
import multiprocessing, pdtool
from pdtool.errors import PdtoolError
from concurrent.futures import ProcessPoolExecutor

def train(_):
    try:
        return pdtool.run("plans/model-2.yaml", steps=2, timeout="60s").config
    except PdtoolError as error:
        return str(error)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(train, [0]))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(list(pool.map(train, [0])))
"""


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.usefixtures("stages")
def test_run_in_a_pool_says_what_to_do(road: Folder) -> None:
    refused, trained = output_of(road.path, IN_A_POOL).splitlines()
    assert "a worker of multiprocessing.Pool" in refused
    assert "ProcessPoolExecutor" in refused
    assert trained == "['1-1']"


FROM_STDIN = """
import pdtool

if __name__ == "__main__":
    print(pdtool.run("plans/model-2.yaml", steps=2, timeout="60s").config)
"""


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.usefixtures("stages")
def test_run_in_a_program_from_stdin(road: Folder) -> None:
    """Workers do not look for a file of that name."""
    command = [sys.executable, "-"]
    ran = subprocess.run(command, input=FROM_STDIN, cwd=road.path, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "1-1\n"), ran.stderr


def test_a_model_file_that_calls_pdtool_unguarded_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(f"{NET}\nimport pdtool\npdtool.profile(__file__, batch_size=4)\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.stderr.splitlines()[-1].endswith('under `if __name__ == "__main__":`')
    assert "main.py calls pdtool when it is imported" in ran.stderr.splitlines()[-1]
