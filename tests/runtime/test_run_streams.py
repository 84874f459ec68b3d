"""An IterableDataset is trained like any other dataset: its samples come in one order, whoever reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from conftest import NET, Folder
from harness import CONV2, Toy, assert_same, weights
from torch.utils.data import DataLoader

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import TensorSpec
from pdtool.artifacts.profile import Profile
from pdtool.errors import ModelError, UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import Structure
from pdtool.profiler.measure import measure_loading_s
from pdtool.runtime.loading.minibatch_loader import MinibatchLoader
from pdtool.runtime.loading.minibatch_source import MinibatchSource, usable_workers
from pdtool.runtime.loading.minibatches import DataPass, DatasetSplit, Minibatches, epochs_go_on, samples_in_epoch

SYNC = {"weights": "vertical-sync"}
TRAINED, SIZE = 26, 4

# The samples of CONV2, one after another.
STREAM = (
    CONV2.model
    + """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data
    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))

class Sized(Stream):
    def __len__(self):
        return len(self.data)

made = dataset

def dataset(split):
    return KIND(made(split))
"""
)


def streamed(kind: str) -> Toy:
    return replace(CONV2, model=STREAM.replace("KIND", kind))


def numbered(order: str) -> Toy:
    """The same samples by their numbers."""
    return replace(CONV2, model=CONV2.model + f"\ndef sampler(dataset, epoch):\n    return list({order})\n")


def at_most_one() -> None:
    """In a worker: fail if several loader workers read the stream."""
    make = DataLoader.__init__

    def checked(self: Any, *args: Any, **settings: Any) -> None:
        assert settings["num_workers"] <= 1
        make(self, *args, **settings)

    DataLoader.__init__ = checked  # type: ignore[method-assign]


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("kind", "steps", "order"),
    [
        ("Sized", None, "range(26)"),
        ("Stream", 5, "(k % 26 for k in range(20 * (epoch - 1), 20 * epoch))"),
        ("Sized", 2, "range(8 * (epoch - 1), 8 * epoch)"),
    ],
    ids=["one-pass-an-epoch", "begins-anew", "goes-on"],
)
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)], ids=["straight", "2-1"])
def test_a_stream_trains_as_a_list_of_its_samples(
    tmp_path: Path, kind: str, steps: int | None, order: str, replicas: tuple[int, ...]
) -> None:
    """To the last bit, with its validation: an epoch is a pass, or where that is longer than --steps, what follows."""
    found, expected = (
        harness.job(tmp_path / name, toy, replicas, epochs=2, steps=steps, loader_workers=workers, **SYNC)
        for name, toy, workers in (("stream", streamed(kind), 3 * (replicas[0] - 1)), ("list", numbered(order), 0))
    )
    assert_same(weights(harness.run(found, at_most_one)), weights(harness.run(expected)), rtol=0, atol=0)
    lines = [harness.logged(spec.out) for spec in (found, expected)]
    assert lines[0] == lines[1]


def test_a_resumed_run_reads_past_what_was_trained(tmp_path: Path) -> None:
    spec = harness.job(tmp_path / "whole", streamed("Stream"), epochs=2, steps=5, **SYNC)
    part = harness.job(tmp_path / "part", streamed("Stream"), epochs=1, steps=5, **SYNC)
    expected = weights(harness.run(spec))
    harness.run(part)
    found = weights(harness.run(replace(part, epochs=2, loader_workers=1, resume=part.out)))
    assert_same(found, expected, rtol=0, atol=0)


def test_a_run_of_other_minibatches_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    """No sample is left out or trained again, though an epoch of --steps has other samples from then on."""
    state: dict[str, Any] = {}
    epochs = [(4, 5, range(20)), (2, 4, range(20, 28)), (8, 4, range(28, 60))]
    for epoch, (size, steps, numbers) in enumerate(epochs, 1):
        toys = {"stream": streamed("Stream"), "list": numbered(f"(k % 26 for k in {numbers})")}
        for name, toy in toys.items():
            out = tmp_path / name / "run"
            settings = {"out": out, "resume": out if epoch > 1 else None, "epochs": epoch, "steps": steps, **SYNC}
            state[name] = weights(
                harness.run(harness.job(tmp_path / name / str(epoch), toy, batch_size=size, **settings))
            )
    assert_same(state["stream"], state["list"], rtol=0, atol=0)


# --- one source -------------------------------------------------------------------------------------------------------

# Shuffled by a buffer, and augmented, by the generators of torch, numpy and Python.
TEXT = """
import itertools, random, time
import numpy, torch
from torch.utils.data import IterableDataset, get_worker_info

class Stream(IterableDataset):
    epoch = None
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        buffer = []
        for i in range(first, 26, step):
            buffer.append(i)
            if len(buffer) > 3:
                i = buffer.pop(random.randrange(4))
                yield torch.full((2,), float(i)) + torch.rand(2) * numpy.random.rand(), i

def model(): pass
def dataset(split): return Stream()
def collate(samples):
    x, y = zip(*samples)
    return torch.stack(x) + torch.rand(2), torch.tensor(y)
"""
INPUTS = [TensorSpec(name="x", producer=-1, consumers=(0,), shape=("batch", 2), dtype="float32", gradient=False)]
EPOCH = 20


def loader(folder: Path, text: str = TEXT, split: str = "train", seed: int = 5) -> MinibatchLoader:
    (folder / "user.py").write_text(text)
    file = ModelFile.load(ModelRef(source=str(folder / "user.py")), trusted=True)
    return MinibatchLoader(file, split, INPUTS, seed=seed)


def epoch_of(epoch: int, *, goes_on: bool = True) -> DataPass:
    """Five minibatches of four samples."""
    described = DatasetSplit(None, Structure.of(torch.zeros(1, dtype=torch.int64)), is_stream=True)
    first = EPOCH * (epoch - 1) if goes_on else 0
    minibatches = Minibatches(range(first, first + EPOCH), SIZE)
    return DataPass("train", described, minibatches, 5, epoch, None if goes_on else epoch)


def loaded(folder: Path, epochs: Sequence[DataPass], numbers: range = range(5), workers: int = 0) -> list[torch.Tensor]:
    """Inputs and targets of some minibatches of each epoch."""
    source = MinibatchSource({"train": loader(folder)}, workers, timeout_s=60.0)
    tensors = []
    for data in epochs:
        source.begin_pass(data, numbers)
        tensors += [tensor for i in numbers for part in source.load(i) for tensor in part]
    return tensors


@pytest.mark.parametrize("goes_on", [True, False])
def test_whoever_reads_a_stream_and_from_where_gets_the_same_samples(tmp_path: Path, goes_on: bool) -> None:
    """In a loader worker, one replica of two, or a run that is resumed: shuffled and augmented as in one process."""
    epochs = [epoch_of(epoch, goes_on=goes_on) for epoch in (1, 2, 3)]
    expected = loaded(tmp_path, epochs)
    torch.testing.assert_close(loaded(tmp_path, epochs, workers=1), expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded(tmp_path, epochs[1:]), expected[10:], rtol=0, atol=0)
    for replica in range(2):
        numbers = range(replica, 5, 2)
        whole = torch.stack(expected[1::2]).view(3, 5, SIZE)
        found = torch.stack(loaded(tmp_path, epochs, numbers)[1::2])
        assert torch.equal(found.view(3, -1, SIZE), whole[:, replica::2])


OF_ITS_PASS = """
import torch
class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.passes, self.generator = 0, torch.Generator()
    def __iter__(self):
        self.passes += 1
        for i in torch.randperm(26, generator=self.generator).tolist():
            yield torch.tensor([float(i), self.passes]), i
def model(): pass
def dataset(split): return Stream()
"""


def test_a_look_at_a_stream_is_no_pass_over_it(tmp_path: Path) -> None:
    """One that counts its passes, or draws from a generator of its own, trained from its second pass on."""
    looked = loader(tmp_path, OF_ITS_PASS, "valid")
    fresh = MinibatchLoader(looked.file, "valid", INPUTS, seed=5)
    fresh._described = looked.describe()
    assert fresh._described.samples == 26
    looked.try_first_minibatch(SIZE)
    for number in (1, 2):
        found, expected = (each.load(range(SIZE), 0, number)[0][0] for each in (looked, fresh))
        assert torch.equal(found, expected)
        assert found[0, 1] == number


LOADED_LATE = """
import torch
class Stream(torch.utils.data.IterableDataset):
    rows, count = None, 0
    def __iter__(self):
        if self.rows is None:
            self.rows = range(26)
            self.count = len(self.rows)
        for i in self.rows[: self.count]:
            yield torch.tensor([float(i), 0.0]), i
def model(): pass
def dataset(split): return Stream()
"""


def test_after_a_look_a_stream_has_all_its_samples(tmp_path: Path) -> None:
    """Its length was put back, but not the samples that it had loaded, so there were none."""
    looked = loader(tmp_path, LOADED_LATE, "valid")
    assert looked.describe().samples == 26
    assert len(list(looked.data)) == 26


def test_each_sample_of_a_pass_comes_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    targets = loaded(tmp_path, [epoch_of(epoch) for epoch in range(1, 7)])[1::2]
    passes = torch.cat(targets)[: 5 * 23].view(5, 23)  # 23 of 26, for three stay in the buffer
    assert all(len(set(numbers.tolist())) == 23 for numbers in passes)
    assert len({tuple(numbers.tolist()) for numbers in passes}) == 5


def test_neither_the_size_of_minibatches_nor_what_others_draw_changes_a_sample(tmp_path: Path) -> None:
    whole = loader(tmp_path)._stream.read(None, range(40))
    stream, parts = loader(tmp_path)._stream, []
    for first in range(0, 40, 5):
        torch.rand(first)
        parts += stream.read(None, range(first, first + 5))
    assert [y for _, y in parts] == [y for _, y in whole]
    assert all(torch.equal(x, expected) for (x, _), (expected, _) in zip(parts, whole, strict=True))
    other = loader(tmp_path, seed=6)._stream.read(None, range(40))
    assert [y for _, y in other] != [y for _, y in whole]


def test_a_stream_with_set_epoch_is_told_the_pass(tmp_path: Path) -> None:
    """As datasets of Hugging Face are, which shuffle by it."""
    told = TEXT.replace("epoch = None", "def set_epoch(self, epoch): self.epoch = epoch").replace(
        ", i\n", ", self.epoch\n"
    )
    of_two = loader(tmp_path, told)._stream.read(None, range(30))
    assert [epoch for _, epoch in of_two] == [1] * 23 + [2] * 7
    assert loader(tmp_path, told)._stream.read(4, [0])[0][1] == 4
    wrong = TEXT.replace("epoch = None", "def set_epoch(self, epoch): 1 / 0")
    with pytest.raises(ModelError, match=r"^user.py:7: set_epoch\(0\) of dataset\('train'\) raised ZeroDivisionError"):
        loader(tmp_path, wrong).describe()


def test_one_loader_worker_reads_a_stream(tmp_path: Path) -> None:
    """Several would each read all of it."""
    for asked, used in ((0, 0), (1, 1), (3, 1)):
        workers, warning = usable_workers(asked, [loader(tmp_path)])
        assert (workers, f"only one of {asked} loader workers is used" in warning) == (used, asked > 1)


# --- what an epoch is -------------------------------------------------------------------------------------------------


def test_an_epoch_is_a_pass_or_what_follows(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV2)

    def epoch(samples: int | None, steps: int | None) -> tuple[int, bool]:
        config = replace(spec, steps=steps)
        split = DatasetSplit(samples, Structure.of(()), is_stream=True)
        return samples_in_epoch(samples, config, drop_last=False), epochs_go_on(split, config)

    assert epoch(26, None) == epoch(26, 7) == epoch(26, 100) == (26, False)
    assert epoch(26, 6) == epoch(None, 6) == (24, True)
    with pytest.raises(UsageError, match=r"without a length.*; give it with --steps"):
        epoch(None, None)
    assert not epochs_go_on(DatasetSplit(26, Structure.of(())), replace(spec, steps=2)), (
        "samples with numbers are shuffled"
    )


@pytest.mark.parametrize("body", ["raise TypeError", "raise NotImplementedError"])
def test_a_stream_may_say_that_it_knows_no_length(tmp_path: Path, body: str) -> None:
    unknown = TEXT.replace("    def __iter__", f"    def __len__(self): {body}\n    def __iter__")
    assert loader(tmp_path, unknown).describe().samples is None
    validation = loader(tmp_path, unknown, "valid")
    samples = validation.describe(60.0).samples
    assert [len(validation._stream.read(0, range(samples))) for _ in range(2)] == [samples, samples]


def test_a_validation_set_without_a_length_is_counted(tmp_path: Path) -> None:
    """Once, in the pass that every validation reads."""
    stream = loader(tmp_path, split="valid")
    assert stream.describe(60.0).samples == 23
    first, second = (stream._stream.read(0, range(23)) for _ in range(2))
    assert [y for _, y in first] == [y for _, y in second]


def test_an_endless_validation_set_needs_a_length(tmp_path: Path) -> None:
    endless = TEXT.replace("range(first, 26, step)", "itertools.count()")
    message = (
        r"^user.py: dataset\('valid'\) has no length and did not end within 50 ms, after \d+ samples; define __len__"
    )
    with pytest.raises(ModelError, match=message):
        loader(tmp_path, endless, "valid").describe(0.05)
    sized = endless.replace("    def __iter__", "    def __len__(self): return 9\n    def __iter__")
    assert loader(tmp_path, sized, "valid").describe(0.05).samples == 9


def test_a_stream_that_ends_before_its_length_is_refused(tmp_path: Path) -> None:
    message = r"^user.py: dataset\('train'\) ends after 23 samples, before its length; give each pass"
    with pytest.raises(ModelError, match=message):
        loader(tmp_path).load(range(20, 24), 0, stream_pass=1)


def test_a_stream_that_goes_on_after_its_length_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for length, warnings in ((23, 0), (20, 1)):
        text = TEXT.replace("    def __iter__", f"    def __len__(self): return {length}\n    def __iter__")
        made = loader(tmp_path, text)
        for number, read in ((1, length), (2, 4), (3, length), (4, length)):
            made.load(range(read), 0, stream_pass=number)
        said = capsys.readouterr().err
        assert said.count(f"has more samples than its length of {length}") == warnings


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_stream_without_samples_is_refused(tmp_path: Path, split: str) -> None:
    empty = TEXT.replace("range(first, 26, step)", "()")
    with pytest.raises(ModelError, match=rf"^user.py: dataset\('{split}'\) is empty: its __iter__ gives no samples"):
        loader(tmp_path, empty, split).describe(60.0)


def test_a_stream_that_can_be_read_once_is_refused(tmp_path: Path) -> None:
    """Where a second pass is needed, and never waited for."""
    once = (
        TEXT.replace("itertools.count()", "").replace("range(first, 26, step)", "NUMBERS")
        + "NUMBERS = iter(range(26))\n"
    )
    with pytest.raises(ModelError, match=r"gives no samples in pass 2 over it; start again each time __iter__"):
        loader(tmp_path, once)._stream.read(None, range(30))


def test_an_error_in_a_stream_names_its_line_and_the_sample(tmp_path: Path) -> None:
    broken = TEXT.replace("buffer.append(i)", "buffer.append(i + 0 // (i - 9))")
    with pytest.raises(ModelError, match=r"^user.py:13: dataset\('train'\), sample 6, raised ZeroDivisionError"):
        loader(tmp_path, broken).load(range(4, 8), 0)


def test_examples_and_loading_times_come_from_the_beginning_of_a_stream(tmp_path: Path) -> None:
    """A stream that ends before one minibatch has no loading time, and is no example of one."""
    file = loader(tmp_path).file
    inputs, target = file.example_batch(23)
    assert inputs.shape == (23, 2)
    assert len(set(target.tolist())) == 23
    assert measure_loading_s(file, 23) is not None
    assert measure_loading_s(file, 24) is None
    with pytest.raises(ModelError, match="the training set has 23 samples, fewer than one minibatch of 24"):
        file.example_batch(24)


def test_a_sampler_cannot_choose_from_a_stream(tmp_path: Path) -> None:
    chosen = TEXT + "def sampler(dataset, epoch): return [0]\n"
    with pytest.raises(
        ModelError, match=r"^user.py:23: sampler\(\) chooses samples by number, but the samples of a Stream \(a"
    ):
        loader(tmp_path, chosen)
    assert loader(tmp_path, chosen, "valid").is_stream


# --- commands ---------------------------------------------------------------------------------------------------------

STREAMED_NET = (
    NET.replace("def dataset(split):", "def samples():")
    + """
from torch.utils.data import IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())

def dataset(split):
    return Stream()
"""
)


def test_a_stream_goes_through_all_commands(folder: Folder) -> None:
    """Example inputs are its first samples; loading is timed; a run needs --steps."""
    folder.write("model.py", STREAMED_NET)
    folder.pdtool("profile", "model.py", "--batch-size", "4")
    assert Profile.load("profiles/model.json").loading_s is not None
    folder.pdtool("partition", "--topology", "1", "--bandwidth", "1GB/s")
    folder.pdtool("codegen")
    folder.pdtool("check")
    failed = folder.pdtool("run", "--device", "cpu", "--loader-workers", "0", code=2)
    assert "dataset('train') is an IterableDataset without a length" in failed.output
    done = folder.pdtool("run", "--steps", "5", "--epochs", "2", "--device", "cpu")
    assert "epoch 2/2: training loss" in done.output
