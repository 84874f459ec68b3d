"""Which modules a model file finds, and under which name it is imported itself."""

import marshal
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import suppress

import pytest
import torch
from skeletons import plan_of, skeleton

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend import user_modules
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.trial import tried
from pdtool.frontend.user_code import undoing_user_changes
from pdtool.generator.generate import generate

NET = "import torch\nWIDTH = {width}\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(4, WIDTH)\n"
MODEL = """
import torch
from {module} import Net
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), Net())
def example_inputs(n): return torch.randn(n, 4)
"""


@pytest.fixture(autouse=True)
def _path_as_before():
    """A folder with a random.py is no place for the tests after these."""
    before = sys.path[:]
    yield
    sys.path[:] = before


def width(source):
    """The outputs of a model, as one call of pdtool sees it."""
    with undoing_user_changes():
        return ModelFile.load(ModelRef(source=source), trusted=True).build()[1].out_features


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_signals_mean_what_they_meant_before(tmp_path, monkeypatch):
    """A file that ignores Ctrl-C, as some libraries do when they are imported, would make the launcher deaf."""
    source = write(
        tmp_path / "model.py", f"import signal\nsignal.signal(2, signal.SIG_IGN)\n{MODEL}".replace("{module}", "net")
    )
    write(tmp_path / "net.py", NET.format(width=3))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    before = signal.getsignal(signal.SIGINT)
    assert width(source) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_each_model_file_imports_the_modules_of_its_own_folder_as_they_are_now(tmp_path, monkeypatch):
    """What the program itself has imported is there again afterwards, and works."""
    a, b = (write(tmp_path / folder / "model.py", MODEL.format(module="net")) for folder in "ab")
    for folder, size in (("a", 3), ("b", 5), ("own", 7)):
        write(tmp_path / folder / "net.py", NET.format(width=size))
    monkeypatch.syspath_prepend(tmp_path / "own")
    monkeypatch.delitem(sys.modules, "net", raising=False)  # of another test
    import net

    own, before = net.Net(), sys.modules.copy()
    assert [width(a), width(b), width(a)] == [3, 5, 3]
    write(tmp_path / "a" / "net.py", NET.format(width=11))
    assert [width(a), width(b)] == [11, 5]
    assert sys.modules["net"] is net
    assert type(pickle.loads(pickle.dumps(own))) is type(own)
    assert {name for name in sys.modules.keys() ^ before.keys() if name.startswith(("net", "model"))} == set()
    del sys.modules["net"]


@pytest.mark.rows_of_the_day(days=2)
def test_an_edit_in_the_same_second_is_seen_though_python_wrote_bytecode(tmp_path, monkeypatch):
    """Python itself takes the bytecode of the first text: the size is the same, and so is the second."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    model, net, hooks = (
        write(tmp_path / "model.py", MODEL.format(module="part.net")),
        tmp_path / "part/net.py",
        [*sys.path_hooks],
    )
    program = [sys.executable, "-c", "from part.net import WIDTH; print(WIDTH)"]
    for size in (3, 5, 7):
        write(net, NET.format(width=size))
        os.utime(net, (1e9, 1e9))
        assert subprocess.check_output(program, cwd=tmp_path, text=True) == "3\n"
        assert width(model) == size
    assert hooks == sys.path_hooks


def test_bytecode_of_a_file_is_written_once_the_file_is_two_seconds_old(tmp_path, monkeypatch):
    """And then it is used: here it holds another number than the file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, now_s = tmp_path / "model.py", time.time()
    write(file, "WIDTH = 3\n")
    assert user_modules.import_file("model", file).WIDTH == 3
    assert not list(tmp_path.rglob("*.pyc"))
    monkeypatch.setattr(user_modules.time, "time", lambda: now_s + 9)
    assert user_modules.import_file("model", file).WIDTH == 3
    [bytecode] = tmp_path.rglob("*.pyc")
    bytecode.write_bytes(bytecode.read_bytes()[:16] + marshal.dumps(compile("WIDTH = 5", file, "exec")))
    os.utime(bytecode, (now_s + 9, now_s + 9))
    assert user_modules.import_file("model", file).WIDTH == 5
    del sys.modules["model"]


def test_a_package_is_loaded_again_after_an_edit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "nets" / "model.py", MODEL.format(module="nets.blocks.net"))
    for size in (3, 11, 3):
        write(tmp_path / "nets" / "blocks" / "net.py", NET.format(width=size))
        assert width("nets.model") == size
    assert not {name for name in sys.modules if name.partition(".")[0] == "nets"}


def test_modules_that_did_not_change_are_imported_once(tmp_path):
    """Some, such as those that register operators, cannot be imported twice in a process."""
    path = write(tmp_path / "model.py", MODEL.format(module="net"))
    write(tmp_path / "net.py", NET.format(width=3) + "with open(__file__ + '.log', 'a') as log: log.write('x')\n")
    assert [width(path) for _ in range(3)] == [3] * 3
    assert (tmp_path / "net.py.log").read_text() == "x"


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", ["model", "model-2", "random", "test", "numpy"])
def test_classes_of_a_model_file_pickle_by_the_name_that_python_gives_it(tmp_path, name):
    """A name that a library has stays the library's."""
    path = write(tmp_path / f"{name}.py", NET.format(width=3) + "def model(): return Net()\n")
    libraries = {library: sys.modules.get(library) for library in ("random", "numpy")}
    file = ModelFile.load(ModelRef(source=path), trusted=True)
    assert libraries == {library: sys.modules.get(library) for library in libraries}
    code = "import pickle, sys; print(type(pickle.load(sys.stdin.buffer)).__name__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])}
    if name in ("random", "numpy"):  # first on the path they would be found by everyone
        environment["PYTHONPATH"] = os.getcwd()
        code = f"import torch, sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    given = pickle.dumps(file.build())
    shown = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, env=environment, check=True)
    assert shown.stdout == b"Net\n"


DOUBLING = """
import torch
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, gradient): return gradient * 2
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x): return self.b(Double.apply(self.a(x)))
def model(): return Net()
def example_inputs(n): return torch.randn(n, 4)
"""


@pytest.mark.parametrize("name", ["model-2", "class", "random"])
def test_a_stage_imports_from_a_model_file_of_any_name(tmp_path, name):
    with undoing_user_changes():
        file = ModelFile.load(ModelRef(source=write(tmp_path / f"{name}.py", DOUBLING)), trusted=True)
        profile = skeleton(file)
        assert generate(plan_of(profile, 2), profile, file, tmp_path / "b").proof == "values"


SETTING = """
import signal, torch, warnings
warnings.simplefilter("error")
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("medium")
torch.set_default_dtype(torch.float64)
torch.autograd.set_detect_anomaly(True)
torch.backends.mkldnn.enabled = False
torch.backends.cudnn.benchmark = True
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""


def settings_of_torch():
    return (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.benchmark,
        [*warnings.filters],
    )


@pytest.mark.parametrize("change", ["", "raise ValueError"])
def test_a_file_that_changes_torchs_settings_changes_them_for_itself_alone(tmp_path, change):
    """The next model of a sweep was measured with TF32, and the caller's warnings were errors."""
    source = write(tmp_path / "settings_of_its_own.py", f"{SETTING}{change}\ndef model(): pass\n")
    before = settings_of_torch()
    with undoing_user_changes(), suppress(ModelError):
        ModelFile.load(ModelRef(source=source), trusted=True)
        assert tried(os.getpid) != os.getpid(), "SIGCHLD is not ignored: Python waits for processes"
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    assert settings_of_torch() == before


@pytest.mark.parametrize(
    "mode", [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta"), undoing_user_changes]
)
def test_settings_and_modes_of_the_caller_are_not_those_of_a_worker(mode):
    """A profile made under torch.autocast said fp32, with the bytes and times of bf16."""
    linear = torch.nn.Linear(4, 4)
    with undoing_user_changes(), mode():
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        before = settings_of_torch()
        with undoing_user_changes():
            inside = torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()
            assert inside == (0, "highest")
            assert linear(torch.ones(2, 4)).dtype == torch.float32
            assert torch.ones(1).device.type == "cpu"
        assert settings_of_torch() == before
    assert torch.ones(1).device.type == "cpu"


def test_flags_that_are_frozen_stay_as_they_are():
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(torch.backends.ContextProp.__set__.__globals__, "flags_frozen", lambda: True)
        with undoing_user_changes():
            assert torch.backends.mkldnn.enabled


SPAWNING = """
import multiprocessing, sys, torch
def double(i): return torch.full((4,), 2.0 * i)
def dataset(split):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [(x, x) for x in pool.map(double, range(8))]
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
def loss(output, target): return (output - target).square().mean()
def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=1e-3)
"""


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize("name", ["model", "wave"])
def test_dataset_may_use_a_pool_of_spawned_processes(tmp_path, name):
    write(tmp_path / f"{name}.py", SPAWNING)
    code = f"import pdtool; print(pdtool.profile({name + '.py'!r}, batch_size=4, device='cpu').batch_size)"
    write(tmp_path / "main.py", f"if __name__ == '__main__':\n    {code}\n")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ran = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout == "4\n", ran.stderr


def test_model_py_sees_the_arguments_that_python_would_give_it(tmp_path, monkeypatch):
    code = """
        import argparse, torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=3)
        options = parser.parse_args()
        def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, options.width))
    """
    monkeypatch.setattr(sys, "argv", arguments := ["pdtool", "profile", "model.py", "--batch-size", "8"])
    assert width(write(tmp_path / "model.py", textwrap.dedent(code))) == 3
    assert sys.argv is arguments
