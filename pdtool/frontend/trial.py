"""Try the user's code before training, without lasting effects: in a forked process that changes none of the user's
files."""

from __future__ import annotations

import builtins
import fcntl
import gc
import hashlib
import importlib
import io
import os
import pickle
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from pdtool.errors import PdtoolError, describe_error, refused_exit
from pdtool.host import end_with_parent

_T = TypeVar("_T")
_TRIAL = "the process that tries functions of your model file"
_LIMIT_S = 600.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NO_AUTOGRAD = "autograd's threading in combination with fork-based"  # what torch says


def tried(work: Callable[[], _T], tensors: Iterable[Tensor] = ()) -> _T:
    """Do `work` in a forked process with one thread and without GPUs, and return its result.

    There it changes no variable and no random generator of this process, and what it prints is dropped. A file that it
    writes is written in a temporary folder, from which it can read it back.

    The work is done in this process if a forked one cannot do it: with tensors on a GPU, and if it calls autograd after
    that has started its threads for GPUs. It starts them even without a GPU, where torch is built for CUDA and has
    traced a model.

    Args:
        tensors: those that it uses.

    Raises:
        PdtoolError: `work` raises it, or the process ends otherwise or takes too long.
    """
    if any(tensor.is_cuda for tensor in tensors):
        return work()
    try:
        return _in_forked_process(work)
    except Exception as error:
        if _NO_AUTOGRAD not in describe_error(error):
            raise
    return work()


def _in_forked_process(work: Callable[[], _T]) -> _T:
    """See `tried`."""
    importlib.import_module("torch._dynamo")  # in 1 to 2 s: an optimizer imports it, so each forked process would
    reader, writer = Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="pdtool-") as folder, reader, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
        child = os.fork()
        if not child:
            _do(work, folder, writer)
        writer.close()
        try:
            if not reader.poll(_LIMIT_S):
                raise PdtoolError(f"{_TRIAL} takes longer than {_LIMIT_S:.0f} s", "make after_update() faster")
            result, error = reader.recv()
        except EOFError:
            remedy = "let after_update() and the optimizer raise an error instead of ending the process"
            raise PdtoolError(f"{_TRIAL} has ended without a result", remedy) from None
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):  # user code ignores SIGCHLD, so that the kernel has waited
                os.waitpid(child, 0)
    if error:
        raise error
    return result  # type: ignore[no-any-return]


def _do(work: Callable[[], Any], folder: str, writer: Connection) -> NoReturn:
    """Do the work in the forked process, send the result or the error, and end."""
    try:
        end_with_parent()
        gc.freeze()  # it never collects its parent's garbage
        torch.set_num_threads(1)
        torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)
        _drop_output()
        _write_copies_in(folder)
        try:
            answer = pickle.dumps((work(), None))
        except BaseException as error:
            answer = _portable(error)
        writer.send_bytes(answer)
    finally:
        os._exit(0)


def _portable(error: BaseException) -> bytes:
    """Return an error in a form for another process, with its traceback as a note."""
    if isinstance(error, SystemExit):
        error = refused_exit(error)
    error.add_note("".join(traceback.format_exception(error)))
    try:
        copy(error)  # as it is made anew from its pickle
        return pickle.dumps((None, error))
    except Exception:
        return pickle.dumps((None, PdtoolError(describe_error(error))))


def _drop_output() -> None:
    """Let what is printed, and what is written to files that are open, go nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # such as the one that listed these
            number = int(name)
            is_written = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if number in (1, 2) or (is_written and stat.S_ISREG(os.fstat(number).st_mode)):
                os.dup2(nowhere, number)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # a thread may have held the lock of the old ones


def _write_copies_in(folder: str) -> None:
    """Make Python and torch write copies of files in a folder, and remove none, for the rest of this process's life."""
    opened, opened_fd, replaced = io.open, os.open, os.replace
    written = partial(_path_in, folder, writes=True, keeps=False)

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = _path_in(folder, file, writes=bool({*"wxa+"} & {*mode}), keeps=not {*"wx"} & {*mode})
        return opened(path, mode, *args, **kwargs)

    def open_fd(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return opened_fd(_path_in(folder, path, writes=bool(flags & _WRITES), keeps=True), flags, *args, **kwargs)

    def replace(source: Any, target: Any, **_: Any) -> None:
        replaced(_path_in(folder, source, writes=True, keeps=True), written(target))

    system: Any = os
    serialization: Any = torch.serialization
    safetensors: Any = sys.modules.get("safetensors.torch")
    builtins.open = io.open = open_file
    system.open, system.replace, system.rename = open_fd, replace, replace
    system.remove = system.unlink = system.rmdir = system.mkdir = shutil.rmtree = lambda *_, **__: None  # type: ignore[assignment]
    write_zip = serialization._open_zipfile_writer
    serialization._open_zipfile_writer = lambda file: write_zip(written(file))
    if safetensors:
        save = safetensors.serialize_file
        safetensors.serialize_file = lambda tensors, path, **more: save(tensors, written(path), **more)


def _path_in(folder: str, file: Any, *, writes: bool, keeps: bool) -> Any:
    """Return the path of the copy to use for a path; the path itself if it is only read and was not written."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        return file  # a file object or a number
    path = os.path.abspath(os.fsdecode(file))
    own = os.path.join(folder, hashlib.sha256(os.fsencode(path)).hexdigest())
    if os.path.dirname(path) == folder or (os.path.exists(path) and not os.path.isfile(path)):
        return file  # the copy itself, or a device
    if not writes:
        return own if os.path.exists(own) else file
    if keeps and os.path.isfile(path) and not os.path.exists(own):
        shutil.copyfile(path, own)
    return own
