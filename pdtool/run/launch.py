"""Start the workers, watch them, and say which one failed and why.

On one machine or several, torch elastic starts them; inside torchrun or srun this process is one of them already.
Workers come from a fork server that imports torch once; they end when this process does.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pdtool.artifacts.report import Report
from pdtool.errors import PdtoolError, ScheduleError, StaleError, UsageError, WorkerDiedError
from pdtool.run import checkpoint, log
from pdtool.run.process import train_here, work
from pdtool.run.spec import Place, RunSpec, places
from pdtool.run.status import FOLDER, OWN, Failure, clear, read_failure, read_pid, read_status
from pdtool.schedule import build, is_asynchronous, validate

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PATIENCE_S = 2.0  # for workers to end after one has failed
# An error crosses the process border as its text and exit code.
ERRORS = {1: PdtoolError, 2: UsageError, 3: ScheduleError}
# What the fork server imports; torch._dynamo comes with the first optimizer, for half a second in each worker.
MODULES = ["torch", "torch._dynamo", "pdtool.run.process"]


def launch(spec: RunSpec, on_event: Callable[[dict[str, Any]], None] | None = None) -> Report:
    """Run to the end.

    Args:
        on_event: called in a thread with each line of metrics.jsonl as it is written.

    Raises:
        WorkerDiedError: a worker ended or did not answer; rank, stage and minibatch are named, all others are gone.
        PdtoolError: what a worker found wrong (a loss that is not a number, a checkpoint that could not be written).
        KeyboardInterrupt: Ctrl-C; all workers are gone.
    """
    check(spec)
    start = checkpoint.facts(checkpoint.latest(spec.resume))["epoch"] if spec.resume else 0
    if spec.resume and start >= spec.epochs:
        raise UsageError(f"{spec.resume} has its {start} epoch(s) already", "give more --epochs than that")
    environment = joined(os.environ, spec.rdzv_endpoint)
    if environment:
        os.environ.update(environment)
        return train_here(spec)
    mine = on_this_node(spec)
    clear(spec.out, [place.rank for place in mine], fresh=not spec.resume)
    multiprocessing.set_forkserver_preload(MODULES)
    config = _config(spec, len(mine))
    reader, _writer = multiprocessing.Pipe(duplex=False)  # its other end closes with this process
    stopped = None
    with log.following(spec.out, on_event, after=start), _impatient(spec, mine), _quiet(), _signals_restored():
        try:
            reports = elastic_launch(config, work)(spec, dict(os.environ), os.getcwd(), reader)
        except SignalException as error:
            stopped = error.sigval
        except json.JSONDecodeError as error:  # what torch elastic reads when a worker could not write how it ended
            raise PdtoolError(
                f"a worker died, and could not write why into {spec.out}", "see whether the disk is full"
            ) from error
        except ChildFailedError as error:
            failures = {mine[rank % len(mine)].rank: f.exitcode for rank, f in error.failures.items()}
            if -signal.SIGINT not in failures.values():
                raise diagnose(spec, failures) from None
            stopped = signal.SIGINT  # Ctrl-C reaches the whole process group
    if stopped:
        signal.raise_signal(stopped)  # as if torch elastic had not caught it
        raise KeyboardInterrupt
    shutil.rmtree(spec.out / FOLDER, ignore_errors=True)
    return Report.parse(next(iter(reports.values())))


def check(spec: RunSpec) -> None:
    """Whether plan and bundle go together, and the schedule can be executed; raises StaleError or ScheduleError."""
    plan, bundle = spec.plan, spec.bundle
    if len(plan.stages) != len(bundle.stages):
        raise StaleError(
            spec.bundle_dir / "bundle.yaml",
            f"it has {len(bundle.stages)} stages, the plan {len(plan.stages)}",
            "run `pdtool codegen` again",
        )
    if spec.correction and not is_asynchronous(plan.schedule):
        raise UsageError(
            f"correction {spec.correction} with schedule {plan.schedule}",
            "leave it out: with a flush no gradient comes late",
        )
    for tied in bundle.tied:
        if len({s % plan.pipeline_depth for s in tied.stages}) < len(tied.stages):
            raise UsageError(
                f"stages {', '.join(map(str, tied.stages))} share {tied.names[0]}, and two of them are on one worker",
                "partition with another number of --chunks or --workers",
            )
    bundle.check_files(spec.bundle_dir)
    shape = plan.shape(tuple(tied.stages for tied in bundle.tied))
    enough = 2 * max(shape.update_every) * max(shape.in_flight) + 1
    validate(build(plan.schedule, shape, enough), shape, enough)


def on_this_node(spec: RunSpec) -> list[Place]:
    """The workers this machine starts: the cluster's workers are shared evenly among the machines, in order."""
    total = spec.plan.cluster.cluster().workers
    if total % spec.nnodes or not 0 <= spec.node_rank < spec.nnodes:
        raise UsageError(
            f"machine {spec.node_rank} of {spec.nnodes} cannot have its share of the {total} workers "
            f"of topology {spec.plan.cluster.cluster().topology}",
            "give --nnodes that divides them and --node-rank from 0",
        )
    if spec.nnodes > 1 and not spec.rdzv_endpoint:
        raise UsageError(f"{spec.nnodes} machines need a place to meet", "give --rdzv-endpoint HOST:PORT of machine 0")
    each = total // spec.nnodes
    mine = [place for place in places(spec.plan) if place.worker // each == spec.node_rank]
    if not mine:
        raise UsageError(f"the plan uses no worker of machine {spec.node_rank}", "start fewer machines")
    return mine


def joined(environment: Mapping[str, str], endpoint: str) -> dict[str, str]:
    """Inside torchrun or srun, what makes this process a worker, as torch's environment variables; else nothing."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return {"LOCAL_RANK": environment.get("LOCAL_RANK", "0")}
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        host, _, port = endpoint.partition(":")
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_NTASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
            "LOCAL_WORLD_SIZE": environment.get("SLURM_NTASKS_PER_NODE", "1"),
            "MASTER_ADDR": host or environment.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"),
            "MASTER_PORT": port or "29511",
        }
    return {}


def diagnose(spec: RunSpec, exit_codes: Mapping[int, int]) -> PdtoolError:
    """The error to raise: the failure that the others follow from.

    A worker that loses its peer says whom it lost; following these leads to one that failed by itself, or that said
    nothing because it was killed.

    Args:
        exit_codes: of the ranks that torch elastic saw fail, negative for a signal.
    """
    everyone = {place.rank: place for place in places(spec.plan)}
    said = {rank: failure for rank in everyone if (failure := read_failure(spec.out, rank))}
    for rank, failure in said.items():
        if failure.peer == OWN:
            return _failed(spec, everyone[rank], failure)
    silent = [rank for rank in exit_codes if rank not in said]
    pointing = [rank for rank, failure in said.items() if failure.peer in everyone]
    unheard = [place.rank for place in on_this_node(spec) if place.rank not in said]
    rank = [*silent, *pointing, *unheard, *exit_codes][0]
    followed = {rank}
    while rank in said and (peer := said[rank].peer) in everyone and peer not in followed:
        followed.add(rank := peer)
    told = "; ".join(f"{everyone[r]}: {failure.what}" for r, failure in said.items())
    code = exit_codes.get(rank, 0)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "died"
    if rank not in exit_codes and "Timed out" in told:
        how = "did not answer"
    return WorkerDiedError(
        f"{everyone[rank]} {how}; it was last at {read_status(spec.out, rank)}" + (f". {told}" if told else ""),
        "go on from the last checkpoint with --resume" if checkpoint.complete(spec.out) else "start it again",
    )


def _failed(spec: RunSpec, place: Place, failure: Failure) -> PdtoolError:
    kind = ERRORS.get(failure.exit_code, WorkerDiedError)
    return kind(f"{place}, at {read_status(spec.out, place.rank)}: {failure.what}", failure.remedy)


def _config(spec: RunSpec, local: int) -> LaunchConfig:
    several = spec.nnodes > 1
    return LaunchConfig(
        min_nodes=spec.nnodes,
        max_nodes=spec.nnodes,
        nproc_per_node=local,
        run_id="pdtool" if several else uuid.uuid4().hex,
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=spec.rdzv_endpoint if several else "localhost:0",
        rdzv_configs={"rank": spec.node_rank} if several else {},
        local_addr=None if several else "localhost",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(spec.out / FOLDER / f"node-{spec.node_rank}")),
    )


@contextmanager
def _impatient(spec: RunSpec, mine: Sequence[Place]) -> Iterator[None]:
    """When a worker has failed, kill those of this machine that do not end: a stopped process ignores SIGTERM."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if any(read_failure(spec.out, place.rank) for place in mine):
                if not over.wait(PATIENCE_S):
                    for place in mine:
                        with suppress(ProcessLookupError):
                            os.kill(read_pid(spec.out, place.rank), signal.SIGKILL)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _signals_restored() -> Iterator[None]:
    """torch elastic sets handlers and leaves them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch elastic logs what `launch` raises; say it once."""
    names = [n for n in logging.root.manager.loggerDict if n.startswith(("torch.distributed", "torch.multiprocessing"))]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
