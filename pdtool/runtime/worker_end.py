"""End a worker's process as soon as its work ends, and never without a reason.

A failing worker writes its reason into a file that the launcher reads. A finished worker ends even if the user's code
has left threads running. Files in /dev/shm would outlive their processes, so they are unlinked here.
"""

from __future__ import annotations

import gc
import io
import os
import re
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import NoReturn

import torch

from pdtool.errors import ModelError, PdtoolError, WorkerDiedError, describe_error
from pdtool.frontend.user_code import error_at
from pdtool.frontend.user_modules import is_of_library
from pdtool.processes import describe_exit
from pdtool.runtime.status import PeerError, WorkerFailure, process_state, read_status, write_failure

_THREADS_GRACE_S = 1.0  # for threads of the user's code, when the work is done
_ENDING_S = 0.1  # a killed process closes its connections a little before it is gone
_RAISE_AN_ERROR = "raise an error in the model file instead"
_MEND_FORWARD = "let dataset() return only what forward accepts, or change forward so that it accepts this"
# What a RuntimeError says if a GPU, a connection or the system has failed.
_OF_MACHINE = re.compile(
    r"CUDA (driver )?error|Triton Error|cu[A-Za-z]+ error|CU[A-Z]+_STATUS|NCCL|gloo|inline_container|No space left|"
    r"Too many open files|can't start new thread|onnection (closed|reset)"
)
_GENERATED = re.compile("^<|/torchinductor")  # the file of a frame: no file, or one that torch.compile has written
_NOT_OF_USER = (Path(__file__).parents[1], Path(torch.__file__).parent)
_FOLDER = Path("/dev/shm")  # of counters
_not_frozen: list[None] = []  # made after the last gc.freeze() of pdtool


def record_failure(out: Path, rank: int, error: BaseException) -> int:
    """Write this worker's failure for the launcher; return the exit code of the process."""
    at_s, stopped, gone, text = time.time(), list[int](), list[int](), ""
    if isinstance(error, PeerError):  # its traceback would end in our own waiting
        while not any(silent := _silent_neighbours(out, rank)) and time.time() < at_s + _ENDING_S:
            time.sleep(0.01)
        stopped, gone = silent
    else:
        with suppress(Exception):  # memory is full, or the error cannot be printed
            text = "".join(traceback.format_exception(error))
    if not isinstance(error, PdtoolError):
        remedy = "" if isinstance(error, Exception) else _RAISE_AN_ERROR  # Ctrl-C raises nothing in a worker
        error = WorkerDiedError(f"{describe_error(error)}{_place(error)}", remedy)
    write_failure(out, rank, WorkerFailure(error, at_s, stopped, gone, text))
    return error.exit_code


def exit_error(error: SystemExit) -> WorkerDiedError:
    """Return the error of a worker whose user's code called sys.exit()."""
    text = "" if error.code is None else repr(error.code)
    return WorkerDiedError(f"sys.exit({text}) was called{_place(error)}", _RAISE_AN_ERROR)


def model_error(error: Exception, stage_files: Path) -> ModelError | None:
    """Return the error of a worker whose stage cannot compute a minibatch, with the deepest line of model.py or of the
    stage file. Return None for any other error, such as that of a GPU or of the system: starting again may help there.

    Args:
        stage_files: the folder of the stage files. An error of a forward has passed through one of them. Autograd calls
            a user's backward or hook, so that its error has passed through the user's file only.
    """
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) and all(cause is not each for each in causes):
        causes.append(cause)
    is_of_machine = any(
        isinstance(each, (OSError, torch.AcceleratorError, torch.distributed.DistError))
        or (isinstance(each, RuntimeError) and _OF_MACHINE.search(describe_error(each)))
        for each in causes
    )
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _GENERATED.search(f.filename) and not is_of_library(f.filename)]
    in_stage = [Path(frame.filename).parent == stage_files for frame in own]
    if is_of_machine or isinstance(error, PdtoolError) or not own:
        return None
    path = Path(own[-1].filename)
    if any(in_stage):
        found = error_at(path, error, f"`{own[-1].line}`" if in_stage[-1] else "forward")
        found.remedy = found.remedy or _MEND_FORWARD
        return found
    is_of_user = path.is_absolute() and path.is_file() and not any(map(path.is_relative_to, _NOT_OF_USER))
    return error_at(path, error, f"{own[-1].name}()") if is_of_user else None


def describe_end(exit_code: int | None) -> str:
    """Return how a process ended, as `was killed by SIGKILL`; `died` if its exit code is unknown, as on another
    machine."""
    if exit_code is None:
        return "died"
    return describe_exit(exit_code) + (" and reported no error" if exit_code >= 0 else "")


def end_despite_threads(exit_code: int) -> NoReturn:
    """End this process; threads that are not daemons get a moment to end by themselves."""
    deadline_s = time.monotonic() + _THREADS_GRACE_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    flush_files()
    remove_counters(os.getpid())
    unlink_semaphores()
    os._exit(exit_code)


def freeze_imports() -> None:
    """Let the collector and `flush_files` skip what the fork server has imported: half a million objects."""
    global _not_frozen
    gc.freeze()
    _not_frozen = []


def flush_files() -> None:
    """Write out what the user's code has left in open files; multiprocessing ends a worker without that."""
    objects = gc.get_objects()
    if not any(each is _not_frozen for each in objects):  # the user's code has frozen them, too
        gc.unfreeze()
        objects = gc.get_objects()
    for each in objects:
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with suppress(Exception):  # it is closed, or the disk is full
                each.flush()


def unlink_semaphores() -> None:
    """Unlink this process's semaphores, such as the one of tqdm, which comes with torch.export.

    Without it Python's resource tracker would do so, and warn of a leak.
    """
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()


def _silent_neighbours(out: Path, rank: int) -> tuple[list[int], list[int]]:
    """This machine's ranks whose processes are stopped, and those whose processes have ended."""
    first = rank - int(os.environ["LOCAL_RANK"])
    others = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    pids = {other: pid for other in others if (pid := read_status(out, other).pid)}
    states = {other: process_state(pid) for other, pid in pids.items()}
    stopped = [other for other, state in states.items() if state in ("T", "t")]
    return stopped, [other for other, state in states.items() if state in ("", "Z", "X")]


def _place(error: BaseException) -> str:
    """` (model.py:12)`, the deepest line in an error's traceback; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def remove_counters(pid: int) -> None:
    """Unlink the counters of shared tensors of a process of this container that ends or is gone.

    torch counts users of shared GPU memory, and unlinks the counters in destructors, which never run in a worker.
    """
    for path in _FOLDER.glob(f"torch_{pid}_*"):
        with suppress(OSError):
            path.unlink()
