"""The process of one worker: from its environment to its report, or to a failure that can be read afterwards."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from pdtool import resident
from pdtool.artifacts.report import Report
from pdtool.errors import PdtoolError, UsageError, WorkerDiedError
from pdtool.run.peers import Blame, PeerError
from pdtool.run.setup import set_up
from pdtool.run.spec import RunSpec, places
from pdtool.run.status import OWN, Failure, write_failure
from pdtool.run.worker import Worker

# what torch elastic gives each worker; everything else comes from the process that was asked to run
ELASTIC = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH")


def work(spec: RunSpec, environment: Mapping[str, str], folder: str, launcher: Connection) -> str:
    """Entry of a worker under torch elastic; returns the report as text, exits with an error's code."""
    gc.freeze()  # what the fork server imported is no garbage: collecting need not look through it
    _die_with(launcher)
    os.dup2(2, 1)  # what the user's code prints; stdout is for artifacts
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update({k: v for k, v in environment.items() if not k.startswith(ELASTIC)})
    os.chdir(folder)
    rank = int(os.environ["RANK"])
    try:
        return train_here(spec).dump()
    except PeerError as error:
        failure = Failure(error.what, error.remedy, error.exit_code, error.peer)
    except PdtoolError as error:
        failure = Failure(error.what, error.remedy, error.exit_code)
    except Exception as error:
        failure = _unexpected(spec.out, rank, error)
    write_failure(spec.out, rank, failure)
    os._exit(failure.exit_code)  # at once: the destructors of process groups may wait for peers


def train_here(spec: RunSpec) -> Report:
    """Be the worker that RANK names, in this process."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != len(places(spec.plan)):
        raise UsageError(
            f"{world} processes were started, the plan needs {len(places(spec.plan))}", "start one per worker"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(spec, int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    resident.keep()
    random.seed(spec.seed)
    if local == world and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing leaves this machine
    with Blame("the workers did not come together"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=spec.timeout_s), rank=rank, world_size=world)
    report = Worker(set_up(spec, rank, device, local)).run()
    dist.destroy_process_group()
    return report


def _device(spec: RunSpec, local_rank: int) -> torch.device:
    if spec.device == "cpu" or (spec.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("device cuda: torch finds no CUDA device here", "leave --device out to train on the CPU")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _die_with(launcher: Connection) -> None:
    """End this process when the one that launched it is gone, however that happened: then the pipe's end is reached.

    The parent to watch is not this process's own, which is the fork server.
    """

    def watch() -> None:
        try:
            launcher.recv()
        except (EOFError, OSError):
            os._exit(WorkerDiedError.exit_code)

    threading.Thread(target=watch, daemon=True).start()


def _unexpected(out: Path, rank: int, error: Exception) -> Failure:
    """An error of the user's code, or ours: its kind, text and place; the whole traceback goes to a file."""
    path = out / f"worker-{rank}.traceback"
    with suppress(OSError):  # of a full disk, which `error` may be of, too
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    return Failure(what, f"the traceback is in {path}", WorkerDiedError.exit_code, OWN)
