"""The minibatches of a pass, in order: loaded in this process, or ahead of it in loader workers.

    process of the first stage                      loader worker, one of N
    begin_pass: what is to be loaded ──▶ queue ──▶ MinibatchLoader.load, by the seed of the minibatch
    load ◀──────────── shared memory ◀──────────── its input and target tensors, or the error

With N = 0 `load` does it itself; else torch's DataLoader is the queue and the shared memory. Both ways run the same
function, with one thread and the same seed, so that N changes no value. Loader workers are forked, as is torch's own
way on Linux: the user's dataset need not be picklable, and what it holds is in memory once. Like those of any
DataLoader they must not touch CUDA.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import tee
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from pdtool.errors import WorkerDiedError
from pdtool.host import end_with_parent
from pdtool.run.data import DataPass
from pdtool.run.loading.load_tasks import LoadedMinibatch, LoadTask, LoadTasks, TaskDataset
from pdtool.run.loading.minibatch_loader import MinibatchLoader
from pdtool.run.processes.worker_end import describe_end
from pdtool.units import format_seconds

_ENDING_S = 1.0  # a process that is killed closes its connections a little earlier than it is gone
_AHEAD = 2  # minibatches that each loader worker loads ahead
_REMEDIES = {
    -signal.SIGBUS: "give /dev/shm more room (docker run --shm-size), or load in the training process: "
    "--loader-workers 0",
    -signal.SIGKILL: "if memory ran out, give fewer --loader-workers",
}
_REMEDY_FOR_ENDS = "with --loader-workers 0 the training process loads, and names the sample"
_T = TypeVar("_T")


class MinibatchSource:
    """Loads the minibatches of one pass after another; loader workers live as long as this object.

    Args:
        loaders: by the name of the split.
        workers: number of loader workers; 0 loads in this process, when a minibatch is asked for.
        timeout_s: how many seconds to wait for a loader worker.
        keeps_workers: whether loader workers live on from pass to pass; else each pass forks new ones, which see what
            the dataset has become meanwhile, as by a sampler() that tells it the epoch.
        pins_memory: whether what loader workers load is to lie in pinned memory, from where copies to a GPU are
            asynchronous.
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
                generator=torch.Generator(),  # from which DataLoader draws, instead of from this process's
                num_workers=workers,
                prefetch_factor=_AHEAD,
                persistent_workers=keeps_workers,
                multiprocessing_context="fork",
                worker_init_fn=_begin_loader_worker,
                pin_memory=pins_memory,
                timeout=timeout_s,
            )
        self._iterator: Iterator[LoadedMinibatch | BaseException] = iter(())
        self._awaited: Iterator[LoadTask] = iter(())
        self._processes: list[BaseProcess] = []

    def begin_pass(self, data: DataPass, minibatches: Sequence[int]) -> None:
        """Begin to load some minibatches of a pass.

        Args:
            minibatches: in the order in which `load` will ask for them.
        """
        left = next(self._awaited, None)
        assert left is None, f"{left} was to be loaded and never asked for"
        self._tasks.begin_pass(data, minibatches)
        self._awaited, tasks = tee(self._tasks)
        if self._loader is None:
            self._iterator = map(self._dataset.__getitem__, tasks)
        elif minibatches:
            if not self._keeps_workers:
                self._iterator, self._processes = iter(()), []  # those of the pass before end
            self._iterator = self._begin(self._loader)

    def load(self, minibatch: int) -> LoadedMinibatch:
        """Return a minibatch, the next one of the pass.

        Raises:
            ModelError: a sample cannot be read or does not go with the others, or the inputs are not what the stages
                were generated for.
            WorkerDiedError: a loader worker has ended, or does not answer.
        """
        task = next(self._awaited)
        assert task.minibatch == minibatch, f"minibatch {minibatch} was asked for, {task} comes next"
        loaded: LoadedMinibatch | BaseException = self._answer(partial(next, self._iterator), task)
        if isinstance(loaded, BaseException):
            self._kill()
            raise loaded
        return loaded

    def _begin(self, loader: DataLoader[Any]) -> Iterator[LoadedMinibatch | BaseException]:
        """Let the loader workers begin with the tasks; start them for the first pass."""
        others = None if self._processes else multiprocessing.active_children()
        if others is not None:
            gc.collect()  # what is garbage here may have threads, which a forked process lacks when it collects that
        iterator: Iterator[LoadedMinibatch | BaseException] = self._answer(
            partial(iter, loader), next(iter(self._tasks))
        )
        if others is not None:
            self._processes = [process for process in multiprocessing.active_children() if process not in others]
        return iterator

    def _answer(self, ask: Callable[[], _T], task: LoadTask) -> _T:
        """Return what the DataLoader answers; raise the error of a loader worker that ends meanwhile, or is silent."""
        if self._loader is None:
            return ask()
        try:
            with _interrupted_by_end(self._processes):
                return ask()
        except Exception as error:
            died = self._death(error, task)
            if died is None:
                raise
            self._kill()  # some may wait for what the dead one held
            raise died from error

    def _kill(self) -> None:
        """End the loader workers, after an error: there is nothing more to be loaded."""
        for process in self._processes:
            process.kill()

    def _death(self, error: Exception, task: LoadTask) -> WorkerDiedError | None:
        """The error of the loader worker that an error of DataLoader's comes from; None when it is not to blame."""
        is_closed = isinstance(error, (OSError, EOFError))  # its connection, and its process ends just now
        ended = wait([process.sentinel for process in self._processes], _ENDING_S if is_closed else 0.0)
        for process in self._processes:
            if process.sentinel in ended:
                process.join()
                what = f"loader worker {process.pid} {describe_end(process.exitcode)} while {task} was awaited"
                return WorkerDiedError(what, _REMEDIES.get(process.exitcode or 0, _REMEDY_FOR_ENDS))
        if "timed out" in str(error):
            what = f"{task} was not loaded within {format_seconds(self._timeout_s)}"
            return WorkerDiedError(what, "see what dataset() waits for, or give more --timeout if it is only slow")
        return None


def _begin_loader_worker(_: int) -> None:
    """Prepare a loader worker; nothing that its parent made is collected here."""
    gc.freeze()
    end_with_parent()


@contextmanager
def _interrupted_by_end(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Let what is done meanwhile be interrupted by a ChildProcessError when one of the processes ends.

    DataLoader itself would see its end only when its time is up, or by a handler of SIGCHLD that stays, and raises an
    error wherever the training process is; that one is put away here.
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
        """Warn of nothing: more workers than cores are there only where they were asked for, as for a slow network."""
