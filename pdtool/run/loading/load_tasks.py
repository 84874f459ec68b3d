"""What a process that loads is told and gives back: the same in the training process and in a loader worker."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from pdtool.errors import ModelError, PdtoolError, WorkerDiedError, describe_error
from pdtool.run.data import DataPass
from pdtool.run.loading.minibatch_loader import MinibatchLoader
from pdtool.run.processes.out_of_memory import is_out_of_memory
from pdtool.run.processes.worker_end import exit_error

LoadedMinibatch = tuple[list[Tensor], list[Tensor]]  # the inputs and the tensors of the target, [samples, ...] each
_NO_CHILDREN = "daemonic processes are not allowed to have children"  # of multiprocessing
_NO_CUDA = "Cannot re-initialize CUDA in forked subprocess"  # torch goes on with advice for its own DataLoader
_REMEDY_FOR_CUDA = "let samples be tensors of the CPU, or load in the training process: --loader-workers 0"


@dataclass(frozen=True)
class LoadTask:
    """A minibatch to be loaded.

    Attributes:
        split: name of the split of the dataset.
        indices: of its samples.
        seed: of random augmentation.
        stream_pass: see DataPass.
    """

    split: str
    minibatch: int
    indices: Sequence[int]
    seed: int
    stream_pass: int | None

    def __str__(self) -> str:
        return f"minibatch {self.minibatch} of dataset({self.split!r})"


class LoadTasks:
    """The tasks of the present pass, in order; made one by one, for there may be many."""

    def __init__(self) -> None:
        self._data: DataPass | None = None
        self._minibatches: Sequence[int] = ()

    def begin_pass(self, data: DataPass, minibatches: Sequence[int]) -> None:
        """Let the tasks be those of some minibatches of a pass."""
        self._data, self._minibatches = data, minibatches

    def __iter__(self) -> Iterator[LoadTask]:
        return map(self._task, self._minibatches)

    def _task(self, i: int) -> LoadTask:
        data = self._data
        assert data
        return LoadTask(data.split_name, i, data.minibatches[i], data.seed(i), data.stream_pass)


class TaskDataset(Dataset[LoadedMinibatch | BaseException]):
    """Minibatches by their tasks; an error is returned, for DataLoader would lose what it is."""

    def __init__(self, loaders: Mapping[str, MinibatchLoader]) -> None:
        self._loaders = loaders

    def __getitem__(self, task: LoadTask) -> LoadedMinibatch | BaseException:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in loader workers: the order of a sum depends on it
        try:
            inputs, target = self._loaders[task.split].load(task.indices, task.seed, task.stream_pass)
            return [_detached(tensor) for tensor in inputs], [_detached(tensor) for tensor in target]
        except PdtoolError as error:
            return error if get_worker_info() is None else _portable(error)
        except SystemExit as error:
            return exit_error(error)
        except BaseException as error:  # KeyboardInterrupt and the like, which would end a loader worker without a word
            if get_worker_info() is None:
                raise
            return WorkerDiedError(f"{describe_error(error)} while {task} was loaded", "raise an Exception instead")
        finally:
            torch.set_num_threads(threads)


def _detached(tensor: Tensor) -> Tensor:
    """The tensor, of any shape, without a graph, and without the rest of a tensor that it is a view of.

    Neither can be sent, or should.
    """
    tensor = tensor.detach()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _portable(error: PdtoolError) -> BaseException:
    """The error as another process gets it, with its traceback as a note."""
    if is_out_of_memory(error):
        return MemoryError(str(error))
    text = "".join(traceback.format_exception(error))
    if _NO_CUDA in error.what:
        error = ModelError(error.what.partition(_NO_CUDA)[0] + _NO_CUDA, _REMEDY_FOR_CUDA)
    if _NO_CHILDREN in error.what:
        error = ModelError(error.what, "let samples be made without other processes, or give --loader-workers 0")
    error.add_note(text)
    return error
