"""The process of one worker: from its environment to its report, or to a failure that can be read afterwards."""

from __future__ import annotations

import gc
import os
import random
import signal
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pdtool import process_memory
from pdtool.artifacts.report import Report
from pdtool.errors import PdtoolError, UsageError, WorkerDiedError
from pdtool.machines import use_loopback
from pdtool.network_interfaces import loopback_hint
from pdtool.run.config import RunConfig, assign_ranks
from pdtool.run.processes.collectives import PeerError, PeerErrorContext
from pdtool.run.processes.reaper import join_group
from pdtool.run.processes.status import OWN_ERROR, WorkerFailure, write_failure
from pdtool.run.worker import Worker
from pdtool.run.worker_context import WorkerContext

# what torch elastic gives each worker; everything else comes from the process that was asked to run
_ELASTIC_PREFIXES = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH")


def worker_main(config: RunConfig, environment: Mapping[str, str], folder: str, reaper_pid: int) -> str:
    """Run a worker that torch elastic started; return the report as text, or exit with an error's code.

    Args:
        environment, folder: of the process that launched the workers.
        reaper_pid: of the process that ends this one when that one is gone.
    """
    join_group(reaper_pid)
    gc.freeze()  # what the fork server imported is no garbage: collecting need not look through it
    os.dup2(2, 1)  # what the user's code prints; stdout is for artifacts
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _take_environment(environment)
    os.chdir(folder)
    rank = int(os.environ["RANK"])
    try:
        return run_worker(config).dump()
    except PeerError as error:
        failure = WorkerFailure(error.what, error.remedy, error.exit_code, error.peer)
    except PdtoolError as error:
        failure = WorkerFailure(error.what, error.remedy, error.exit_code)
    except Exception as error:
        failure = _unexpected_failure(config.out, rank, error)
    write_failure(config.out, rank, failure)
    os._exit(failure.exit_code)  # at once: the destructors of process groups may wait for peers


def _take_environment(environment: Mapping[str, str]) -> None:
    """Take over the variables of the process that launched the workers; the fork server may be older than they are."""
    for name in os.environ.keys() - environment.keys():
        if not name.startswith(_ELASTIC_PREFIXES):
            del os.environ[name]
    os.environ.update({k: v for k, v in environment.items() if not k.startswith(_ELASTIC_PREFIXES)})


def run_worker(config: RunConfig) -> Report:
    """Be the worker that RANK names, in this process; raises PdtoolError."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workers = len(assign_ranks(config.plan))
    if world_size != workers:
        raise UsageError(f"{world_size} processes were started, the plan needs {workers}", "start one per worker")
    local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(config, int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(choose_threads(os.environ, config.threads, os.cpu_count() or 1, local_workers))
    process_memory.keep_freed_memory()
    random.seed(config.seed)
    if local_workers == world_size:
        use_loopback(os.environ)
    hint = loopback_hint() if local_workers < world_size else ""  # torchrun or srun have started the others
    with PeerErrorContext(f"the workers did not come together{hint and '; '}{hint}"):
        timeout = timedelta(seconds=config.timeout_s)
        dist.init_process_group("gloo", timeout=timeout, rank=rank, world_size=world_size)
    report = Worker(WorkerContext(config, rank, device, local_workers)).run()
    dist.destroy_process_group()
    return report


def choose_threads(environment: Mapping[str, str], profiled: int | None, cores: int, local_workers: int) -> int:
    """Return how many CPU threads a worker computes with.

    That is OMP_NUM_THREADS if it is set; else as many as the profile was measured with, on which the plan's times rest
    (at most the cores); else an equal part of the cores.

    Args:
        environment: of this process.
        profiled: threads that the profile was measured with; None when it was not measured on a CPU.
        cores: of this machine.
        local_workers: number of workers on this machine.
    """
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is one number per nesting level
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return min(profiled, cores) if profiled else max(1, cores // local_workers)


def _device(config: RunConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("device cuda: torch finds no CUDA device here", "leave --device out to train on the CPU")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _unexpected_failure(out: Path, rank: int, error: Exception) -> WorkerFailure:
    """An error of the user's code, or ours: its kind, text and place; the whole traceback goes to a file."""
    path = out / f"worker-{rank}.traceback"
    with suppress(OSError):  # of a full disk, which `error` may be of, too
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    return WorkerFailure(what, f"the traceback is in {path}", WorkerDiedError.exit_code, OWN_ERROR)
