"""Launch of a run: start the workers, watch them, and say which one failed and why.

The launcher of each machine starts its workers. Inside torchrun or srun this process is already a worker. Workers come
from a fork server that imports torch once, and a reaper ends them when this process ends. The launcher keeps run.json,
the record of the run's options and of how it ended. From it `pdtool show` says where an unfinished run stands.
"""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.metrics import MetricsLine, following_metrics
from pdtool.artifacts.report import Report
from pdtool.artifacts.run_dir import UNWRITABLE, RunDir, RunState
from pdtool.errors import PdtoolError, StaleError, UsageError, WorkerDiedError, describe_error
from pdtool.files import write_atomically, write_remedy
from pdtool.frontend.compute_mode import check_autocast
from pdtool.host import check_may_start_processes, end_with_parent, usable_cores
from pdtool.machines import rank_variables, worker_environment
from pdtool.processes import WorkerProcesses
from pdtool.rendezvous import gather_machines
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch import process_group
from pdtool.runtime.launch.diagnosis import diagnose
from pdtool.runtime.launch.worker_main import run_worker, worker_main
from pdtool.runtime.ranks import RankAssignment, assign_ranks
from pdtool.runtime.status import prepare_folder, read_failure, read_status
from pdtool.runtime.worker_end import remove_counters
from pdtool.schedule import check_executable
from pdtool.units import counted

_POLL_IN_WORKER_S = 1.0  # of metrics.jsonl, in a process that trains
_MAX_REASON = 2000  # characters
_OF_FOLDER = {  # what Python says of the folder of the fork server's socket -> remedy
    "AF_UNIX path too long": "set TMPDIR to a shorter path",
    "No usable temporary directory": "set TMPDIR to a folder that can be written",
}


def launch(
    config: RunConfig,
    on_metrics: Callable[[MetricsLine], None] | None = None,
    notify: Callable[[str], None] = lambda line: None,
    on_start: Callable[[], None] = lambda: None,
) -> Report:
    """Run to the end.

    Args:
        on_metrics: called in a thread with each new line of metrics.jsonl.
        notify: called with a line for the user: which machine this one waits for, how to go on after a signal.
        on_start: called after all checks, before the first worker starts.

    Raises:
        UsageError: this process cannot start workers, or the configuration makes no sense.
        WorkerDiedError: a worker ended or did not answer; it names rank, stage and minibatch. All others are gone.
        PdtoolError: an error of a worker (a loss that is not a number, a checkpoint that could not be written).
        KeyboardInterrupt: Ctrl-C; all workers are gone.
    """
    check_config(config)
    epochs_done = RunDir(config.resume).latest_checkpoint().manifest().epoch if config.resume else 0
    environment = worker_environment(os.environ, config.machines.endpoint)
    if environment:
        if "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent of this process
            end_with_parent()
            _forget_threads_of_torchrun()
        os.environ.update(environment)
        with _in_folder(config, epochs_done, is_first=os.environ["RANK"] == "0") as config:
            on_start()
            path = RunDir(config.out).metrics_file
            with following_metrics(path, on_metrics, after=epochs_done, poll_s=_POLL_IN_WORKER_S):
                return run_worker(config.with_absolute_paths())
    check_may_start_processes()
    local = local_assignments(config)
    with _in_folder(config, epochs_done, is_first=config.machines.node_rank == 0) as config:
        on_start()
        return _launch_workers(config, local, epochs_done, on_metrics, notify)


@contextmanager
def _in_folder(config: RunConfig, epochs_done: int, *, is_first: bool) -> Iterator[RunConfig]:
    """Lock the run's folder, copy the stage files into it, and record that the run goes on, and at the end how it
    ended.

    Only the first machine does this. It first puts an older report aside, and it removes a new folder if no worker has
    begun. Yields the configuration of a run of the copied stage files, which nobody else writes.

    Args:
        epochs_done: epochs of the run that it resumes.
    """
    if not is_first:
        yield config
        return
    plan, run_dir = config.plan, RunDir(config.out)
    is_new = run_dir.is_empty
    with run_dir.held("; another machine of that run needs its own --node-rank" * (config.machines.count > 1)):
        run_dir.check_no_other_run(config.resume)  # one may have begun and ended since the first check
        if config.resume:
            epochs_done = RunDir(config.resume).check_unfinished(config.epochs, config.target)
        run_dir.put_report_aside(epochs_done)
        state = RunState(
            plan=plan.name,
            plan_path=config.plan_path,
            folder=os.path.relpath(Path.cwd(), Path(config.out).resolve()),
            config=plan.config,
            schedule=plan.schedule,
            epochs=config.epochs,
            epochs_done=epochs_done,
            resumed_after=epochs_done,
            asked=dict(config.asked),
        )
        with suppress(*UNWRITABLE):
            state.save(run_dir.state_file)
        try:
            write_atomically(run_dir.plan_file, plan.dump())  # also over a damaged copy
            config.bundle.copy_files(config.bundle_dir, run_dir.stages)
            yield replace(config, stage_files=run_dir.stages)
        except KeyboardInterrupt:  # perhaps before there was a worker
            run_dir.record_end("stopped", process_group.stop_name(signal.SIGINT))
            raise
        except BaseException as error:
            text = str(error) if isinstance(error, PdtoolError) else describe_error(error)
            reason = text[:_MAX_REASON].encode(errors="backslashreplace").decode()  # a user's text may not be Unicode
            is_failure = run_dir.record_end("failed", reason)
            if is_failure and is_new and not (run_dir.failure_file.exists() or run_dir.metrics_file.exists()):
                shutil.rmtree(run_dir.path, ignore_errors=True)  # no worker began: the error says all
            raise
        run_dir.record_end("done")


def _launch_workers(
    config: RunConfig,
    local: Sequence[RankAssignment],
    epochs_done: int,
    on_metrics: Callable[[MetricsLine], None] | None,
    notify: Callable[[str], None],
) -> Report:
    """Start the workers of this machine and wait for their end."""
    run_dir = RunDir(config.out)
    if config.machines.node_rank == 0:  # before the others come, which also put their files there
        shutil.rmtree(run_dir.workers, ignore_errors=True)
    gather_machines(config.machines, config.timeout_s, notify)
    prepare_folder(config.out, [a.rank for a in local], keep_metrics=config.resume is not None)
    stop_signal = None
    try:
        with (
            process_group.handling_signals() as hand_over,
            following_metrics(run_dir.metrics_file, on_metrics, after=epochs_done),
            ExitStack() as started,
        ):
            with start_errors_explained():  # and not those of a signal handler of the caller's, later
                hand_over(reaper := started.enter_context(closing(process_group.Reaper())))
                meeting_folder = started.enter_context(_meeting_folder(config))
                workers = started.enter_context(WorkerProcesses("forkserver"))
                for assignment in local:
                    environment = os.environ | _variables(config, assignment.rank, local)
                    arguments = (config, environment, os.getcwd(), reaper.pid, meeting_folder)
                    workers.start(assignment.rank, worker_main, *arguments)
            reports, exit_codes = wait_for_workers(workers, config.out)
    except process_group.StopSignal as error:
        stop_signal = error.number
    finally:
        for assignment in local:  # killed processes left some
            remove_counters(read_status(config.out, assignment.rank).pid)
    if stop_signal:
        if config.machines.node_rank == 0:
            run_dir.record_end("stopped", process_group.stop_name(stop_signal))
        with suppress(OSError):  # of a terminal that has hung up
            notify(process_group.stop_message(stop_signal, config.out, config.machines))
        process_group.end_by_signal(stop_signal)
        raise KeyboardInterrupt
    if len(reports) < len(local):
        if not run_dir.workers.is_dir():
            remedy = "start the run again, and do not remove the folder"
            raise PdtoolError(f"the run's folder {config.out} was removed during the run", remedy)
        raise diagnose(config, local, exit_codes, workers.longest_pause_s)
    shutil.rmtree(run_dir.workers, ignore_errors=True)
    return Report.parse(reports[local[0].rank])


def wait_for_workers(workers: WorkerProcesses, out: Path) -> tuple[dict[int, str], dict[int, int]]:
    """Wait until all workers have ended, or until one has failed and the others had a little time to report.

    Returns:
        The reports of finished workers, and the exit codes of the others that have ended, by rank.
    """
    messages = workers.listen(lambda: any(read_failure(out, rank) for rank in workers.processes))
    sent, exit_codes = dict(messages), workers.exit_codes
    reports = {rank: report for rank, report in sent.items() if exit_codes.get(rank) == 0}
    return reports, {rank: code for rank, code in exit_codes.items() if rank not in reports}


def _variables(config: RunConfig, rank: int, local: Sequence[RankAssignment]) -> dict[str, str]:
    """The environment variables that torchrun would set for a worker of this machine."""
    workers, address = len(assign_ranks(config.plan)), config.machines.rendezvous_address
    variables = rank_variables(rank, rank - local[0].rank, workers, len(local), address)
    return {"GROUP_RANK": str(config.machines.node_rank), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | variables


def check_config(config: RunConfig) -> None:
    """Check that the bundle belongs to the plan and that the schedule can be executed.

    Raises:
        StaleError: the bundle was made for another plan, or was changed.
        UsageError: there are too few cores for the threads; the correction or the place of tied stages does not suit
            the schedule; or the precision does not suit the model.
        ScheduleError: the schedule deadlocks, or breaks another rule.
    """
    plan, bundle, correction = config.plan, config.bundle, config.delay_compensation
    if len(plan.stages) != len(bundle.stages):
        what = f"it has {len(bundle.stages)} stages, but the plan has {len(plan.stages)}"
        raise StaleError(config.bundle_dir / Bundle.FILE, what, "run `pdtool codegen` again")
    if correction and plan.kind.flushes:
        what = f"--correction {correction} has no effect with schedule {plan.schedule}"
        raise UsageError(what, "leave it out, or pass --correction none: no gradient is stale after a flush")
    if correction and correction.extrapolates_weights and plan.weights == "none":
        what = f"--correction {correction} predicts weights, so it cannot be combined with --weights none"
        raise UsageError(what, "use --weights stash or vertical-sync")
    cores = len(usable_cores())
    if config.threads_given and (config.threads or 0) > cores:  # more than a worker can have at the same time
        raise UsageError(
            f"--threads is {config.threads}, but this machine has {counted(cores, 'core')}", f"pass {cores} or fewer"
        )
    check_autocast(config.precision, bundle.autocast_off)
    for tied in bundle.tied:
        if len({s % plan.pipeline_depth for s in tied.stages}) < len(tied.stages):
            what = f"stages {', '.join(map(str, tied.stages))} share {tied.names[0]}, but two of them are on one worker"
            raise UsageError(what, "partition with another number of --chunks or --workers")
    bundle.check_files(config.bundle_dir)
    check_executable(plan.kind, config.shape)


def local_assignments(config: RunConfig) -> list[RankAssignment]:
    """Return the assignments of the workers that this machine starts; raises UsageError if there are none."""
    node_workers = config.machines.node_workers(config.plan.cluster.workers)
    local = [assignment for assignment in assign_ranks(config.plan) if assignment.worker in node_workers]
    if not local:
        raise UsageError(f"the plan uses no worker of machine {config.machines.node_rank}", "start fewer machines")
    return local


def _meeting_folder(config: RunConfig) -> AbstractContextManager[str]:
    """Make the private folder through which the workers of one machine meet; "" for several machines.

    It lies in multiprocessing's folder, which the reaper removes if this process is killed.
    """
    if config.machines.count > 1:
        return nullcontext("")
    return tempfile.TemporaryDirectory(prefix="meeting-", dir=multiprocessing.util.get_temp_dir())


def _forget_threads_of_torchrun() -> None:
    """Remove OMP_NUM_THREADS if torchrun set it: it sets 1 if the user has set nothing.

    The user's value is in the environment that torchrun, this process's parent, was started with.
    """
    with suppress(OSError):
        inherited = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        is_own_choice = any(entry.startswith(b"OMP_NUM_THREADS=") for entry in inherited)
        if not is_own_choice:
            os.environ.pop("OMP_NUM_THREADS", None)


@contextmanager
def start_errors_explained() -> Iterator[None]:
    """Say why multiprocessing could not start a process (the reaper, or a worker)."""
    try:
        yield
    except (OSError, EOFError) as error:
        if isinstance(error, (EOFError, ConnectionError)):  # the fork server has ended
            raise WorkerDiedError(f"the workers could not be started ({error})", "run the command again") from error
        remedy = next((remedy for text, remedy in _OF_FOLDER.items() if text in str(error)), write_remedy(error))
        raise PdtoolError(f"the workers could not be started ({error})", remedy) from error
