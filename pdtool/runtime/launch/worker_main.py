"""The process of one worker: from its environment to its report or its recorded failure."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from pdtool import host
from pdtool.artifacts.report import Report
from pdtool.errors import UsageError
from pdtool.frontend.compute_mode import check_device, compiler_error, is_compiler_error
from pdtool.machines import RANK_VARIABLES, use_loopback
from pdtool.rendezvous import loopback_hint
from pdtool.runtime import worker_end
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import PeerErrorContext, check_agreement, check_shared, run_settings
from pdtool.runtime.launch.process_group import join_group
from pdtool.runtime.memory import choose_heap
from pdtool.runtime.out_of_memory import is_out_of_memory, out_of_memory_error
from pdtool.runtime.ranks import assign_ranks
from pdtool.runtime.status import Status
from pdtool.runtime.worker.start_worker import start_worker

_MOST_THREADS = 1024  # of a worker; OMP_NUM_THREADS may be a slip, and threads take memory


def worker_main(
    launcher: Connection,
    config: RunConfig,
    environment: Mapping[str, str],
    folder: str,
    reaper_pid: int,
    meeting_folder: str = "",
) -> None:
    """Run a worker in a process of its own; send the report as text, or exit with an error's code.

    Args:
        launcher: the pipe to the process that launched the workers.
        environment, folder: that process's environment, with the variables of the rank, and its current folder. Those
            of the fork server may be older.
        reaper_pid: the process that ends this one when the launcher is gone.
        meeting_folder: where the workers of one machine meet; "": at the address that the environment names.
    """
    join_group(reaper_pid)
    worker_end.freeze_imports()
    os.dup2(2, 1)  # the user's code may print, but stdout is for artifacts
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    config = config.with_absolute_paths()
    rank = int(os.environ["RANK"])
    try:
        report = run_worker(config, meeting_folder)
    except BaseException as error:  # end at once: destructors of process groups may wait for peers
        exit_code = worker_end.record_failure(config.out, rank, error)
        worker_end.unlink_semaphores()
        worker_end.flush_files()
        os._exit(exit_code)
    launcher.send(report.dump())
    worker_end.end_despite_threads(0)


def run_worker(config: RunConfig, meeting_folder: str = "") -> Report:
    """Be the worker that RANK names, in this process; raises PdtoolError.

    Args:
        config: with absolute paths, because the user's module may change the folder.
        meeting_folder: where the workers of one machine meet; "": at the address that the environment names.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assignments = assign_ranks(config.plan)
    local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(config, int(os.environ.get("LOCAL_RANK", "0")))
    threads = config.threads if config.threads_given else None
    threads = threads or choose_threads(os.environ, config.threads, len(host.usable_cores()), local_workers)
    torch.set_num_threads(threads)
    choose_heap(config, rank)
    random.seed(config.seed)
    if local_workers == world_size:
        use_loopback(os.environ)
    if rank < len(assignments):
        Status.begin(config.out, rank)
    try:
        hint = loopback_hint() if local_workers < world_size else ""  # torchrun or srun have started the others
        with PeerErrorContext(f"not all of the {world_size} workers connected: are all started?{hint and ' '}{hint}"):
            timeout = timedelta(seconds=config.timeout_s)
            store = dist.FileStore(f"{meeting_folder}/store", world_size) if meeting_folder else None  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, timeout=timeout, rank=rank, world_size=world_size)
        check_agreement(run_settings(config), dist.group.WORLD)
        if world_size != len(assignments):
            remedy = "start one per worker"
            raise UsageError(f"{world_size} processes were started, but the plan needs {len(assignments)}", remedy)
        if local_workers < world_size:
            check_shared(config.out, dist.group.WORLD, config.timeout_s)
        with _one_process_for_user_code():
            report = start_worker(config, rank, device, local_workers).run()
    except SystemExit as error:
        raise worker_end.exit_error(error) from error
    except Exception as error:
        if is_out_of_memory(error) and rank < len(assignments):
            raise out_of_memory_error(error, config.plan, assignments[rank], device) from error
        if is_compiler_error(error):
            raise compiler_error(error) from error
        if of_model := worker_end.model_error(error, config.stage_files or config.bundle_dir):
            raise of_model from error
        raise
    dist.destroy_process_group()
    return report


@contextmanager
def _one_process_for_user_code() -> Iterator[None]:
    """Hide in this context that there are several processes: a plain loop has one.

    Code of the user, or of a library such as torchmetrics, that asks for them would divide the data among workers that
    are stages, or average their figures. It calls the functions of the package torch.distributed, which are replaced
    here. Torch's own code calls those of the modules inside.
    """
    shown = dist.is_initialized, dist.get_world_size
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    dist.is_initialized, dist.get_world_size = lambda: False, _get_no_world_size
    try:
        yield
    finally:
        dist.is_initialized, dist.get_world_size = shown
        os.environ.update(hidden)


def _get_no_world_size(group: object = None) -> int:
    raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


def choose_threads(environment: Mapping[str, str], profiled: int | None, cores: int, local_workers: int) -> int:
    """Return how many CPU threads a worker computes with.

    That is OMP_NUM_THREADS if it is set; else the profile's threads, which the plan's times are based on (at most the
    cores); else an equal share of the cores.

    Args:
        environment: environment of this process.
        profiled: threads that the profile was measured with; None if it was not measured on a CPU.
        cores: cores of this machine that the process may use.
        local_workers: number of workers on this machine.
    """
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is one number per nesting level
    if asked.isdigit() and int(asked) > 0:
        return min(int(asked), _MOST_THREADS)
    return min(profiled, cores) if profiled else max(1, cores // local_workers)


def _device(config: RunConfig, local_rank: int) -> torch.device:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: streams of routes share no queue
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    check_device(config.device)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
