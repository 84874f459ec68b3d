"""Write a plan's stage files, and train them (`pdtool codegen` and `pdtool run`).

A run takes the stage files beside its plan, and generates missing ones. It notes anything unusual before its workers
start.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdtool.api.caller import unchanged_caller
from pdtool.api.console import note, status, training_progress
from pdtool.api.inputs import Inputs, bundle_of, given_or_only, optional_text, path_text
from pdtool.api.model_settings import Settings, assignments, with_settings
from pdtool.api.rescheduling import rescheduled
from pdtool.api.resuming import as_asked, note_options, note_resumption, own_plan, plan_resumed, recorded
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import ArtifactError, StaleError, UsageError
from pdtool.files import file_sha256
from pdtool.host import usable_cores
from pdtool.machines import is_first_worker, is_worker
from pdtool.options.declaration import common_fields, declared, read_options
from pdtool.options.run_options import RunOptions, WorkerOptions
from pdtool.schedule import gradient_delays
from pdtool.units import counted

if TYPE_CHECKING:
    from pdtool.runtime.config import RunConfig


@unchanged_caller()
def codegen(plan: Plan | Path | str, *, model: Path | str | None = None, output: Path | str | None = None) -> Bundle:
    """Write one PyTorch file per stage, and check that together they equal the model.

    Args:
        plan: the plan, or the path of its file.
        model: the model's file, if it has moved.
        output: folder to write; None: the plan's path without `.yaml`.

    Raises:
        UsageError: `output` is `-`.
        StaleError: the profile or the model's operators changed after the plan was made.
        ArtifactError: the plan is inconsistent.
        ModelError: the model cannot be imported or traced.
        PdtoolError: the stages are not equal to the model; nothing is written.
    """
    inputs = Inputs.load(plan, optional_text(model))
    folder = optional_text(output)
    if folder == "-":
        raise UsageError("-o - is not possible: codegen writes a folder, not a file", "name a folder")
    return write_stages(inputs, Path(folder) if folder else inputs.folder)


@unchanged_caller()
def run(
    plan: Plan | Path | str | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    target: str | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    compile: bool | None = None,
    resume: Path | str | None = None,
    output: Path | str | None = None,
    model: Path | str | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> Report:
    """Train a plan's stages, each on its workers, which this process starts and waits for.

    It first writes missing stage files. `report.target_reached` says whether the target was reached.

    An argument of None means the resumed run's value, else the default of `pdtool run --help`.

    Args:
        plan: the plan, or the path of its file; None: that of the resumed run, or the only one in plans/.
        epochs: total epochs, including those of a resumed run.
        steps: minibatches in an epoch, at most.
        target: stop when the validation reaches it, as "accuracy>=0.98".
        seed: seed of all random numbers.
        device: device to train on; "auto" is cuda if there is one.
        precision: precision of the computation.
        compile: put each stage through torch.compile.
        resume: folder of a run to continue.
        output: folder of the run; None: a new one in runs/, or that of `resume`.
        model: the model's file, if it has moved.
        settings: settings of functions in model.py that replace the plan's, as {"lr": 0.01}.
        options: other options of `pdtool run --help`, as `schedule="gpipe"` or `timeout="60s"`.

    Raises:
        StaleError: the profile or the model's operators changed since the plan was made, or stage files were edited.
        ModelError: the user's functions fail.
        WorkerDiedError: a worker ended, or did not answer.
        KeyboardInterrupt: Ctrl-C; all workers are gone.
    """
    given: dict[str, Any] = {"epochs": epochs, "steps": steps, "target": target, "seed": seed, "device": device}
    given |= {"precision": precision, "compile": compile, "resume": optional_text(resume)}
    given |= {"output": optional_text(output), "model": optional_text(model), "settings": assignments(settings)}
    given |= options
    asked = read_options("run", RunOptions, given)
    named = {name for name, option in declared(RunOptions).items() if given.get(option.keyword or name) is not None}
    return train_plan(*to_train(plan, asked, named))[1]


def write_stages(inputs: Inputs, folder: Path) -> Bundle:
    """Generate the bundle, and note what was checked."""
    from pdtool.frontend.user_code import undoing_user_changes
    from pdtool.generator.generate import generate

    target = folder.absolute()  # the user's module may change the folder
    edited = {path: path.read_bytes() for path in _edited_files(target)}
    with undoing_user_changes(), status("generating") as step:
        bundle = generate(inputs.plan, inputs.profile, inputs.model_file(), target, step)
    proof = {
        "values": "checked: outputs, gradients and buffers equal the model's, in training and evaluation",
        "shapes": "the model is too large to run here: only shapes and wiring are checked, not values",
    }
    for path, content in edited.items():
        names = chain([f"{path.name}~"], (f"{path.name}~{number}" for number in count(2)))
        kept = next(other for other in map(path.with_name, names) if not os.path.lexists(other))
        kept.write_bytes(content)
        note(f"{folder / path.name} was edited since codegen wrote it. Your edited file is now {folder / kept.name}")
    files = ", ".join([*(stage.file for stage in bundle.stages), Bundle.FILE])
    tied = (parameter.sentence() for parameter in bundle.tied)
    note("\n".join([f"wrote {folder}/ ({files})", *tied, proof[bundle.proof]]))
    for doubt in bundle.doubts:
        note(f"warning: {doubt}")
    return bundle


def to_train(
    plan: Plan | Path | str | None, asked: RunOptions, given: Collection[str], *, is_dry: bool = False
) -> tuple[Inputs, Plan, RunOptions]:
    """Return the inputs of a run, its plan with the requested schedule, and its options.

    Args:
        plan: None: that of the resumed run, or the only one in plans/.
        given: names of the options on the command line, or in the call.
        is_dry: whether no workers will follow.
    """
    before, path = asked, None if plan is None or isinstance(plan, Plan) else path_text(plan)
    asked = as_asked(path, asked, given)
    if is_first_worker(os.environ):
        note_options(before, asked)
    named = plan if isinstance(plan, Plan) else given_or_only("plan", path or own_plan(before))
    inputs = Inputs.load(named, asked.model, starts_workers=not (is_dry or is_worker(os.environ)))
    from pdtool.frontend.user_code import check_trainable, find_source  # loads torch

    check_trainable(find_source(inputs.model.source), inputs.model.function)
    inputs = with_settings(inputs, asked.model_settings)
    return inputs, rescheduled(inputs, asked), asked


def train_plan(inputs: Inputs, plan: Plan, asked: RunOptions) -> tuple[RunConfig, Report]:
    """Train as `asked` says, and return the configuration and the report.

    Args:
        plan: the plan of `inputs`, with the requested schedule.
    """
    from pdtool.frontend.compute_mode import check_device

    check_run(asked, plan.cluster.workers)
    check_device(asked.device)
    bundle, resumed = _bundle(inputs, trust=asked.trust), asked.resumed
    own = asked.output or (resumed if resumed and RunDir(resumed).checkpoints_folder.is_dir() else None)
    with nullcontext(Path(own)) if own else new_folder(Path("runs") / inputs.folder.name) as out:
        planned = _config(inputs, bundle, asked, out)
        config = replace(planned, plan=plan)
        config = _with_loader_workers(config, inputs.profile.loading_s, asked.loader_workers)
        note_idle_correction(config)
        _note_samples_per_update(config, planned)
        return config, _launched(config, inputs.profile, asked.log_every)


def _note_samples_per_update(config: RunConfig, planned: RunConfig) -> None:
    """Note if the options change how many samples an update averages, at the stage with the most."""
    samples, before = (each.plan.batch_size * max(each.shape.update_every) for each in (config, planned))
    if samples != before and is_first_worker(os.environ):
        note(f"an update averages {samples} samples (in the plan {before}): the learning rate may need to change")


def note_idle_correction(config: RunConfig) -> None:
    """Note if the correction changes nothing, because no gradient comes late enough."""
    correction, plan = config.delay_compensation, config.plan
    if correction and not plan.kind.flushes and is_first_worker(os.environ):
        delay = max(gradient_delays(plan.kind, config.shape))
        if delay < correction.least_delay:
            late = f"at most {counted(delay, 'update')} late" if delay else "not late"
            note(f"--correction {correction} changes nothing: the gradients of this plan are {late}")


def _bundle(inputs: Inputs, *, trust: bool) -> Bundle:
    """Return the plan's bundle; generate it if it is missing, or made from something else.

    Args:
        trust: take the stage files unchecked.

    Raises:
        StaleError: a stage file was edited and is not trusted; or the bundle must be generated, but this process is one
            of several workers started by torchrun or srun.
    """

    folder = inputs.folder
    if trust:
        return Bundle.load(folder / Bundle.FILE).trusting(folder)
    bundle = bundle_of(inputs.plan, folder)
    if bundle:
        _check_functions_again(inputs, bundle)
        return bundle
    if edited := _edited_files(folder):  # never overwrite a user's edits unasked
        remedy = "use --trust to train it as it is, or `pdtool codegen` to write it again"
        raise StaleError(edited[0], "has changed since codegen wrote it", remedy)
    if is_worker(os.environ):
        raise StaleError(folder, "contains no bundle of this plan", "run `pdtool codegen` before torchrun or srun")
    note(f"{folder}/ is missing or does not belong to this plan: generating it")
    return write_stages(inputs, folder)


def _check_functions_again(inputs: Inputs, bundle: Bundle) -> None:
    """Check the user's functions again if model.py or its settings have changed since codegen's check; raises
    ModelError."""
    from pdtool.frontend.user_code import find_source, undoing_user_changes

    planned_model = inputs.plan.model or inputs.profile.model
    has_same_settings = planned_model is not None and planned_model.typed_settings == inputs.model.typed_settings
    is_same_file = file_sha256(find_source(inputs.model.source)) in (bundle.model_sha256, *bundle.digests.values())
    if is_first_worker(os.environ) and not (is_same_file and has_same_settings):
        from pdtool.generator.user_functions import check_user_functions

        with undoing_user_changes(), status("checking the functions of the model file"):
            model_file = inputs.model_file()
            texts = {stage.file: (inputs.folder / stage.file).read_text("utf-8") for stage in bundle.stages}
            check_user_functions(model_file, inputs.plan, bundle, texts, model_file.build)


def _edited_files(folder: Path) -> list[Path]:
    """Return the stage files that have changed since codegen wrote them."""
    try:
        bundle = Bundle.load(folder / Bundle.FILE)
    except ArtifactError:
        return []
    return [path for stage in bundle.stages if (path := folder / stage.file).is_file() and not stage.is_in(path)]


def _config(inputs: Inputs, bundle: Bundle, asked: RunOptions, out: Path) -> RunConfig:
    from pdtool.generator.generate import check_stage_files
    from pdtool.runtime.config import RunConfig

    stages = inputs.plan.stage_nodes(inputs.profile)
    check = partial(check_stage_files, inputs.plan, stages, bundle, inputs.folder)
    config = RunConfig(
        plan=inputs.plan,
        bundle=bundle,
        bundle_dir=inputs.folder,
        model=inputs.model,
        trusted=inputs.trusted,
        out=out,
        threads_given=asked.threads is not None,
        machines=asked.machines,
        check_stage_files=None if asked.trust else check,
        plan_path=inputs.path,
        asked=recorded(asked),
        **common_fields(asked, WorkerOptions),
    )
    return replace(config, resume=asked.resumed, threads=asked.threads or inputs.profile.threads)


def check_run(asked: RunOptions, workers: int) -> None:
    """Check what can be checked before the plan and the stage files exist.

    Args:
        workers: number of workers in the cluster.

    Raises:
        UsageError: the run has no folder, or another run's, or nothing to resume or to train; or a machine has no share
            of the workers.
    """
    asked.machines.node_workers(workers)
    output, resume = asked.output, asked.resumed
    if output == "-":
        raise UsageError("-o - is not possible: a run writes a folder, not a file", "name a folder")
    if asked.resume and resume is None:
        what = "--resume does not say which run"
        raise UsageError(what, "pass its folder: --resume runs/NAME, or -o runs/NAME --resume")
    if resume is not None:
        RunDir(resume).check_unfinished(asked.epochs, asked.target)
    is_one_by_one = asked.nnodes > 1 or is_worker(os.environ)
    if output is None and is_one_by_one and (resume is None or not RunDir(resume).checkpoints_folder.is_dir()):
        raise UsageError(
            "with several machines, torchrun or srun, all workers must share the folder of the run, but none is named",
            "name it with -o",
        )
    if output:
        RunDir(Path(output)).check_no_other_run(resume)


def _with_loader_workers(config: RunConfig, loading_s: float | None, asked: int | None) -> RunConfig:
    """Set the run's loader workers: the requested number, else as many as the profile's loading time needs; note it."""
    from pdtool.runtime.loading.loading_cost import LoadingCost, at_most_the_cores

    cost = LoadingCost.of(loading_s, config.plan)
    workers = asked if asked is not None else at_most_the_cores(cost.workers if cost else 0, config)
    if cost and is_first_worker(os.environ) and (sentence := cost.sentence(workers, are_asked=asked is not None)):
        note(sentence)
    return replace(config, loader_workers=workers)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make and yield `runs/mnist-2`, or the first of `runs/mnist-2.2`, `.3`, ... that does not exist.

    A command that starts at the same moment gets another one. A folder that stays empty is removed at the end.
    """
    others = (path.with_name(f"{path.name}.{number}") for number in count(2))
    folder = next(folder for folder in chain([path], others) if _is_made(folder))
    try:
        yield folder
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _is_made(folder: Path) -> bool:
    """Make a folder, and return whether it is this process's: False if it exists already.

    If none can be made here, the run says why.
    """
    try:
        folder.mkdir(parents=True)
    except OSError:
        return not os.path.lexists(folder)
    return True


def _launched(config: RunConfig, profile: Profile, log_every: int | None) -> Report:
    from pdtool.runtime.launch.launcher import launch

    if not is_first_worker(os.environ):
        return launch(config, notify=note)
    before = plan_resumed(config)  # the launch replaces it by its own
    with training_progress(config.out, config.epochs, log_every) as on_metrics:
        return launch(config, on_metrics, note, partial(_note_start, config, profile, before))


def _note_start(config: RunConfig, profile: Profile, before: Plan | None) -> None:
    """Note what begins, and anything unusual about it."""
    plan = config.plan
    if config.target and config.target.interpretation:
        note(config.target.interpretation)
    count, node_rank = config.machines.count, config.machines.node_rank
    here = f"; this is machine {node_rank} of {count} (--node-rank counts from 0)" if count > 1 else ""
    workers = f"{counted(plan.workers, 'worker')} ({plan.config})"
    note(f"training on {workers}, schedule {plan.schedule}, into {config.out}/{here}")
    note_resumption(config, before)
    _note_crowding(config)
    _warn_about_predictions(config, profile)


def _note_crowding(config: RunConfig) -> None:
    """Warn if the profile's threads give this machine's workers more threads than it has cores."""
    from pdtool.runtime.launch.launcher import local_assignments

    if (
        config.threads is None
        or config.threads_given
        or config.device == "cuda"
        or "OMP_NUM_THREADS" in os.environ
        or is_worker(os.environ)
    ):
        return
    workers, cores = len(local_assignments(config)), len(usable_cores())
    fair_share = max(1, cores // workers)
    if config.threads > fair_share:
        note(
            f"{counted(workers, 'worker')} with {config.threads} threads each, as in the profile, share the {cores} "
            f"cores of this machine: profile with --threads {fair_share} and plan again, or pass "
            f"--threads {fair_share} to run"
        )


def _warn_about_predictions(config: RunConfig, profile: Profile) -> None:
    """Warn if the run computes in a different way than the profile's measurement or estimate."""
    from pdtool.frontend.compute_mode import default_device

    def warn(what: str, remedy: str) -> None:
        note(f"warning: {what}, so the predictions do not apply: {remedy}")

    device = default_device() if config.device == "auto" else config.device
    if (device == "cpu") != profile.is_measured_on_cpu:
        warn(
            f"the plan is for {profile.device.name} but the run computes on {device}", f"profile with --device {device}"
        )
    profiled = "fp32" if profile.precision in (None, "tf32") else profile.precision
    if config.precision != profiled:
        what = f"the plan is for {profiled} but the run computes in {config.precision}"
        warn(what, f"profile with --precision {config.precision}")
    elif profiled == "bf16" and profile.device.kind == "estimated":
        note("warning: the plan was estimated for bf16 weights, but the run keeps them in fp32 and needs more memory")
    if config.compiled and not profile.compiled:
        warn("the plan is for separate operators but torch.compile fuses them", "profile with --compile")
    elif profile.compiled and not config.compiled:
        what = "the plan is for compiled stages but the run does not compile them"
        warn(what, "run with --compile, or profile without it")
