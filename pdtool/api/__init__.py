"""pdtool in Python: the commands as functions, which take and return the artifacts themselves.

    import pdtool

    profile = pdtool.profile("model.py", batch_size=64)
    plan = pdtool.partition(profile, topology="4", bandwidth="1Gbit/s")
    print(plan.config, plan.predicted.gain_over_data_parallel)
    report = pdtool.run(plan, epochs=5)

Each writes the files that the command of its name writes, and what it has to say goes to stderr. Where a profile or a
plan is taken, its path does as well as the artifact. Options have the names, values and defaults of the command line;
those that are not named here are passed on under the names of `pdtool COMMAND --help`, with underscores.

A script that calls `run` starts workers: put the call under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdtool.api import planning, profiling, training
from pdtool.api.inputs import Inputs, checked, path_of_profile, profile_of, rescheduled
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.cli.click_options import file_name, option_values
from pdtool.cli.commands import simulate as simulating
from pdtool.cli.commands import steps as partitioning
from pdtool.cli.commands import steps as profiling
from pdtool.cli.commands import steps as running
from pdtool.errors import UsageError

if TYPE_CHECKING:
    from pdtool.api.staleness import FreshnessFinding
    from pdtool.cli.command_line import SectionedCommand
    from pdtool.planner.choice.comparison import Simulation
    from pdtool.planner.choice.plan_check import Finding

__all__ = ["check", "codegen", "partition", "profile", "run", "simulate"]

Settings = Mapping[str, str | int | float | bool]


def profile(
    model: Path | str,
    *,
    settings: Settings | None = None,
    batch_size: int = 32,
    device: str = "auto",
    threads: int | None = None,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None,
    compile: bool = False,
    calibrate: str | None = None,
    output: Path | str | None = None,
) -> Profile:
    """Measure what each operator of a model costs, or estimate it for a device that is not here.

    Args:
        model: `model.py`, `model.py:FUNCTION`, `package.module` or `package.module:FUNCTION`.
        settings: keyword arguments of the model's function.
        batch_size: samples in one minibatch, the size that will run.
        device: `cpu` or `cuda` measures here, `auto` on cuda where there is one; a name of `pdtool devices`, or a YAML
            file, estimates.
        threads: CPU threads to measure with, as many as each worker will have; None: all cores.
        precision: what is measured or estimated; None: what the model has.
        compile: measure what `run(compile=True)` runs.
        calibrate: path of a measured profile, to which the estimate is fitted.
        output: file to write; None: profiles/NAME.json.

    Returns:
        the profile, with times in seconds and sizes in bytes.

    Raises:
        UsageError: the options make no sense together, or the file to write is another than a profile.
        ModelError: the model cannot be imported, traced or executed.
    """
    given = {"batch_size": batch_size, "device": device, "threads": threads, "precision": precision}
    given |= {"compiled": compile, "calibrate": calibrate, "model_settings": _assignments(settings)}
    values = _values(profiling.profile, given)
    result, path = profiling.profiled(str(model), _text(output), **values)
    result.save(path)
    return result


def partition(
    profile: Profile | Path | str,
    *,
    topology: str | None = None,
    cluster: Path | str | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    memory: str | None = None,
    strategy: str = "auto",
    replicas: str | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    output: Path | str | None = None,
    **options: Any,
) -> Plan:
    """Divide a profiled model into stages for the fastest pipeline on a cluster.

    Args:
        profile: the profile, or the path of its file.
        topology: sizes of the cluster's nested levels, the outermost first, as "4x4".
        cluster: a file that `pdtool probe` wrote, in place of `topology`, `bandwidth` and `latency`.
        bandwidth: of one link of each level, in bits or bytes per second, as "10Gbit/s,12GB/s".
        latency: of one message at each level, as "50us,5us".
        memory: of each device, as "16GB", or "none" for no limit; None: that of the profiled device.
        strategy: the kind of plan, as "straight"; "auto" takes the fastest of any kind.
        replicas: workers of each stage, as "15-1".
        schedule: as "1f1b" or "gpipe".
        microbatches: minibatches in one update of a flushing schedule.
        output: file to write; None: plans/NAME-TOPOLOGY.yaml.
        options: others of `pdtool partition --help`, as `workers=3` or `simplest="0%"`.

    Returns:
        the plan; `plan.predicted` has seconds per minibatch, and bytes of memory of each stage.

    Raises:
        UsageError: the options make no sense together, or on this cluster.
        ArtifactError: a file cannot be read.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    given = {"topology": topology, "cluster": _text(cluster), "bandwidth": bandwidth, "latency": latency}
    given |= {"memory": memory, "strategy": strategy, "replicas": replicas, "schedule": schedule}
    values = _values(partitioning.partition, given | {"microbatches": microbatches} | options)
    path = path_of_profile(profile, "-") if isinstance(profile, Profile) else str(profile)
    plan = planning.plan_for(path, **values)
    target = _text(output) or _file(plan)
    planning.keep_edits(target)
    plan.save(target)
    return plan


def simulate(
    plan: Plan | Path | str,
    *,
    schedule: str | None = None,
    minibatches: int | None = None,
    against: Sequence[str] = ("data-parallel",),
    bandwidths: Sequence[float] = (),
) -> Simulation:
    """Execute a plan on a simulated clock, beside its rivals.

    Args:
        plan: the plan, or the path of its file.
        schedule: another than the plan's.
        minibatches: length of the simulation; None: enough to fill the pipeline, run steadily and drain.
        against: rivals by strategy, as "gpipe".
        bandwidths: bytes per second of the outermost level, to compare the plan with data parallelism at each.

    Returns:
        seconds per minibatch and samples per second of the plan (`.result`), its rivals (`.comparison`), and both over
        bandwidths (`.sweep`).

    Raises:
        ArtifactError: the plan or its profile cannot be read, or do not belong together.
        UsageError: the schedule goes with other stages; or an option has no such value.
    """
    from pdtool.planner.choice.comparison import simulated

    names = against if isinstance(against, str) else ",".join(against)
    given = {"schedule": schedule, "minibatches": minibatches, "against": names}
    values = option_values(simulating.simulate, given)
    if wrong := [rate for rate in bandwidths if not 0 < rate < math.inf]:
        raise UsageError(f"bandwidth {wrong[0]} is no rate in bytes per second", "give positive numbers, as 1.25e9")
    chosen, profiled, _ = _read(plan)
    length, rivals = values["minibatches"], values["against"]
    return simulated(checked(chosen, profiled), profiled, values["schedule"], length, rivals, bandwidths)


def check(plan: Plan | Path | str, *, fresh: bool = False) -> Sequence[Finding] | Sequence[FreshnessFinding]:
    """Compute a plan's figures and certificate again.

    Args:
        plan: the plan, or the path of its file.
        fresh: compare the model as it is now, the profile, the plan and the stage files instead.

    Returns:
        what was found of each claim: `.holds` is True, False, or None where that cannot be said, `.words` says it.

    Raises:
        ArtifactError: the plan or its profile cannot be read, or do not belong together.
        ModelError: with `fresh`, the model cannot be traced.
    """
    if fresh:
        from pdtool.api.inputs import read_profile
        from pdtool.api.staleness import FreshnessCheck

        chosen, path = _plan(plan)
        return list(FreshnessCheck(path, chosen, read_profile(chosen, path)).findings())
    from pdtool.planner.choice.plan_check import check_plan

    return list(check_plan(*_read(plan)[:2]))


def codegen(plan: Plan | Path | str, *, model: str | None = None, output: Path | str | None = None) -> Bundle:
    """Write one PyTorch file per stage, and prove them equal to the model.

    Args:
        plan: the plan, or the path of its file.
        model: the model's file, when it has moved since.
        output: folder to write; None: the plan's path without `.yaml`.

    Raises:
        StaleError: the profile or the model's operators changed after the plan was made.
        ArtifactError: the plan does not hold together.
        ModelError: the model cannot be imported or traced.
        PdtoolError: the stages are not equal to the model; nothing is written.
    """
    from pdtool.api.training import generated

    inputs = Inputs.of(*_read(plan), model)
    return generated(inputs, Path(output) if output else inputs.folder)


def run(
    plan: Plan | Path | str,
    *,
    epochs: int = 1,
    steps: int | None = None,
    target: str | None = None,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    compile: bool = False,
    resume: Path | str | None = None,
    output: Path | str | None = None,
    model: str | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> Report:
    """Train a plan's stages, each on its workers, which this process starts and waits for.

    Stage files that are missing are written first. `report.target_reached` says whether the target was reached.

    Args:
        plan: the plan, or the path of its file.
        epochs: in all, those of a resumed run included.
        steps: minibatches in an epoch, at most; None: the whole training set.
        target: stop when the validation reaches it, as "accuracy>=0.98".
        seed: fixes everything drawn.
        device: to train on; "auto" is cuda where there is one.
        precision: what stages compute in.
        compile: put each stage through torch.compile.
        resume: folder of a run to go on from.
        output: folder of the run; None: a new one in runs/, or that of `resume`.
        model: the model's file, when it has moved since.
        settings: of the functions of model.py, in place of those of the plan, as {"lr": 0.01}.
        options: others of `pdtool run --help`, as `schedule="gpipe"` or `timeout="60s"`.

    Raises:
        StaleError: the profile or the model's operators changed after the plan was made, or stage files were edited.
        ModelError: the user's functions fail.
        WorkerDiedError: a worker ended, or did not answer.
        KeyboardInterrupt: Ctrl-C; all workers are gone.
    """
    from pdtool.api.inputs import with_settings
    from pdtool.options import Target

    if of_commands := sorted({"dry_run", "as_json", "model_settings"} & options.keys()):
        raise TypeError(f"run() has no option {of_commands[0]!r}; settings are given as settings={{'lr': 0.01}}")
    given = {"epochs": epochs, "steps": steps, "target": target, "seed": seed, "device": device}
    given |= {"precision": precision, "compiled": compile, "resume": _text(resume), "output": _text(output)}
    values = option_values(running.run, given | options)
    inputs = with_settings(Inputs.of(*_read(plan), model), _assignments(settings))
    changes = {name: values.pop(name) for name in ("schedule", "microbatches", "weights", "update_every")}
    values["target"] = Target.parse(target) if target is not None else None
    return training.trained(inputs, rescheduled(inputs.plan, inputs.profile, **changes), values)[1]


def _values(command: SectionedCommand, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command's options but for those that say where its result goes."""
    values = option_values(command, given)
    return {name: value for name, value in values.items() if name not in ("output", "as_json", "if_stale")}


def _assignments(settings: Settings | None) -> tuple[str, ...]:
    """Write settings as the command line has them, with texts in quotes: "8" stays a text; raises UsageError."""
    for name, value in (settings or {}).items():
        if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"setting {name}={value!r:.80} is no text, number or truth", "give one of these")
    return tuple(f"{name}={value!r}" for name, value in (settings or {}).items())


def _text(path: Path | str | None) -> str | None:
    return None if path is None else str(path)


def _file(plan: Plan) -> str:
    """Return where `partition` writes a plan unless told otherwise."""
    return f"plans/{file_name(plan.name)}.yaml"


def _plan(plan: Plan | Path | str) -> tuple[Plan, str]:
    """Return a plan and its path; one that is given as it is stands where `partition` writes it.

    Raises:
        TypeError: it is neither a plan nor a path.
    """
    if not isinstance(plan, (Plan, Path, str)):
        raise TypeError(f"a plan or its path is needed, and this is a {type(plan).__name__}")
    return (plan, _file(plan)) if isinstance(plan, Plan) else (Plan.load(str(plan), may_be_pipe=True), str(plan))


def _read(plan: Plan | Path | str) -> tuple[Plan, Profile, str]:
    """Return a plan, its profile and its path; raises StaleError when the profile has changed since."""
    chosen, path = _plan(plan)
    return chosen, profile_of(chosen, path), path
