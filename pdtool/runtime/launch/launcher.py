"""Launch of a run: start the workers, watch them, and say which one failed and why.

On one machine or several, torch elastic starts the workers. Inside torchrun or srun this process is one of them
already. Workers come from a fork server that imports torch once, and a reaper ends them when this process does. The
launcher keeps run.json, the record of what the run was asked for and how it ended, by which `pdtool show` says where an
unfinished run stands.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing.util
import os
import pickle
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pdtool.artifacts import run_dir
from pdtool.artifacts.metrics import following_metrics
from pdtool.artifacts.report import Report
from pdtool.artifacts.run_dir import (
    PLAN_FILE,
    RUN_FILE,
    UNWRITABLE,
    WORKERS_FOLDER,
    RunState,
    locked,
    put_report_aside,
    update_record,
)
from pdtool.errors import PdtoolError, StaleError, UsageError, WorkerDiedError, describe_error
from pdtool.files import write_remedy
from pdtool.frontend.compute_mode import check_autocast
from pdtool.host import check_may_start_processes, end_with_parent, usable_cores
from pdtool.machines import is_started_by_torchrun, worker_environment
from pdtool.rendezvous import gather_machines
from pdtool.runtime.config import RankAssignment, RunConfig, assign_ranks
from pdtool.runtime.groups import short_reason
from pdtool.runtime.launch.diagnosis import diagnose, fork_server_end
from pdtool.runtime.launch.process_group import Reaper, end_by_signal, handling_signals, stop_message, stop_name
from pdtool.runtime.launch.worker_main import run_worker, worker_main
from pdtool.runtime.status import prepare_folder, read_failure, read_pid
from pdtool.runtime.worker_end import name_semaphores_after_this_process, remove_counters, remove_stale_semaphores
from pdtool.schedule import validate

_GRACE_S = 2.0  # for workers to end after one has failed
_POLL_S = 0.2
_POLL_IN_WORKER_S = 1.0  # of metrics.jsonl, by a process that trains
_MAX_REASON = 2000  # characters
_NO_FORK_SERVER = "unexpected EOF"  # multiprocessing's error where it waits for the number of a new process
# What the fork server imports; torch._dynamo comes with the first optimizer, for half a second in each worker.
_ELASTIC = "torch.distributed"  # name of its loggers
_PRELOADED = ["torch", "torch._dynamo", "pdtool.runtime.launch.worker_main"]


def launch(
    config: RunConfig,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
    notify: Callable[[str], None] = lambda line: None,
    on_start: Callable[[], None] = lambda: None,
) -> Report:
    """Run to the end.

    Args:
        on_metrics: called in a thread with each line of metrics.jsonl as it is written.
        notify: called with a line for the user: for which machine this one waits, how to go on after a signal.
        on_start: called once nothing is left to refuse, before the first worker starts.

    Raises:
        UsageError: this process may start no workers, or the configuration makes no sense.
        WorkerDiedError: a worker ended or did not answer; rank, stage and minibatch are named, all others are gone.
        PdtoolError: what a worker found wrong (a loss that is not a number, a checkpoint that could not be written).
        KeyboardInterrupt: Ctrl-C; all workers are gone.
    """
    check_config(config)
    epochs_done = run_dir.read_manifest(run_dir.latest(config.resume)).epoch if config.resume else 0
    if config.resume and epochs_done >= config.epochs:
        raise UsageError(f"{config.resume} has its {epochs_done} epoch(s) already", "give more --epochs than that")
    environment = worker_environment(os.environ, config.machines.endpoint)
    if environment:
        if is_started_by_torchrun(os.environ):
            end_with_parent()
            _forget_threads_of_torchrun()
        os.environ.update(environment)
        with _in_folder(config, epochs_done, is_first=os.environ["RANK"] == "0"):
            on_start()
            with following_metrics(config.out, on_metrics, after=epochs_done, poll_s=_POLL_IN_WORKER_S):
                return run_worker(config)
    check_may_start_processes()
    local = local_assignments(config)
    with _in_folder(config, epochs_done, is_first=config.machines.node_rank == 0):
        on_start()
        return _launch_workers(config, local, epochs_done, on_metrics, notify)


@contextmanager
def _in_folder(config: RunConfig, epochs_done: int, *, is_first: bool) -> Iterator[None]:
    """Hold the run's folder, and record in it how the run ends: a matter of the first machine."""
    if not is_first:
        yield
        return
    with locked(config.out), recorded(config, epochs_done):
        config.plan.save(config.out / PLAN_FILE)
        yield


@contextmanager
def recorded(config: RunConfig, epochs_done: int) -> Iterator[None]:
    """Record that the run goes on, and at the end how it ended; an older report is put aside first.

    Args:
        epochs_done: those of the run that it resumes.
    """
    put_report_aside(config.out, epochs_done)
    plan = config.plan
    state = RunState(
        plan=plan.name, config=plan.config, schedule=plan.schedule, epochs=config.epochs, epochs_done=epochs_done
    )
    with suppress(*UNWRITABLE):
        state.save(config.out / RUN_FILE)
    try:
        yield
    except KeyboardInterrupt:  # whoever was stopped has said so
        raise
    except BaseException as error:
        text = str(error) if isinstance(error, PdtoolError) else describe_error(error)
        reason = text[:_MAX_REASON].encode(errors="backslashreplace").decode()  # a user's text may be no Unicode
        update_record(config.out, end="failed", reason=reason)
        raise
    update_record(config.out, end="done")


def _launch_workers(
    config: RunConfig,
    local: Sequence[RankAssignment],
    epochs_done: int,
    on_metrics: Callable[[dict[str, Any]], None] | None,
    notify: Callable[[str], None],
) -> Report:
    """Start the workers of this machine and wait for their end."""
    if config.machines.node_rank == 0:  # before the others come, which put their files there, too
        shutil.rmtree(config.out / WORKERS_FOLDER, ignore_errors=True)
    gather_machines(config.machines, config.timeout_s, notify)
    prepare_folder(config.out, [a.rank for a in local], keep_metrics=config.resume is not None)
    remove_stale_semaphores()
    name_semaphores_after_this_process()
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with _start_errors_explained():  # torch elastic makes a folder for its logs
        elastic = elastic_launch(_elastic_config(config, len(local)), worker_main)
    stop_signal = None
    try:
        with (
            handling_signals() as hand_over,
            _start_errors_explained(),
            following_metrics(config.out, on_metrics, after=epochs_done),
            closing(Reaper()) as reaper,
            _killing_stragglers(config, local, reaper),
            _elastic_silenced(),
            _meeting_folder(config) as meeting_folder,
        ):
            hand_over(reaper)
            reports = elastic(config, dict(os.environ), os.getcwd(), reaper.pid, meeting_folder)
    except SignalException as error:
        stop_signal = error.sigval
    except dist.DistError as error:
        what = f"torch elastic could not start the workers ({short_reason(error)})"
        raise PdtoolError(what, "start it again on every machine") from error
    except (ValueError, TypeError, KeyError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable_error(config, error) from error
    except ChildFailedError as error:
        if not (config.out / WORKERS_FOLDER).is_dir():
            remedy = "start it again, and leave the folder"
            raise PdtoolError(f"the run's folder {config.out} was removed during the run", remedy) from None
        exit_codes = {local[rank % len(local)].rank: f.exitcode for rank, f in error.failures.items()}
        raise diagnose(config, local, exit_codes) from None
    finally:
        _remove_counters(config.out, local)
    if stop_signal:
        if config.machines.node_rank == 0:
            update_record(config.out, end="stopped", reason=stop_name(stop_signal))
        with suppress(OSError):  # of a terminal that has hung up
            notify(stop_message(stop_signal, config.out))
        end_by_signal(stop_signal)
        raise KeyboardInterrupt
    shutil.rmtree(config.out / WORKERS_FOLDER, ignore_errors=True)
    return Report.parse(next(iter(reports.values())))


def _unreadable_error(config: RunConfig, error: Exception) -> PdtoolError:
    """Return the error of what torch elastic reads: how a worker ended, or what other machines tell it.

    Raises:
        Exception: `error` itself, if it has another cause.
    """
    if config.machines.count > 1:
        what = f"torch elastic cannot read what was written at {config.machines.endpoint}, or how a worker ended"
        remedy = "let nobody but the machines reach that port (SECURITY.md), and see whether the disk is full"
        return PdtoolError(f"{what} ({describe_error(error)[:_MAX_REASON]})", remedy)
    if not isinstance(error, (json.JSONDecodeError, EOFError, pickle.UnpicklingError)):
        raise error
    return PdtoolError(f"a worker died, and could not write why into {config.out}", "see whether the disk is full")


def check_config(config: RunConfig) -> None:
    """Check that plan and bundle go together and the schedule can be executed.

    Raises:
        StaleError: the bundle was made for another plan, or was changed.
        UsageError: there are not so many threads; the delay compensation, or where tied stages are, does not go with
            the schedule; or the precision not with the model.
        ScheduleError: the schedule deadlocks, or breaks another rule.
    """
    plan, bundle = config.plan, config.bundle
    if len(plan.stages) != len(bundle.stages):
        raise StaleError(
            config.bundle_dir / "bundle.yaml",
            f"it has {len(bundle.stages)} stages, the plan {len(plan.stages)}",
            "run `pdtool codegen` again",
        )
    if config.delay_compensation and plan.kind.flushes:
        raise UsageError(
            f"correction {config.delay_compensation} with schedule {plan.schedule}",
            "leave it out: with a flush no gradient comes late",
        )
    _check_threads(config)
    check_autocast(config.precision, bundle.autocast_off)
    for tied in bundle.tied:
        if len({s % plan.pipeline_depth for s in tied.stages}) < len(tied.stages):
            raise UsageError(
                f"stages {', '.join(map(str, tied.stages))} share {tied.names[0]}, and two of them are on one worker",
                "partition with another number of --chunks or --workers",
            )
    bundle.check_files(config.bundle_dir)
    shape = config.shape
    minibatches = 2 * max(shape.update_every) * max(shape.in_flight) + 1  # into the steady state
    validate(plan.kind.build(shape, minibatches), shape, minibatches)


def _check_threads(config: RunConfig) -> None:
    """Refuse more threads than a worker can have at the same time; raises UsageError."""
    cores = len(usable_cores())
    if config.threads_given and (config.threads or 0) > cores:
        raise UsageError(f"--threads {config.threads} with {cores} core(s) here", f"give {cores} or fewer")


def local_assignments(config: RunConfig) -> list[RankAssignment]:
    """Return the assignments of the workers that this machine starts; raises UsageError when there are none."""
    node_workers = config.machines.node_workers(config.plan.cluster.workers)
    local = [assignment for assignment in assign_ranks(config.plan) if assignment.worker in node_workers]
    if not local:
        raise UsageError(f"the plan uses no worker of machine {config.machines.node_rank}", "start fewer machines")
    return local


@contextmanager
def _meeting_folder(config: RunConfig) -> Iterator[str]:
    """Make the folder through which the workers of one machine meet, which no other user can read; "" for several.

    It lies in multiprocessing's, which the reaper removes when this process is killed.
    """
    if config.machines.count > 1:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="meeting-", dir=multiprocessing.util.get_temp_dir()) as folder:
        yield folder


class _OneMachine(RendezvousHandler):
    """The rendezvous of torch elastic for one machine, where a launcher meets nobody but itself: it needs no socket.

    torch's own keep a TCPStore on all interfaces, and unpickle what they find there.
    """

    BACKEND = "pdtool-one-machine"
    use_agent_store = False  # workers meet by files

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id, self._store = parameters.run_id, dist.HashStore()  # type: ignore[attr-defined]

    def get_backend(self) -> str:
        return self.BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_OneMachine.BACKEND, _OneMachine)


def _elastic_config(config: RunConfig, local_workers: int) -> LaunchConfig:
    machines = config.machines
    is_distributed = machines.count > 1
    return LaunchConfig(
        min_nodes=machines.count,
        max_nodes=machines.count,
        nproc_per_node=local_workers,
        run_id="pdtool" if is_distributed else uuid.uuid4().hex,
        rdzv_backend="static" if is_distributed else _OneMachine.BACKEND,
        rdzv_endpoint=machines.endpoint if is_distributed else "localhost",
        rdzv_configs={"rank": machines.node_rank, "timeout": math.ceil(config.timeout_s)} if is_distributed else {},
        local_addr=None if is_distributed else "localhost",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        signals_to_handle="",  # but ours
        logs_specs=DefaultLogsSpecs(log_dir=str(config.out / WORKERS_FOLDER / f"node-{machines.node_rank}")),
    )


def _forget_threads_of_torchrun() -> None:
    """Remove OMP_NUM_THREADS if torchrun set it: it sets 1 where the user has set nothing.

    What the user has set is in the environment that torchrun, the parent of this process, was started with.
    """
    with suppress(OSError):
        inherited = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        is_own_choice = any(entry.startswith(b"OMP_NUM_THREADS=") for entry in inherited)
        if not is_own_choice:
            os.environ.pop("OMP_NUM_THREADS", None)


@contextmanager
def _killing_stragglers(config: RunConfig, local: Sequence[RankAssignment], reaper: Reaper) -> Iterator[None]:
    """When a worker of this machine has failed, kill those that do not end: a stopped process ignores SIGTERM."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            if any(_has_ended(config.out, assignment.rank) for assignment in local):
                reaper.send(signal.SIGCONT)  # so that those who are stopped receive torch elastic's SIGTERM
            if any(read_failure(config.out, assignment.rank) for assignment in local):
                if not is_over.wait(_GRACE_S):
                    reaper.kill()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _remove_counters(out: Path, local: Sequence[RankAssignment]) -> None:
    """Remove what workers that were killed left in /dev/shm."""
    for assignment in local:
        with suppress(ProcessLookupError):
            remove_counters(read_pid(out, assignment.rank))


def _has_ended(out: Path, rank: int) -> bool:
    """Whether a worker's process is gone; False when it has not started."""
    with suppress(ProcessLookupError):
        pid = read_pid(out, rank)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
    return False


@contextmanager
def _start_errors_explained() -> Iterator[None]:
    """Say why multiprocessing could not start a process: the reaper, or a worker."""
    try:
        yield
    except (OSError, EOFError) as error:
        end = fork_server_end() or ("ended" if str(error) == _NO_FORK_SERVER else "")
        if end:
            what = f"the fork server, the process that all workers come from, {end} while it started them"
            raise WorkerDiedError(what, "start it again") from error
        if isinstance(error, EOFError):
            raise
        is_too_long = "AF_UNIX path too long" in str(error)  # of the fork server's socket
        remedy = "set TMPDIR to a shorter path" if is_too_long else write_remedy(error)
        raise PdtoolError(f"the workers could not be started ({error})", remedy) from error


@contextmanager
def _elastic_silenced() -> Iterator[None]:
    """Silence torch elastic, which logs what `launch` raises; other loggers of this process go on."""
    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict] if name.startswith(_ELASTIC)]
    talking = [logger for logger in loggers if not logger.disabled]
    for logger in talking:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in talking:
            logger.disabled = False
