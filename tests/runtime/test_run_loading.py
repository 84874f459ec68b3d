"""Loader workers change when minibatches are loaded, and nothing else; what goes wrong in them is told as without."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import samples
import torch
from conftest import NET, Folder
from harness import CONV2, CONV3, SKIP1, SKIP3, Toy, assert_same, weights
from test_run_endings import wait_until
from test_run_failures import processes, workers_left
from torch.utils.data import DataLoader

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import TensorSpec
from pdtool.artifacts.profile import Profile
from pdtool.errors import ModelError, PdtoolError, WorkerDiedError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import Structure
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.loading.loading_cost import LoadingCost
from pdtool.runtime.loading.minibatch_loader import MinibatchLoader
from pdtool.runtime.loading.minibatch_source import MinibatchSource, _detached
from pdtool.runtime.loading.minibatches import DataPass, DatasetSplit, Minibatches
from pdtool.runtime.messages.stage_io import StageIO
from pdtool.runtime.out_of_memory import is_out_of_memory
from pdtool.units import format_seconds

SYNC = {"weights": "vertical-sync"}
# Every sample, and each update, draws from the generators of torch, Python and numpy; a sum of many numbers depends on
# the threads.
AUGMENTED = replace(
    CONV2,
    model=CONV2.model.replace(
        "return self.x[i], self.y[i]",
        "import numpy, random\n"
        "        scale = random.random() + numpy.random.rand() + torch.rand(400, 400).sum().item() / 160000\n"
        "        return self.x[i] * scale + torch.randn(2, 6, 6), self.y[i]",
    ),
)
CURRICULUM = """
HARDNESS = 0.0
def after_update(named_parameters, update):
    global HARDNESS
    HARDNESS = 1 - 0.9**update
"""


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("more", "replicas", "counts", "settings"),
    [("", (1, 1), (1, 3), {}), ("", (2, 1), (2,), SYNC), (CURRICULUM, (1, 1), (1,), {})],
    ids=["straight", "sync-2-1", "samples that depend on the update"],
)
def test_the_number_of_loader_workers_changes_no_bit(
    tmp_path: Path, more: str, replicas: tuple[int, ...], counts: tuple[int, ...], settings: dict[str, str]
) -> None:
    """Weights, buffers and every line of metrics.jsonl, over two epochs with their validations."""
    model = AUGMENTED.model.replace("self.x[i] * scale", "self.x[i] * (scale + HARDNESS)") if more else AUGMENTED.model

    def trained(workers: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        toy = replace(AUGMENTED, model=model + more)
        spec = harness.job(
            tmp_path / str(workers), toy, replicas, epochs=2, loader_workers=workers, batch_size=4, **settings
        )
        return weights(harness.run(spec)), harness.logged(spec.out)

    expected, lines = trained(0)
    for count in counts:
        found, found_lines = trained(count)
        assert_same(found, expected, rtol=0, atol=0)
        assert found_lines == lines


def test_a_number_in_the_target_travels_to_the_loss(tmp_path: Path) -> None:
    """The mean over the samples, as a sum over their number, in a run whose last minibatch is short."""
    counting = (
        CONV2.model.replace(
            "return F.cross_entropy(output.flatten(0, -2), target.flatten())",
            "return F.cross_entropy(output, target[0], reduction='sum') / target[1]['count']\n"
            "def collate(samples):\n"
            "    x, y = (torch.stack(part) for part in zip(*samples))\n"
            "    return x, (y, {'count': len(samples)})",
        )
        .replace("== target)", "== target[0])")
        .replace("target.numel()", "target[1]['count']")
    )
    expected, found = (
        weights(harness.run(harness.job(tmp_path / name, toy, epochs=2)))
        for name, toy in (("mean", CONV2), ("count", replace(CONV2, model=counting)))
    )
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


def test_a_run_may_go_on_with_another_number_of_loader_workers(tmp_path: Path) -> None:
    expected = weights(harness.run(harness.job(tmp_path / "a", AUGMENTED, epochs=2, **SYNC)))
    part = harness.job(tmp_path / "b", AUGMENTED, epochs=1, loader_workers=2, **SYNC)
    harness.run(part)
    found = weights(harness.run(replace(part, epochs=2, loader_workers=1, resume=part.out)))
    assert_same(found, expected, rtol=0, atol=0)


class UploadInPlace:
    """Stands in for DeviceUpload: a minibatch is loaded while the one before is computed, and taken once."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def start(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not self._copies
        self._copies = {name: tensor.clone() for name, tensor in tensors.items()}

    def finish(self) -> dict[str, torch.Tensor]:
        copies, self._copies = self._copies, {}
        assert copies
        return copies


def upload_ahead() -> None:
    """Let this worker load as one with a GPU does."""
    original = StageIO.__init__

    def with_upload(self: StageIO, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._upload = UploadInPlace()  # type: ignore[assignment]

    StageIO.__init__ = with_upload  # type: ignore[method-assign]


@pytest.mark.parametrize("toy", [SKIP3, SKIP1], ids=["skip-3", "one-stage"])
def test_loading_a_minibatch_ahead_changes_nothing(tmp_path: Path, toy: Toy) -> None:
    """With inputs that later stages take too, and with the target at the first stage."""
    found, expected = (
        weights(harness.run(harness.job(tmp_path / name, toy, epochs=2), prepare))
        for name, prepare in (("ahead", upload_ahead), ("asked", None))
    )
    assert_same(found, expected, rtol=0, atol=0)


# --- one source -------------------------------------------------------------------------------------------------------

TEXT = """
import numpy, os, random, signal, sys, time
import torch
def model(): pass
class Data:
    odd = lambda self, i: i % 2  # which cannot be pickled
    def __len__(self): return 12
    def __getitem__(self, i):
        STATEMENT
        return torch.full((2,), float(i)) + torch.rand(2), self.odd(i)
def dataset(split): return Data()
"""
INPUTS = [TensorSpec(name="x", producer=-1, consumers=(0,), shape=("batch", 2), dtype="float32", gradient=False)]


@contextmanager
def source(folder: Path, workers: int, statement: str = "pass", timeout_s: float = 60.0) -> Iterator[MinibatchSource]:
    """The source of the minibatches of a dataset with a statement in each sample `i`."""
    (folder / "user.py").write_text(TEXT.replace("STATEMENT", statement))
    file = ModelFile.load(ModelRef(source=str(folder / "user.py")), trusted=True)
    loaders = {split: MinibatchLoader(file, split, INPUTS) for split in ("train", "valid")}
    yield MinibatchSource(loaders, workers, timeout_s=timeout_s)


def one_pass(split: str = "train", epoch: int = 1) -> DataPass:
    """Six minibatches of two samples."""
    described = DatasetSplit(12, Structure.of(torch.zeros(1, dtype=torch.int64)))
    return DataPass(split, described, Minibatches(range(12), 2), 0, epoch)


def loaded(source: MinibatchSource, data: DataPass, minibatches: range) -> list[torch.Tensor]:
    source.begin_pass(data, minibatches)
    return [source.load(i)[0][0] for i in minibatches]


def test_new_loader_workers_see_what_the_dataset_has_become(tmp_path: Path) -> None:
    """As by a sampler() that tells it the epoch; those that are kept do not."""
    with source(tmp_path, 1, "return torch.full((2,), float(getattr(self, 'epoch', 0))), 0") as kept:
        pass
    loaders = kept._dataset._loaders
    for keeps_workers, expected in ((True, [0, 0]), (False, [0, 5])):
        minibatches = MinibatchSource(loaders, 1, timeout_s=60.0, keeps_workers=keeps_workers)
        found = []
        for epoch in (0, 5):
            loaders["train"].data.epoch = epoch
            found.append(loaded(minibatches, one_pass(epoch=epoch), range(2))[1][0, 0].item())
        assert found == expected
        loaders["train"].data.epoch = 0


def test_what_is_no_exception_is_named_in_a_loader_worker_too(tmp_path: Path) -> None:
    message = r"^the dataset raised KeyboardInterrupt.* while minibatch 0 of dataset\('train'\) was loaded"
    with source(tmp_path, 1, "raise KeyboardInterrupt") as minibatches, pytest.raises(WorkerDiedError, match=message):
        loaded(minibatches, one_pass(), range(1))


def test_files_that_dataset_leaves_open_are_not_shared_with_loader_workers(tmp_path: Path) -> None:
    """They would be read at one place by all."""
    opened = CONV2.model.replace("self.y = ", "self.file = open(__file__); self.y = ", 1)
    assert opened != CONV2.model
    spec = harness.job(tmp_path, replace(CONV2, model=opened), loader_workers=2)
    file = ModelFile.load(spec.model, trusted=True)
    loader = MinibatchLoader(file, "train", INPUTS)
    assert loader.open_files == [str(tmp_path / "model.py")]
    loader.data.file.close()
    harness.run(spec, refuse_loader_workers)


def refuse_loader_workers() -> None:
    """In a worker: fail if there are loader workers."""
    make = DataLoader.__init__

    def checked(self: Any, *args: Any, **settings: Any) -> None:
        assert not settings["num_workers"]
        make(self, *args, **settings)

    DataLoader.__init__ = checked  # type: ignore[method-assign]


def children() -> list[int]:
    """Processes that this one has started."""
    return [pid for pid, parent, _ in processes() if parent == os.getpid()]


def test_loader_workers_live_from_pass_to_pass_and_end_with_their_source(tmp_path: Path) -> None:
    """Passes of one replica of two, of which the last has nothing to load."""
    before = children()
    with source(tmp_path, 0) as here, source(tmp_path, 2) as apart:
        pids = []
        for data in (one_pass(), one_pass("valid"), one_pass(epoch=2)):
            expected = loaded(here, data, range(1, 6, 2))
            torch.testing.assert_close(loaded(apart, data, range(1, 6, 2)), expected, rtol=0, atol=0)
            pids.append(sorted(set(children()) - set(before)))
        assert loaded(apart, one_pass(), range(0)) == []
    assert len(pids[0]) == 2
    assert pids[0] == pids[1] == pids[2]
    del apart
    wait_until(lambda: children() == before)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_sample_is_the_same_wherever_it_is_loaded(tmp_path: Path, workers: int) -> None:
    with source(tmp_path, workers, "1 / (i - 7)") as minibatches:
        minibatches.begin_pass(one_pass(), range(6))
        for i in range(3):
            minibatches.load(i)
        message = r"^user.py:9: dataset\('train'\), sample 7, raised ZeroDivisionError: division by zero$"
        with pytest.raises(ModelError) as raised:
            minibatches.load(3)
    assert re.match(message, str(raised.value))
    assert "return data[index]" in "".join(traceback.format_exception(raised.value))  # of the process that has loaded


@pytest.mark.parametrize("workers", [0, 1])
def test_what_else_ends_a_loader(tmp_path: Path, workers: int) -> None:
    message = r"^sys.exit\(3\) was called \(user.py:9\); raise an error in the model file"
    with source(tmp_path, workers, "sys.exit(3)") as minibatches, pytest.raises(WorkerDiedError, match=message):
        loaded(minibatches, one_pass(), range(1))
    message = r"^user.py:9: .* sample 0, raised MemoryError"
    with (
        source(tmp_path, workers, "raise MemoryError") as minibatches,
        pytest.raises(Exception, match=message) as raised,
    ):
        loaded(minibatches, one_pass(), range(1))
    assert is_out_of_memory(raised.value)


def test_a_dataset_that_uses_cuda_is_told_to_load_in_the_training_process(tmp_path: Path) -> None:
    """What torch raises in a forked process, which it has been since 1.0."""
    text = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use 'spawn'"
    message = r"sample 0, raised RuntimeError: Cannot re-initialize CUDA in forked subprocess; make samples on"
    with source(tmp_path, 1, f'raise RuntimeError("{text}")') as minibatches, pytest.raises(ModelError, match=message):
        loaded(minibatches, one_pass(), range(1))


def test_a_full_shared_memory_is_not_blamed_on_the_samples(tmp_path: Path) -> None:
    text = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    message = r"^a loader worker found no room in /dev/shm for a minibatch; give /dev/shm more room"
    with source(tmp_path, 1, f'raise RuntimeError("{text}")') as minibatches, pytest.raises(PdtoolError, match=message):
        loaded(minibatches, one_pass(), range(1))


def test_a_dataset_that_starts_processes_is_told_to_load_in_the_training_process(tmp_path: Path) -> None:
    """multiprocessing lets a loader worker, which is daemonic, have none."""
    statement = "import multiprocessing; multiprocessing.Process(target=print).start()"
    message = r"sample 0, raised AssertionError: .*; make samples without other processes, or use --loader-work"
    with source(tmp_path, 1, statement) as minibatches, pytest.raises(ModelError, match=message):
        loaded(minibatches, one_pass(), range(1))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_another_type_are_told_which_one_is_wanted(tmp_path: Path, workers: int) -> None:
    message = (
        r"inputs float64\[2, 2\], but the stages take float32\[2, 2\]; "
        r"convert x to float32, for example with .to\(torch.float32\)$"
    )
    with (
        source(tmp_path, workers, "return torch.ones(2).double(), i") as minibatches,
        pytest.raises(ModelError, match=message),
    ):
        loaded(minibatches, one_pass(), range(1))


def test_more_loader_workers_than_cores_are_nothing_to_warn_of(tmp_path: Path) -> None:
    """They were asked for; torch's own warning is an error here."""
    with source(tmp_path, (os.cpu_count() or 1) + 1) as minibatches:
        assert len(loaded(minibatches, one_pass(), range(2))) == 2


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL) if i == 6 else 0",
            r"^loader worker \d+ was killed by SIGKILL while the run waited for minibatch \d of dataset\('train'\); if",
        ),
        (
            "os._exit(3) if i == 6 else 0",
            r"^loader worker \d+ ended with exit status 3 and reported no error while the run waited",
        ),
        ("os.kill(os.getpid(), signal.SIGBUS) if i == 6 else 0", r"was killed by SIGBUS .*; give /dev/shm more room"),
    ],
    ids=["killed", "exit", "bus-error"],
)
def test_a_loader_worker_that_ends_is_named_at_once(
    tmp_path: Path, statement: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    start_s = time.monotonic()
    with source(tmp_path, 2, statement) as minibatches, pytest.raises(WorkerDiedError, match=message):
        loaded(minibatches, one_pass(), range(6))
    assert time.monotonic() - start_s < 30  # of 60 until it is given up


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch may leave a file open then
def test_a_loader_worker_that_has_ended_while_nobody_waited_is_named_too(tmp_path: Path) -> None:
    before = children()
    with source(tmp_path, 1) as minibatches:
        loaded(minibatches, one_pass(), range(2))
        minibatches.begin_pass(one_pass(epoch=2), range(6))
        (pid,) = set(children()) - set(before)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in children())
        with pytest.raises(
            WorkerDiedError, match=f"^loader worker {pid} was killed by SIGKILL while the run waited for minibatch 0"
        ):
            minibatches.load(0)


def test_a_dataset_that_hangs_is_given_up(tmp_path: Path) -> None:
    message = r"^minibatch 1 of dataset\('train'\) was not loaded within 500 ms; find out what dataset\(\) waits for"
    sleeping = source(tmp_path, 1, "time.sleep(1000 * (i == 3))", timeout_s=0.5)
    with sleeping as minibatches, pytest.raises(WorkerDiedError, match=message):
        loaded(minibatches, one_pass(), range(6))


def test_the_handler_of_dead_children_is_left_as_it_was(tmp_path: Path) -> None:
    """torch's would raise an error wherever the training process is."""
    before = signal.getsignal(signal.SIGCHLD)
    with source(tmp_path, 1) as minibatches:
        loaded(minibatches, one_pass(), range(2))
        assert signal.getsignal(signal.SIGCHLD) == before


def test_views_and_graphs_of_the_dataset_are_loaded_as_plain_tensors(tmp_path: Path) -> None:
    """A tensor with a graph cannot be sent to another process, and of a view all that it is part of would be."""
    statement = "return torch.ones(2, requires_grad=True) * i, torch.arange(100)[i]"
    for workers in (0, 1):
        with source(tmp_path, workers, statement) as minibatches:
            minibatches.begin_pass(one_pass(), range(1))
            (inputs,), (target,) = minibatches.load(0)
        assert not inputs.requires_grad
        assert target.untyped_storage().nbytes() == 16


def test_a_tensor_that_collate_expands_has_memory_of_its_own_size() -> None:
    """Memory in which elements overlap cannot be pinned."""
    expanded = torch.arange(3).expand(4, 3)
    loaded = _detached(expanded)
    assert loaded.is_contiguous()
    assert torch.equal(loaded, expanded)


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loading_s", "workers"),
    [(0.0, 0), (0.9e-3, 0), (1.1e-3, 0), (1.3e-3, 1), (49e-3, 1), (60e-3, 2), (120e-3, 3), (1.0, 20)],
)
def test_as_many_loader_workers_are_needed_as_loading_takes_longer_than_a_minibatch(
    loading_s: float, workers: int
) -> None:
    """With a margin of a fifth; none for less than 2 % of a minibatch, or than it costs to fetch one."""
    assert LoadingCost(loading_s, 60e-3).workers == workers
    assert LoadingCost(loading_s, 1e-6).workers == math.ceil(loading_s / 1e-6 * 1.2) * (loading_s >= 1e-3)


def test_the_period_is_that_of_a_replica_of_the_first_stage() -> None:
    """3 ms a minibatch, over two replicas; without a prediction or a measurement nothing is known."""
    plan = samples.plan()
    assert LoadingCost.of(12e-3, plan) == LoadingCost(12e-3, 6e-3)
    assert LoadingCost.of(None, plan) is LoadingCost.of(1.0, plan.model_copy(update={"predicted": None})) is None


@pytest.mark.parametrize(
    ("loading_s", "workers", "end"),
    [
        (12e-3, 3, "needs one every 6 ms, so 3 loader workers suffice"),
        (3e-3, 1, ", so 1 loader worker suffices"),
        (12e-3, 1, ", so 3 loader workers suffice; 1 is used, because "),
        (12e-3, 0, ", so 3 loader workers suffice; 0 are used"),
        (1e-4, 2, ", so none is needed; 2 are used"),
    ],
)
def test_the_sentence_says_whether_they_suffice(loading_s: float, workers: int, end: str) -> None:
    sentence = LoadingCost(loading_s, 6e-3).sentence(workers)
    assert sentence.startswith(
        f"loading takes {format_seconds(loading_s)} per minibatch in the profile, and each replica of the first"
    )
    assert end in sentence
    assert sentence.endswith("pass a larger --loader-workers") == (0 < workers < LoadingCost(loading_s, 6e-3).workers)
    assert LoadingCost(1e-4, 6e-3).sentence(0) == ""
    assert "because" not in LoadingCost(loading_s, 6e-3).sentence(workers, are_asked=True)


def test_a_profile_measures_loading_and_a_run_takes_loader_workers_for_it(folder: Folder) -> None:
    """Samples that take 2 ms: a minibatch of 4 takes 8 ms, many times as long as this model needs for one."""
    slow = NET.replace("return TensorDataset(", "return Slow(") + SLOW
    folder.write("model.py", slow)
    profiled = folder.pdtool("profile", "model.py", "--batch-size", "4")
    assert re.search(r"loading: \S+ m?s per minibatch", profiled.output)
    assert Profile.load("profiles/model.json").loading_s >= 8e-3
    folder.pdtool("partition", "--topology", "1", "--bandwidth", "1GB/s")
    done = folder.pdtool("run", "--steps", "2", "--device", "cpu")
    assert re.search(
        r"loading takes \S+ m?s per minibatch in the profile, and each replica of the first stage needs one every",
        done.output,
    )
    folder.pdtool("run", "--loader-workers", "-1", code=2)


def test_a_sample_that_cannot_be_read_is_told_by_a_profile(folder: Folder) -> None:
    """The profile itself needs the first minibatch only."""
    folder.write(
        "model.py", NET.replace("return TensorDataset(", "return Slow(") + SLOW.replace("0.002", "0 / (i < 24)")
    )
    done = folder.pdtool("profile", "model.py", "--batch-size", "4")
    assert re.search(
        r"the loading time was not measured: model.py:\d+: dataset\('train'\), sample \d+, ra", done.output
    )
    assert Profile.load("profiles/model.json").loading_s is None


SLOW = """
import time

class Slow(TensorDataset):
    def __getitem__(self, i):
        time.sleep(0.002)
        return super().__getitem__(i)
"""


# --- runs -------------------------------------------------------------------------------------------------------------


def killing(statement: str) -> Toy:
    """A statement in a sample, in a loader worker only: those are not children of what has started the run."""
    body = f"{statement} if os.getppid() != PARENT and i == 7 else 0; return self.x[i]"
    return replace(CONV2, model="import os\nPARENT = os.getppid()\n" + CONV2.model.replace("return self.x[i]", body))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("os.kill(os.getpid(), 9)", r"at 0F\d of epoch 1: loader worker \d+ was killed by SIGKILL while the run"),
        ("os.kill(os.getppid(), 9)", r"(was killed by SIGKILL|died); it was last at "),
    ],
    ids=["a loader worker", "its worker"],
)
def test_whoever_is_killed_is_named_and_nobody_is_left(tmp_path: Path, statement: str, message: str) -> None:
    """A loader worker ends with its worker: it holds the connections that others wait on."""
    spec = harness.job(tmp_path, killing(statement), device="cpu", loader_workers=2)
    known = {pid for pid, _, _ in processes()}
    with pytest.raises(WorkerDiedError, match=r"^rank 0 \(stage 0, replica 0\),? " + message):
        launch(spec)
    wait_until(lambda: not new_orphans(known))


def new_orphans(known: set[int]) -> list[int]:
    """Processes of this session beside the known ones that nobody waits for, or that the fork server has started."""
    own, parents = os.getsid(0), (1, *workers_left())
    return [pid for pid, parent, session in processes() if session == own and pid not in known and parent in parents]


def test_a_run_with_loader_workers_reports_and_leaves_none(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, AUGMENTED, device="cpu", loader_workers=2, epochs=2)
    known = {pid for pid, _, _ in processes()}
    assert launch(spec).epochs == 2
    wait_until(lambda: not new_orphans(known))


REUSED = """
import numpy
_arrays = numpy.zeros((BATCH, 2, 6, 6), numpy.float32)

def collate(samples):
    for array, (x, _) in zip(_arrays, samples):
        array[...] = x.numpy()
    return torch.from_numpy(_arrays[: len(samples)]), torch.stack([y for _, y in samples])
"""


def test_collate_may_fill_one_array_for_each_minibatch(tmp_path: Path) -> None:
    """Although several minibatches are in flight."""
    found = []
    for name, toy in (("new", CONV3), ("reused", replace(CONV3, model=CONV3.model + REUSED.replace("BATCH", "4")))):
        spec = harness.job(tmp_path / name, toy)
        assert spec.plan.batch_size <= 4
        found.append(harness.run(spec))
    for new, reused in zip(*found, strict=True):
        assert all(torch.equal(value, reused.state[name]) for name, value in new.state.items())


@pytest.mark.parametrize(
    ("number", "what"),
    [(errno.EROFS, r"\(Read-only file system\); give /dev/shm more room"), (errno.EAGAIN, "ulimit -u")],
)
def test_what_keeps_loader_workers_from_starting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    """Their locks are files in /dev/shm; each is a process."""

    def refused(loader: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(DataLoader, "__iter__", refused)
    refusal = pytest.raises(PdtoolError, match=rf"the loader workers could not be started .*{what}")
    with source(tmp_path, 1) as minibatches, refusal:
        minibatches.begin_pass(one_pass(), range(1))
