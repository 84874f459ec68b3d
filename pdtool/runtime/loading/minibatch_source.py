"""Source of the minibatches of a pass, in order: loaded in this process, or ahead of it in loader workers.

    process of the first stage                      loader worker, one of N
    begin_pass: what is to be loaded ──▶ queue ──▶ MinibatchLoader.load, by the seed of the minibatch
    load ◀──────────── shared memory ◀──────────── its input and target tensors, or the error

With N = 0 `load` does it itself. Otherwise torch's DataLoader is the queue and the shared memory. Both ways run the
same function, with one thread and the same seed, so N changes no value. `LoadingCost` says which N is enough.
"""

from __future__ import annotations

import errno
import gc
import signal
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from pdtool.errors import ModelError, PdtoolError, WorkerDiedError, describe_error
from pdtool.files import PROCESS_REMEDY
from pdtool.host import end_with_parent
from pdtool.runtime.loading.minibatch_loader import MinibatchLoader
from pdtool.runtime.loading.minibatches import DataPass
from pdtool.runtime.out_of_memory import is_out_of_memory
from pdtool.runtime.worker_end import describe_end, exit_error, remove_counters
from pdtool.units import format_seconds

LoadedMinibatch = tuple[list[Tensor], list[Tensor]]  # the inputs and the tensors of the target, [samples, ...] each
_T = TypeVar("_T")

_AHEAD = 2  # minibatches that each loader worker loads ahead
_ENDING_S = 1.0  # a killed process closes its connections a little before it is gone
_OWN_USES = 2  # of a storage by one tensor
_NO_CHILDREN = "daemonic processes are not allowed to have children"  # of multiprocessing
_NO_CUDA = "Cannot re-initialize CUDA in forked subprocess"  # torch goes on with advice for its own DataLoader
_REMEDY_FOR_CUDA = "make samples on the CPU, or load in the training process: --loader-workers 0"
_NO_SHARED_MEMORY = "unable to allocate shared memory"  # of torch, in a minibatch that a loader worker makes
_REMEDY_FOR_SHARED_MEMORY = (
    "give /dev/shm more room (docker run --shm-size), or load in the training process: --loader-workers 0"
)
_REMEDIES = {
    -signal.SIGBUS: _REMEDY_FOR_SHARED_MEMORY,
    -signal.SIGKILL: "if memory ran out, pass a smaller --loader-workers",
}
_REMEDY_FOR_ENDS = "use --loader-workers 0: the training process then loads and names the sample"


class MinibatchSource:
    """Loads the minibatches of one pass after another; loader workers live as long as this object.

    Loader workers are forked, as torch does on Linux, so the user's dataset need not be picklable and is in memory
    once. As in any DataLoader they must not touch CUDA.

    Args:
        loaders: by name of the split.
        workers: number of loader workers; 0 loads in this process, when a minibatch is asked for.
        timeout_s: how many seconds to wait for a loader worker.
        keeps_workers: whether loader workers live on from pass to pass; else each pass forks new ones, which see
            changes of the dataset, such as a sampler() that tells it the epoch.
        pins_memory: whether to put loaded minibatches into pinned memory, from which copies to a GPU are asynchronous.
    """

    def __init__(
        self,
        loaders: Mapping[str, MinibatchLoader],
        workers: int,
        *,
        timeout_s: float,
        pins_memory: bool = False,
        keeps_workers: bool = True,
    ) -> None:
        self._timeout_s, self._tasks, self._keeps_workers = timeout_s, LoadTasks(), keeps_workers
        self._dataset = TaskDataset(loaders)
        self._loader: DataLoader[Any] | None = None
        if workers:
            self._loader = _TaskLoader(
                self._dataset,
                batch_size=None,
                sampler=self._tasks,
                collate_fn=lambda loaded: loaded,
                generator=torch.Generator(),  # DataLoader draws from this, not from the process's generator
                num_workers=workers,
                prefetch_factor=_AHEAD,
                persistent_workers=keeps_workers,
                multiprocessing_context="fork",
                worker_init_fn=_begin_loader_worker,
                pin_memory=pins_memory,
                timeout=timeout_s,
            )
        self._iterator: Iterator[LoadedMinibatch | BaseException] = iter(())
        self._processes: list[BaseProcess] = []

    def begin_pass(self, data: DataPass, minibatches: Sequence[int]) -> None:
        """Begin to load some minibatches of a pass.

        Args:
            minibatches: in the order of the calls of `load`, which StageIO asserts.
        """
        self._tasks.data, self._tasks.minibatches = data, minibatches
        if self._loader is None:
            self._iterator = map(self._dataset.__getitem__, self._tasks)
        elif minibatches:
            if not self._keeps_workers:
                self._iterator, self._processes = iter(()), []  # those of the pass before end
            if not self._processes:  # they are forked now
                gc.collect()  # what is garbage here may have threads, which they would lack when they collect it
            iterator: Any = self._answer(self._started, minibatches[0])
            self._iterator, self._processes = iterator, iterator._workers

    def _started(self) -> Iterator[LoadedMinibatch | BaseException]:
        """Start the loader workers, or let them go on; raises PdtoolError."""
        assert self._loader is not None  # whose length is unknown
        try:
            return iter(self._loader)
        except OSError as error:
            if self._processes or isinstance(error, ChildProcessError):
                raise
            what = f"the loader workers could not be started ({error.strerror or error})"
            remedy = PROCESS_REMEDY if error.errno == errno.EAGAIN else _REMEDY_FOR_SHARED_MEMORY  # of their locks
            raise PdtoolError(what, remedy) from error

    def load(self, minibatch: int) -> LoadedMinibatch:
        """Return a minibatch, which must be the next one of the pass.

        Raises:
            ModelError: a sample cannot be read or does not match the others, or the inputs do not match the stages.
            WorkerDiedError: a loader worker has ended, or does not answer.
        """
        loaded: LoadedMinibatch | BaseException = self._answer(partial(next, self._iterator), minibatch)
        if isinstance(loaded, BaseException):
            self._kill()
            raise loaded
        if self._loader is None:
            inputs, target = loaded
            return [_of_its_own(tensor) for tensor in inputs], [_of_its_own(tensor) for tensor in target]
        return loaded

    def _answer(self, ask: Callable[[], _T], minibatch: int) -> _T:
        """Ask the DataLoader for a minibatch and return its answer.

        Raises:
            WorkerDiedError: a loader worker ends meanwhile, or is silent.
        """
        if self._loader is None:
            return ask()
        try:
            with _interrupted_by_end(self._processes):
                return ask()
        except Exception as error:
            died = self._death(error, self._tasks.task(minibatch))
            if died is None:
                raise
            self._kill()  # some may wait for locks that the dead one held
            raise died from error

    def _kill(self) -> None:
        """End the loader workers, after an error: there is nothing more to be loaded."""
        for process in self._processes:
            process.kill()
            remove_counters(process.pid or 0)

    def _death(self, error: Exception, task: LoadTask) -> WorkerDiedError | None:
        """The error of the loader worker that caused a DataLoader's error; None if none did."""
        is_closed = isinstance(error, (OSError, EOFError))  # its connection, and its process ends just now
        ended = wait([process.sentinel for process in self._processes], _ENDING_S if is_closed else 0.0)
        for process in self._processes:
            if process.sentinel in ended:
                process.join()
                what = f"loader worker {process.pid} {describe_end(process.exitcode)} while the run waited for {task}"
                return WorkerDiedError(what, _REMEDIES.get(process.exitcode or 0, _REMEDY_FOR_ENDS))
        if "timed out" in describe_error(error):
            what = f"{task} was not loaded within {format_seconds(self._timeout_s)}"
            return WorkerDiedError(what, "find out what dataset() waits for, or pass a longer --timeout")
        return None


def _of_its_own(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if user code may hold its memory: collate() may fill one array for each minibatch,
    but several minibatches are in flight."""
    storage = tensor.untyped_storage()
    is_only_holder = storage.resizable() and torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES
    return tensor if is_only_holder else tensor.clone()


def _begin_loader_worker(_: int) -> None:
    """Prepare a loader worker; it never collects its parent's garbage."""
    gc.freeze()
    end_with_parent()


@contextmanager
def _interrupted_by_end(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Raise ChildProcessError in this context as soon as one of the processes ends.

    DataLoader itself would see the end only at its timeout, or by a permanent SIGCHLD handler that raises an error
    wherever the training process is. We replace that handler.
    """

    def check(*signal_and_frame: object) -> None:
        if not all(process.is_alive() for process in processes):
            raise ChildProcessError

    before = signal.signal(signal.SIGCHLD, check)
    try:
        check()
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


class _TaskLoader(DataLoader[LoadedMinibatch | BaseException]):
    """Loads tasks in loader workers."""

    def check_worker_number_rationality(self) -> None:
        """Skip torch's warning: more workers than cores run only if the user asked for them, as for a slow network."""


class LoadTask(NamedTuple):
    """A minibatch to be loaded.

    Attributes:
        split: name of the split of the dataset.
        indices: numbers of its samples.
        seed: seed of random augmentation.
        stream_pass: see DataPass.
    """

    split: str
    minibatch: int
    indices: Sequence[int]
    seed: int
    stream_pass: int | None

    def __str__(self) -> str:
        return f"minibatch {self.minibatch} of dataset({self.split!r})"


@dataclass
class LoadTasks:
    """The tasks of some minibatches of a pass, in order; made one by one, because there may be many."""

    data: DataPass | None = None
    minibatches: Sequence[int] = ()

    def __iter__(self) -> Iterator[LoadTask]:
        return map(self.task, self.minibatches)

    def task(self, i: int) -> LoadTask:
        """Return the task of a minibatch."""
        assert self.data
        return LoadTask(self.data.split_name, i, self.data.minibatches[i], self.data.seed(i), self.data.stream_pass)


class TaskDataset(Dataset[LoadedMinibatch | BaseException]):
    """Minibatches by their tasks. Errors are returned, because DataLoader would lose their class."""

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
        except BaseException as error:  # KeyboardInterrupt and the like would end a loader worker silently
            if get_worker_info() is None:
                raise
            what = f"the dataset raised {describe_error(error)} while {task} was loaded"
            return WorkerDiedError(what, "raise a subclass of Exception instead")
        finally:
            torch.set_num_threads(threads)


def _detached(tensor: Tensor) -> Tensor:
    """The tensor, of any shape, without its graph and in memory of its own size.

    A graph cannot be sent. What a tensor is a view of should not be. One that is expanded cannot be pinned.
    """
    tensor = tensor.detach()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _portable(error: PdtoolError) -> BaseException:
    """The error in a form for another process, with its traceback as a note."""
    if is_out_of_memory(error):
        return MemoryError(str(error))
    text = "".join(traceback.format_exception(error))
    if _NO_CUDA in error.what:
        error = ModelError(error.what.partition(_NO_CUDA)[0] + _NO_CUDA, _REMEDY_FOR_CUDA)
    if _NO_SHARED_MEMORY in error.what:
        error = PdtoolError("a loader worker found no room in /dev/shm for a minibatch", _REMEDY_FOR_SHARED_MEMORY)
    if _NO_CHILDREN in error.what:
        error = ModelError(error.what, "make samples without other processes, or use --loader-workers 0")
    error.add_note(text)
    return error


def usable_workers(asked: int, loaders: Collection[MinibatchLoader]) -> tuple[int, str]:
    """Return how many of the requested loader workers can read the dataset, and why if not all can."""
    opened = next((path for loader in loaders for path in loader.open_files), "")
    if asked and opened:
        return 0, (
            f"dataset() keeps {opened} open, and loader workers would share its file position. So the training process "
            "loads the minibatches; to use loader workers, open files when a sample is read"
        )
    if asked > 1 and any(loader.is_stream for loader in loaders):
        return 1, (
            f"an IterableDataset is read by one process, in order, so only one of {asked} loader workers is used. A "
            "map-style dataset (with __getitem__) can use all of them"
        )
    return asked, ""
