"""The cause of a failure is named: the rank, what it did, and why; whoever waited for it is not blamed."""

from __future__ import annotations

import json
import pickle
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV1, CONV2, CONV3, Toy, faulty

import pdtool.runtime
from pdtool import host
from pdtool.artifacts.plan import Predicted
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import (
    ArtifactError,
    ModelError,
    NoPlanError,
    PartialWriteError,
    PdtoolError,
    ScheduleError,
    StaleError,
    TargetMissedError,
    TraceError,
    UsageError,
    WorkerDiedError,
    revived,
)
from pdtool.frontend.compute_mode import compiler_error, is_compiler_error
from pdtool.generator.composed import ModelFailedError, VerificationError
from pdtool.host import MemoryLimit, memory_limits, oom_kills
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import PeerErrorContext
from pdtool.runtime.launch import diagnosis, launcher, worker_main
from pdtool.runtime.launch import process_group as reaper
from pdtool.runtime.launch.diagnosis import diagnose
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.out_of_memory import is_out_of_memory, out_of_memory_error
from pdtool.runtime.ranks import assign_ranks
from pdtool.runtime.status import (
    ANY_PEER,
    NOBODY,
    PeerError,
    Status,
    WorkerFailure,
    prepare_folder,
    read_status,
    write_failure,
)
from pdtool.runtime.worker_end import model_error, record_failure


def with_code(toy: Toy, code: str) -> Toy:
    """The toy, with more in its model.py."""
    return replace(toy, model=f"{toy.model}\nimport os, sys, threading, time\n{code}\n")


def failure_of(config: RunConfig) -> PdtoolError:
    with pytest.raises(PdtoolError) as caught:
        launch(config)
    return caught.value


# --- workers that end without a word ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("raise KeyboardInterrupt", r"KeyboardInterrupt \(model.py:\d+\)"),
        ("sys.exit()", r"sys\.exit\(\) was called \(model.py:\d+\)"),
        ("sys.exit('no data here')", r"sys\.exit\('no data here'\) was called \(model.py:\d+\)"),
    ],
)
def test_a_worker_that_would_end_with_status_0_says_why(tmp_path: Path, statement: str, what: str) -> None:
    toy = with_code(CONV2, f"def loss(output, target):\n    {statement}")
    error = failure_of(harness.job(tmp_path, toy))
    assert isinstance(error, WorkerDiedError)
    assert error.exit_code == 5
    assert re.search(rf"^rank 1 \(stage 1, replica 0\), at 1F0 of epoch 1: {what}", error.what)
    assert error.remedy.startswith("raise an error in the model file instead; see "), "starting it again would not help"


@pytest.mark.parametrize("toy", [CONV1, CONV2], ids=["the only worker", "the last of two"])
def test_a_worker_that_ends_with_status_0_before_its_work_does_is_named(tmp_path: Path, toy: Toy) -> None:
    """Nobody waits for the only one, so nobody else would notice."""
    error = failure_of(harness.job(tmp_path, with_code(toy, "def loss(output, target):\n    os._exit(0)")))
    last = len(toy.stages) - 1
    assert str(error).startswith(
        f"rank {last} (stage {last}, replica 0) ended with exit status 0 and reported no error; it was last at "
        f"{last}F0 "
    )
    assert error.remedy.startswith("if the model file calls os._exit, raise an error instead; see ")


@pytest.mark.parametrize(
    ("raised", "what"),
    [(SystemExit("no data"), r"sys\.exit\('no data'\) was called \("), (MemoryError(), "out of memory")],
)
def test_a_worker_of_torchrun_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, what: str
) -> None:
    """There the command itself is the worker, and would end with status 0."""

    def start(*_: object) -> None:
        raise raised

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker_main.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(worker_main, "check_agreement", lambda *_: None)
    monkeypatch.setattr(host, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(worker_main, "start_worker", start)
    with pytest.raises(WorkerDiedError, match=what):
        worker_main.run_worker(harness.job(tmp_path, CONV1))


def test_a_missing_compiler_is_named_without_a_traceback_of_torch() -> None:
    """It was `start it again`, and advice for those who develop torch."""
    text = "No working C++ compiler found: (None, 'g++')\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"
    error = type("InvalidCxxCompiler", (RuntimeError,), {"__module__": "torch._inductor.exc"})(text)
    assert is_compiler_error(error)
    assert not is_compiler_error(RuntimeError(text))
    said = "torch.compile failed: InvalidCxxCompiler: No working C++ compiler found: (None, 'g++'); install a C++ "
    assert str(compiler_error(error)) == f"{said}compiler (g++, or set $CXX), or leave --compile out"


def test_a_loss_without_a_gradient_ends_the_run_at_the_first_minibatch(tmp_path: Path) -> None:
    toy = with_code(CONV2, "def loss(output, target, of=loss):\n    return of(output, target).detach()")
    error = failure_of(harness.job(tmp_path, toy))
    assert error.exit_code == 1
    assert str(error).startswith("rank 1 (stage 1, replica 0), at 1F0 of epoch 1: loss() returned a tensor without a")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_with_a_parameter_of_its_own_is_refused(tmp_path: Path, recompute: bool) -> None:
    """Nobody would train it: the optimizer gets the model's parameters."""
    code = (
        "_scale = torch.nn.Parameter(torch.ones(3))\n\n"
        "def loss(output, target, of=loss):\n    return of(output, target) * _scale.mean()"
    )
    spec = harness.job(tmp_path, with_code(CONV2, code))
    stages = [stage.model_copy(update={"recompute": recompute}) for stage in spec.plan.stages]
    error = failure_of(replace(spec, plan=spec.plan.model_copy(update={"stages": tuple(stages)})))
    assert error.exit_code == 1
    assert "loss() depends on a parameter of its own, of shape [3], which no stage trains; move it into" in str(error)


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (
            "ValueError('too large')",
            "model.py:2: forward raised ValueError: too large; let dataset() return only what ",
        ),
        (
            "IndexError('index out of range in self')",
            "model.py:2: forward raised IndexError: index out of range in self; ",
        ),
        ("OSError(5, 'Input/output error')", None),
        ("RuntimeError('CUDA error: CUBLAS_STATUS_EXECUTION_FAILED')", None),
        ("torch.AcceleratorError('device-side assert triggered')", None),
        ("__import__('pdtool').errors.ModelError('told elsewhere')", None),
    ],
)
def test_what_is_the_models_fault_is_told_at_its_line_and_not_to_start_again(
    tmp_path: Path, raised: str, text: str | None
) -> None:
    """As the forward of an opaque module of model.py raises it, which a stage file calls, or as a backward there does,
    which autograd calls."""
    scope: dict[str, Any] = {"torch": torch}
    for path, code in (
        ("/tmp/torchinductor/compiled.py", f"def compiled(): raise {raised}"),
        ("model.py", "def block():\n    compiled()"),
        ("stages/stage_0.py", "def forward(): block()"),
    ):
        exec(compile(code, str(tmp_path / path), "exec"), scope)
    with pytest.raises(Exception) as caught:
        scope["forward"]()
    found = model_error(caught.value, tmp_path / "stages")
    assert found is None if text is None else str(found).startswith(text)
    if text:  # as autograd calls a backward
        (tmp_path / "model.py").touch()
        scope["block"].__code__ = scope["block"].__code__.replace(co_name="backward")
        with pytest.raises(Exception) as caught:
            scope["block"]()
        caught.value.__traceback__ = caught.value.__traceback__.tb_next
        found = model_error(caught.value, tmp_path / "stages")
        assert str(found).startswith(text.replace("forward raised", "backward() raised").partition(";")[0])


@pytest.mark.parametrize("file", ["_mt19937.pyx", torch.__file__, pdtool.runtime.__file__, "/home/a/gone.py"])
def test_an_error_outside_of_the_users_files_is_not_the_models(tmp_path: Path, file: str) -> None:
    scope: dict[str, Any] = {}
    exec(compile("def backward(): raise ValueError('of a library')", file, "exec"), scope)
    with pytest.raises(ValueError, match="of a library") as caught:
        scope["backward"]()
    assert model_error(caught.value.with_traceback(caught.tb.tb_next), tmp_path / "stages") is None


def test_a_loss_that_reads_the_weights_of_the_model_is_not_told_to_move_them_into_it(tmp_path: Path) -> None:
    """A penalty over NET.parameters(): a stage computes with leaves of its own, which share their memory."""
    code = """
NET = None
def model(of=model):
    global NET
    NET = of()
    return NET
def loss(output, target, of=loss):
    return of(output, target) + sum(p.pow(2).sum() for p in NET.parameters())
"""
    error = failure_of(harness.job(tmp_path, with_code(CONV1, code)))
    assert error.exit_code == 1
    assert re.search(
        r"loss\(\) reads weights of the model from a variable, such as one of shape \[.*\], but", error.what
    )
    assert error.remedy.startswith(
        "for a penalty on weights, use weight_decay in optimizer(), or let forward return it "
    )


UNPRINTABLE = """
class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")
"""


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        ("ValueError('half a character: \\ud800')", "loss() raised ValueError: half a character: "),
        ("Unprintable()", "loss() raised Unprintable: its text cannot be read"),
        ("ValueError()", "loss() raised ValueError; "),
    ],
)
def test_an_error_whose_text_is_odd_is_told_like_any_other(tmp_path: Path, raised: str, text: str) -> None:
    spec = harness.job(tmp_path, with_code(CONV2, f"{UNPRINTABLE}\ndef loss(output, target):\n    raise {raised}"))
    error = failure_of(spec)
    assert error.exit_code == 1
    assert text in str(error)
    assert "raised" in (spec.out / "failure.txt").read_text()


def test_threads_and_processes_of_the_users_module_do_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
    code = """
import multiprocessing
threading.Thread(target=time.sleep, args=(600,)).start()
def dataset(split, of=dataset):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    return of(split)
"""
    start = time.monotonic()
    launch(harness.job(tmp_path, with_code(CONV2, code)))
    assert time.monotonic() - start < 30


ALONE = """
import multiprocessing
import torch.distributed as dist
multiprocessing.set_start_method("spawn")
os.chdir("/")
def loss(output, target, of=loss):
    assert not dist.is_initialized()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys()
    try:
        torch.utils.data.DistributedSampler([0])
    except ValueError:
        return of(output, target)
"""


def test_a_module_is_alone_in_its_process_as_in_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change the folder, and sees none of the other workers, whose part of the data is not to be divided."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    config = harness.job(Path("job"), with_code(CONV2, ALONE))
    assert not config.out.is_absolute()
    launch(config)
    assert (tmp_path / "job" / "run" / "report.json").is_file()


# --- hung workers -----------------------------------------------------------------------------------------------------

SLEEP_IN_LOSS = """
calls = []
def loss(output, target, of=loss):
    calls.append(1)
    if len(calls) == 3 and torch.distributed.get_rank() == 3:
        STATEMENT
    return of(output, target)
"""


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("statement", "how"),
    [("time.sleep(600)", "did not answer for 2 s"), ("os.kill(os.getpid(), 19)", "is stopped (SIGSTOP)")],
    ids=["asleep", "stopped"],
)
def test_a_hung_replica_is_named_and_not_those_that_wait_for_it(tmp_path: Path, statement: str, how: str) -> None:
    toy = with_code(CONV2, SLEEP_IN_LOSS.replace("STATEMENT", statement))
    error = failure_of(harness.job(tmp_path, toy, (2, 2), timeout_s=2.0))
    assert error.exit_code == WorkerDiedError.exit_code
    assert str(error).startswith(f"rank 3 (stage 1, replica 1) {how}; it was last at 1F")


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(harness.job(tmp_path, CONV3, (1, 2, 1), timeout_s=5.0))


class Left:
    """What four workers leave behind, without running any: rank 0, ranks 1 and 2 of one stage, rank 3."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.ranks = assign_ranks(config.plan)
        prepare_folder(config.out, range(4), keep_metrics=False)

    def status(self, rank: int, text: str, waits_for: int = NOBODY) -> None:
        Status.begin(self.config.out, rank)
        status = Status.of_this_process
        status.set(text)
        if waits_for != NOBODY:
            status.wait_begins(waits_for)

    def failure(self, rank: int, what: str, peer: int | None = None, **more: Any) -> None:
        error = WorkerDiedError(what) if peer is None else PeerError(what, peer=peer, is_timeout="Timed out" in what)
        write_failure(self.config.out, rank, WorkerFailure(error, **more))

    def diagnosis(self, exit_codes: dict[int, int]) -> PdtoolError:
        return diagnose(self.config, self.ranks, exit_codes)


def test_the_one_that_waits_for_nobody_is_named(left: Left) -> None:
    left.status(0, "0B3", waits_for=1)
    left.status(1, "1U2", waits_for=ANY_PEER)
    left.status(2, "1F3")
    left.status(3, "2F3", waits_for=2)
    left.failure(0, "backward 'a' did not arrive (Timed out waiting 5 s)", peer=1)
    assert str(left.diagnosis({0: 5})).startswith(
        "rank 2 (stage 1, replica 1) did not answer for 5 s; it was last at 1F3"
    )


@pytest.mark.parametrize("why", ["Timed out waiting 5000ms", "Connection closed by peer"])
def test_one_that_was_stopped_while_it_waited_is_named(left: Left, why: str) -> None:
    """A worker that timed out closes its connections, and another may write that down first."""
    for rank in range(4):
        left.status(rank, "1F3", waits_for=ANY_PEER)
    left.failure(0, f"the validation metrics did not come ({why})", peer=ANY_PEER, stopped=[2])
    error = left.diagnosis({0: 5})
    assert str(error).startswith(
        "rank 2 (stage 1, replica 1) is stopped (SIGSTOP); it was last at 1F3, where it waited"
    )


def test_a_killed_fork_server_is_named_and_no_worker(left: Left) -> None:
    left.status(0, "0B3", waits_for=1)
    left.failure(0, "backward 'a' did not arrive (Connection closed by peer)", peer=1)
    all_ended = str(left.diagnosis(dict.fromkeys(range(4), 255)))
    assert all_ended.startswith("the fork server, which starts all workers, has ended; start it again")
    one_exited = str(left.diagnosis({0: 5, 1: 255}))
    assert one_exited.startswith("rank 1 (stage 1, replica 0) ended with exit status 255 and reported no error")


def test_a_run_that_was_stopped_for_too_long_blames_nobody(left: Left) -> None:
    left.status(0, "0B3", waits_for=1)
    left.failure(0, "backward 'a' did not arrive (Timed out)", peer=1)
    told = str(diagnose(left.config, left.ranks, {0: 5}, paused_s=10 + left.config.timeout_s))
    assert told.startswith("the run was stopped for ")
    assert str(diagnose(left.config, left.ranks, {0: 5}, paused_s=1.0)).startswith("no message from rank 1 ")


def test_the_way_on_is_one_that_works(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last epoch there is nothing to continue."""
    epochs = left.config.epochs
    for done, way in (
        ({}, "start it again"),
        ({epochs - 1: 0}, "--resume`"),
        ({epochs: 0}, f"`pdtool export {left.config.out}`"),
    ):
        monkeypatch.setattr(RunDir, "checkpoints", lambda self, done=done: done)
        assert way in left.diagnosis({0: -15, 1: 5, 2: 5, 3: 5}).remedy


def test_of_two_that_compute_the_one_that_has_been_silent_longest_is_named(left: Left) -> None:
    left.status(2, "1F3")
    time.sleep(0.002)
    left.status(1, "1F4")
    left.status(0, "0B3", waits_for=1)
    left.status(3, "2F3", waits_for=2)
    left.failure(3, "forward 'b' did not arrive (Timed out waiting 5 s)", peer=2)
    assert "rank 2 (stage 1, replica 1) did not answer" in str(left.diagnosis({3: 5}))


def test_where_all_wait_for_each_other_the_first_to_give_up_is_believed(left: Left) -> None:
    for rank in range(4):
        left.status(rank, "1F3", waits_for=ANY_PEER)
    left.failure(3, "forward 'b' did not arrive (Timed out waiting 5 s)", peer=2, at_s=1.0)
    left.failure(0, "backward 'a' did not arrive (Timed out waiting 5 s)", peer=1, at_s=2.0)
    said = str(left.diagnosis({0: 5}))
    assert said.startswith("no message from rank 2 (stage 1, replica 1) arrived within 5 s, and all workers")
    assert "check whether the links are too slow for these messages" in said, "no worker is to blame for a slow link"


def test_a_worker_whose_end_only_its_neighbour_saw(left: Left) -> None:
    left.failure(0, "numbers were not averaged (Connection closed by peer)", peer=ANY_PEER, gone=[2])
    assert str(left.diagnosis({0: 5})).startswith("rank 2 (stage 1, replica 1) died; it left no record here")


@pytest.mark.parametrize(("code", "how"), [(-11, "was killed by SIGSEGV"), (-50, "was killed by signal 50")])
def test_a_signal_is_named(left: Left, code: int, how: str) -> None:
    left.status(2, "1F3")
    assert str(left.diagnosis({2: code})).startswith(f"rank 2 (stage 1, replica 1) {how}; it was last at 1F3;")


def test_one_that_closed_its_connections_has_not_been_waited_for(left: Left) -> None:
    left.status(1, "1F3")
    left.failure(0, "numbers were not averaged (Connection closed by peer)", peer=ANY_PEER)
    left.failure(2, "numbers were not averaged (Connection closed by peer)", peer=ANY_PEER)
    left.failure(3, "forward 'b' did not arrive (Connection closed by peer)", peer=2)
    assert str(left.diagnosis({0: 5})).startswith(
        "rank 1 (stage 1, replica 0) closed its connections; it was last at 1F3;"
    )


# NCCL reports no lost peer: work.wait() does not block the host, and in the end NCCL's watchdog aborts the process.


def test_one_that_died_is_named_and_not_the_one_that_the_watchdog_killed_for_it(left: Left) -> None:
    """The launcher sees both ends, or a third worker saw the first one gone."""
    left.status(0, "0F9")
    left.status(2, "1F3")
    killed_first = "rank 2 (stage 1, replica 1) {}; it was last at 1F3;"
    assert str(left.diagnosis({0: -6, 2: -9})).startswith(killed_first.format("was killed by SIGKILL"))
    left.failure(3, "numbers were not averaged (Connection closed by peer)", peer=ANY_PEER, gone=[2])
    assert str(left.diagnosis({0: -6})).startswith(killed_first.format("died"))
    left.failure(1, "the loss is nan")
    assert str(left.diagnosis({0: -6, 2: -9})).startswith("rank 1 (stage 1, replica 0), at the start: the loss is nan")


def test_one_on_another_machine_is_found_by_its_status(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended it is not seen here: only that the watchdog killed a worker of this machine after the timeout."""
    config = replace(left.config, device="cuda")
    left.status(2, "1F3")
    time.sleep(0.002)
    for rank in (0, 1, 3):
        left.status(rank, "1F4")
    later_s = time.time() + config.timeout_s
    monkeypatch.setattr(diagnosis.time, "time", lambda: later_s)
    error = diagnose(config, left.ranks[:1], {0: -6})
    assert str(error).startswith("rank 2 (stage 1, replica 1) did not answer for 5 s; it was last at 1F3")
    assert "its launcher saw it end with -6" in (RunDir(config.out).failure_file).read_text()
    everyone = diagnose(config, left.ranks, {0: -6, 1: -6, 2: -6, 3: -6})
    assert str(everyone).startswith("rank 2 (stage 1, replica 1) did not answer"), "all hung: the first one is named"


def test_one_that_aborts_while_it_computes_is_named_itself(left: Left) -> None:
    config = replace(left.config, device="cuda")
    for rank in range(4):
        left.status(rank, "1F4")
    error = str(diagnose(config, left.ranks, {1: -6}))
    assert error.startswith("rank 1 (stage 1, replica 0) was killed by SIGABRT; it was last at 1F4")
    assert "NCCL's watchdog ends a worker if another worker is lost, perhaps on another machine" in error


def test_the_first_error_is_the_cause(left: Left) -> None:
    left.failure(0, "later", at_s=2.0)
    left.failure(3, "earlier", at_s=1.0)
    left.failure(1, "no activation (Connection closed by peer)", peer=0, at_s=0.5)
    assert str(left.diagnosis({0: 5})).startswith("rank 3 (stage 2, replica 0), at the start: earlier;")


ERRORS: list[PdtoolError] = [
    PdtoolError("the loss is nan", "lower the learning rate"),
    UsageError("--seed is 0 and 1"),
    ModelError("model.py:3: loss() raised", "mend it"),
    TraceError("no graph", "rewrite it", location="model.py:3", module="encoder"),
    PartialWriteError("writes", location="model.py:4"),
    ArtifactError(Path("metrics.jsonl"), "is damaged", "remove it", field="line 2"),
    StaleError("stage_0.py", "differs from what codegen writes", "run codegen"),
    NoPlanError("none fits"),
    ScheduleError("a cycle\nworker 0 | 0F0", "mend it"),
    WorkerDiedError("the loader died"),
    TargetMissedError("accuracy 0.5"),
    VerificationError("stage 1 differs"),
    ModelFailedError("the model failed"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_a_worker_arrives_as_what_it_was(left: Left, error: PdtoolError) -> None:
    """By name, with all that its class says; `what` says also who met with it, and where."""
    text = str(error)
    code = record_failure(left.config.out, 1, error)
    arrived = left.diagnosis({1: code})
    assert type(arrived) is type(error)
    assert arrived.exit_code == error.exit_code == code
    assert arrived.what == f"rank 1 (stage 1, replica 0), at the start: {error.what}"
    assert arrived.remedy.startswith(error.remedy)
    assert json.loads(json.dumps(error.fields, default=str)) == arrived.fields
    assert f"it said: {error.what}\n" in RunDir(left.config.out).failure_file.read_text()
    pickled = pickle.loads(pickle.dumps(error))
    assert (type(pickled), str(pickled), pickled.fields) == (type(error), text, error.fields)


def test_all_errors_are_among_them() -> None:
    def kinds(of: type[PdtoolError]) -> set[type[PdtoolError]]:
        return {of}.union(*(kinds(kind) for kind in of.__subclasses__()))

    own = {kind for kind in kinds(PdtoolError) if kind.__module__.startswith("pdtool.")}
    assert {type(error) for error in ERRORS} == own - {PeerError}


def test_an_error_of_an_unknown_class_is_that_of_a_worker_that_died() -> None:
    error = revived("TheirError", "what", "remedy", {})
    assert (type(error), str(error)) == (WorkerDiedError, "what; remedy")


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), ConnectionRefusedError("unexpected EOF")])
def test_a_fork_server_that_ends_while_it_starts_a_process_is_told_without_a_traceback(error: Exception) -> None:
    named = pytest.raises(WorkerDiedError, match=r"could not be started \(unexpected EOF\); run the command again$")
    with named, launcher.start_errors_explained():
        raise error


def test_a_reaper_that_dies_as_it_starts_is_named(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(reaper, "_lead_group", max)  # of a pipe and a text: it fails at once
    with pytest.raises(WorkerDiedError, match=r"the process that ends the workers .* could not start; .*__main__"):
        reaper.Reaper()


def test_every_workers_story_is_in_a_file(left: Left) -> None:
    left.status(0, "0B3", waits_for=1)
    left.status(1, "1F3")
    lost = "backward 'a' did not arrive (Timed out waiting 5 s)"
    left.failure(0, lost, peer=1, traceback="Traceback of rank 0\nline\udc81 two")
    error = left.diagnosis({0: 5})
    assert f"see {RunDir(left.config.out).failure_file} for what each worker did" in error.remedy
    assert "did not arrive" not in str(error)
    story = (RunDir(left.config.out).failure_file).read_text()
    assert "rank 0 (stage 0, replica 0): last at 0B3" in story
    assert "waiting for rank 1 for the last" in story
    assert "it said: backward 'a' did not arrive" in story
    assert "  Traceback of rank 0\n  line\\udc81 two\n" in story
    assert "rank 3 (stage 2, replica 0): last at the start, it has not started" in story
    prepare_folder(left.config.out, range(4), keep_metrics=False)
    assert not (RunDir(left.config.out).failure_file).exists()


def test_a_status_says_for_whom_a_worker_waits(left: Left) -> None:
    out = left.config.out
    left.status(0, "0F0")
    assert not read_status(out, 0).is_waiting
    begin_s = read_status(out, 0).since_s
    assert begin_s <= time.time()
    status = Status.of_this_process
    status.wait_begins()
    assert read_status(out, 0).waits_for == ANY_PEER
    status.waits_for(2)
    status.wait_begins()  # one within another
    status.wait_ends()
    assert (read_status(out, 0).waits_for, read_status(out, 0).text) == (2, "0F0")
    status.wait_ends()
    assert read_status(out, 0).waits_for == NOBODY
    assert read_status(out, 0).since_s >= begin_s
    with pytest.raises(PeerError), PeerErrorContext("nothing came", 1):
        raise RuntimeError("Timed out")
    assert read_status(out, 0).waits_for == 1


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toy", "where"),
    [
        (faulty("torch.empty(2**45) if self.n == 4 else 0"), "rank 1 (stage 1, replica 0), at 1F4 of epoch 1"),
        (
            with_code(CONV2, "def dataset(split):\n    raise MemoryError"),
            "rank 0 (stage 0, replica 0), at the loading of the data",
        ),
    ],
    ids=["stage", "loader"],
)
def test_a_failed_allocation_is_told_as_lack_of_memory(tmp_path: Path, toy: Toy, where: str) -> None:
    error = failure_of(harness.job(tmp_path, toy))
    assert re.search(r": out of memory \((MemoryError\)|DefaultCPUAllocator: can't allocate memory: )", str(error))
    assert str(error).startswith(where)
    assert "the plan has no prediction for stage" in error.what
    assert "this machine has" in error.what
    assert "--memory" in error.remedy
    assert error.exit_code == WorkerDiedError.exit_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("Connection closed by peer"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_lack_of_memory_looks_like(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    outer = PdtoolError("step 3 of Adam raised")
    outer.__cause__ = error
    assert is_out_of_memory(outer) == expected


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't allocate memory"), torch.AcceleratorError("CUDA error: device-side assert triggered")],
    ids=["memory", "GPU"],
)
def test_no_peer_is_blamed_for_lack_of_memory_or_a_failed_gpu(error: RuntimeError) -> None:
    with pytest.raises(type(error), match=str(error)), PeerErrorContext("gradients were not averaged", 1):
        raise error


def test_the_prediction_stands_beside_what_there_is(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = dict.fromkeys(("bottleneck_s", "throughput_samples_per_s", "gain_over_data_parallel"), 0.0)
    times = dict.fromkeys(("compute_s", "allreduce_s"), (0.0,) * 3)
    predicted = Predicted(
        **zeros,
        **times,
        transfer_s=(0.0, 0.0),
        memory_bytes=(1, 2_500_000_000, 3),
        traffic_bytes=0,
        plan_sha256="0" * 64,
    )
    plan = left.config.plan.model_copy(update={"predicted": predicted})
    limits = [MemoryLimit("this machine", 16 * 10**9, 10**9), MemoryLimit("the control group", 3 * 10**9, 10**8)]
    monkeypatch.setattr(host, "memory_limits", lambda: limits)
    error = out_of_memory_error(MemoryError(), plan, left.ranks[1], torch.device("cpu"))
    assert error.what == (
        "out of memory (MemoryError); the plan predicts 2.5 GB for stage 1, and this machine has 16 GB, of which 1 GB "
        "are free now, the control group has 3 GB, of which 100 MB are free now"
    )


@pytest.mark.parametrize(("kills", "says"), [(8, "killed 1 process(es) since"), (7, None), (None, "kernel does this")])
def test_a_kill_is_explained_by_the_kernels_count(
    left: Left, monkeypatch: pytest.MonkeyPatch, kills: int | None, says: str | None
) -> None:
    """The count stood at 7 when the worker began."""
    monkeypatch.setattr(host, "oom_kills", lambda: 7)
    left.status(1, "1F3")
    monkeypatch.setattr(host, "oom_kills", lambda: kills)
    error = left.diagnosis({1: -signal.SIGKILL})
    assert str(error).startswith("rank 1 (stage 1, replica 0) was killed by SIGKILL; it was last at 1F3")
    assert ("memory" in str(error)) == (says is not None)
    assert says is None or says in str(error)
    assert "memory" not in str(left.diagnosis({1: -signal.SIGTERM}))
    assert "memory" not in str(left.diagnosis({1: -signal.SIGABRT}))


def test_the_limits_of_this_process_as_linux_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text("4:memory:/a/b\n0::/c/d\n")
    (proc / "vmstat").write_text("pgfault 5\noom_kill 3\n")
    for folder, files in {
        "memory/a/b": {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 1},
        "memory/a": {"memory.limit_in_bytes": 700, "memory.usage_in_bytes": 300},
        "c/d": {"memory.max": "max", "memory.current": 5},
        "c": {"memory.max": 600, "memory.current": 500},
    }.items():
        (groups / folder).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (groups / folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(host, "_PROC", proc)
    monkeypatch.setattr(host, "_CGROUPS", groups)
    assert memory_limits() == [
        MemoryLimit("this machine", 1024_000, 409_600),
        MemoryLimit("the control group", 600, 100),
    ]
    assert oom_kills() == 3
    for path in ("meminfo", "vmstat", "self/cgroup"):
        (proc / path).unlink()
    assert memory_limits() == []
    assert oom_kills() is None


@pytest.mark.parametrize(("epochs_done", "goes_on"), [(1, True), (0, False)])
def test_a_full_disk_says_how_to_go_on(
    left: Left, monkeypatch: pytest.MonkeyPatch, epochs_done: int, goes_on: bool
) -> None:
    error = PdtoolError("the checkpoint could not be written (No space left on device)", "free some space")
    write_failure(left.config.out, 0, WorkerFailure(error))
    left.config = replace(left.config, epochs=3)
    monkeypatch.setattr(RunDir, "checkpoints", lambda _: dict.fromkeys(range(1, epochs_done + 1)))
    found = str(left.diagnosis({0: 1}))
    assert "; free some space" in found
    assert ("continue from the last checkpoint with `pdtool run" in found) is goes_on
