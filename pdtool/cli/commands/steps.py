"""The four steps as commands: `profile`, `partition`, `codegen` and `run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_json, show, write_artifact
from pdtool.errors import TargetMissedError, UsageError
from pdtool.machines import is_first_worker
from pdtool.options import INNER_BANDWIDTH, OUTER_BANDWIDTH, SAME_FOLDER, PartitionOptions, ProfileOptions, RunOptions
from pdtool.schedule import schedule_names

if TYPE_CHECKING:
    from pdtool.artifacts.report import Report
    from pdtool.runtime.config import RunConfig


@command(
    epilog="\b\nExamples:\n  pdtool codegen\n  pdtool codegen plans/digits-3.yaml -o /tmp/digits --model digits.py"
)
@click.argument("plan", required=False)
@options.output("Folder to write.  [default: PLAN without .yaml]")
@options.model
@options.as_json
def codegen(plan: str | None, output: str | None, model: str | None, as_json: bool) -> None:
    """Write one PyTorch file per stage of PLAN, and prove them right."""
    from pdtool.api.inputs import Inputs, candidate
    from pdtool.api.training import generated

    if output == "-":
        raise UsageError("-o -: codegen writes a folder, which is not for stdout", "name a folder")
    inputs = Inputs.load(candidate("plan", plan), model)
    bundle = generated(inputs, Path(output) if output else inputs.folder)
    if as_json:
        print_json(bundle)


@command(
    epilog="\b\nExamples:\n  pdtool partition --topology 3\n"
    "  pdtool partition profiles/vgg16.json --topology 4x4 --bandwidth 10Gbit/s,12GB/s --memory 16GB"
)
@click.argument("profile", required=False)
@options.topology(required=False)
@click.option("--cluster", metavar="FILE", help="The same and all bandwidths, as `pdtool probe` writes them.")
@click.option(
    "--bandwidth",
    metavar="RATE,...",
    show_default=f"{OUTER_BANDWIDTH} outside, {INNER_BANDWIDTH} at inner levels",
    help="Each way, of one link per level in bit/s or B/s, the outermost first, as 10Gbit/s,12GB/s.",
)
@click.option("--latency", metavar="TIME,...", show_default="0s", help="Of one message per level, as 50us,5us.")
@click.option(
    "--memory",
    metavar="SIZE",
    show_default="that of the device profiled",
    help="Of each device, as 16GB or 16GiB; none: no limit.",
)
@options.count("--workers", of=PartitionOptions, help="Number of workers to use.", unset="all of the topology")
@options.text(
    "--replicas",
    of=PartitionOptions,
    metavar="R-R-R",
    show_default="whatever is fastest",
    help="Workers of each stage, as 15-1: find where to cut the model into exactly these stages.",
)
@options.choice(
    "--strategy",
    of=PartitionOptions,
    help="The fastest plan of any kind (auto), or the best of one kind, to compare it with.",
)
@click.option("--straight", is_flag=True, help="The same as --strategy straight.")
@options.schedule(PartitionOptions, unset="1f1b, or what --strategy has")
@options.microbatches(PartitionOptions, unset="4 with a flushing --schedule, as many as workers with --strategy gpipe")
@options.count(
    "--global-batch-size",
    of=PartitionOptions,
    help="Samples in one update: the same as --microbatches, times the profiled minibatch; with 1f1b-flush unless "
    "another flushing --schedule is given.",
    unset="what --microbatches makes",
)
@options.count(
    "--chunks",
    of=PartitionOptions,
    help=f"Stages on each worker with --schedule {schedule_names(lambda kind: kind.chunked)}.",
)
@click.option(
    "--recompute/--no-recompute",
    default=PartitionOptions.recompute,
    help="Let stages that lack memory run their forward twice.",
)
@options.choice(
    "--cost",
    "cost_model",
    of=PartitionOptions,
    help="Whose formulas; those of PipeDream's optimizer, with or without the traffic of activations, to compare.",
)
@options.text(
    "--simplest",
    of=PartitionOptions,
    default=f"{PartitionOptions.simplest:.0%}",
    metavar="SHARE",
    help="Prefer fewer stages, and borders between modules, as long as the plan is at most this much slower than the "
    "fastest.",
)
@options.count(
    "--cuts",
    "max_cuts",
    of=PartitionOptions,
    help="Places to cut a branchy graph that are searched at most; more take longer (the square) and miss less.",
)
@options.as_json
@options.output("File to write; - is stdout.  [default: plans/NAME-TOPOLOGY.yaml]")
def partition(profile: str | None, output: str | None, as_json: bool, **settings: Any) -> None:
    """Divide PROFILE's model into stages for the fastest pipeline."""
    from pdtool.api.inputs import candidate, default_plan_path
    from pdtool.api.planning import keep_edits, planned_for
    from pdtool.cli.artifact_views import plan_view

    plan = planned_for(candidate("profile", profile), PartitionOptions(**settings))
    path = output or default_plan_path(plan)
    keep_edits(path)
    write_artifact(plan, path, as_json=as_json, view=plan_view(plan))


@command(
    epilog="\b\nExamples:\n  pdtool profile pdtool/zoo/digits.py --set width=64 --batch-size 64\n"
    "  pdtool profile pdtool.zoo.llm --device a100-80gb --precision bf16 --batch-size 4"
)
@click.argument("model")
@options.output("File to write; - is stdout.  [default: profiles/NAME.json]")
@options.settings(
    "Setting for model(), or for other functions of model.py that have a parameter NAME; may be repeated."
)
@options.count("--batch-size", of=ProfileOptions, help="Samples in one minibatch, the size that will run.")
@click.option(
    "--device",
    default=ProfileOptions.device,
    metavar="NAME",
    help="On cpu or cuda, measure on this machine; auto is cuda where there is one, as of `run`. For any other (v100, "
    "a100, ...; an unknown one lists them) or a YAML file of your own, estimate without running the model.",
)
@options.count(
    "--threads",
    of=ProfileOptions,
    help="CPU threads to measure with, as many as each worker will have.",
    unset="all cores",
)
@options.choice(
    "--precision",
    of=ProfileOptions,
    help="Measure what `run` computes in: fp32, the model as it is, or bf16 by autocast. Or estimate as if the model "
    "were cast to fp32, bf16 or fp16; tf32: with products of fp32 in TF32.",
    unset="the model's own",
)
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Measure what `run --compile` runs. What torch.compile fuses is timed in segments; operators get shares.",
)
@click.option(
    "--calibrate",
    metavar="PROFILE",
    help="Estimate with factors fitted to a profile of any model that was measured on that device.",
)
@click.option(
    "--if-stale",
    is_flag=True,
    help="Leave the file as it is where it is a profile of the same operators, with the options given.",
)
@options.as_json
@click.pass_context
def profile(
    ctx: click.Context, /, model: str, output: str | None, as_json: bool, if_stale: bool, **settings: Any
) -> None:
    """Measure what each operator of MODEL costs, or estimate it.

    On this machine it is measured; for another device, which need not be here, it is estimated.

    MODEL is model.py, model.py:FUNCTION, package.module or package.module:FUNCTION.
    """
    from pdtool.api.profiling import profiled
    from pdtool.cli.artifact_views import measured_view

    if if_stale:
        from pdtool.api.staleness import is_fresh

        if is_fresh(model, output, settings["model_settings"], options.asked_for(ctx)):
            return
    result, target = profiled(model, output, ProfileOptions(**settings))
    write_artifact(result, target, as_json=as_json, view=measured_view(result))


@command(
    epilog="\b\nExamples:\n  pdtool run plans/digits-3.yaml --epochs 10 --target accuracy=0.98\n"
    "  pdtool run plans/digits-3.yaml -o runs/digits --epochs 20 --resume"
)
@click.argument("plan", required=False)
@options.output("Folder of the run.  [default: a new one, runs/PLAN, runs/PLAN.2, ...]")
@options.model
@options.settings(
    "Setting for those functions of model.py that have a parameter NAME, as optimizer(named_parameters, lr=0.1) has; "
    "the plan holds as long as the model's operators stay the same. May be repeated."
)
@options.count("--epochs", of=RunOptions, help="Epochs in all.")
@options.count(
    "--steps",
    of=RunOptions,
    help="Minibatches in an epoch, at most; needed for an IterableDataset without a length.",
    unset="the whole training set",
)
@options.target
@options.seed
@click.option(
    "--resume",
    is_flag=False,
    flag_value=SAME_FOLDER,
    metavar="[RUN_DIR]",
    help="Go on from the last checkpoint of RUN_DIR, which any plan of the model may have made.  "
    "[without RUN_DIR: the folder of -o]",
)
@click.option("--dry-run", is_flag=True, help="Print which worker does what on which host, and stop.")
@options.device("Device to train on; auto is cuda where there is one.")
@options.timeout()
@options.schedule(RunOptions, unset=options.PLANNED)
@options.microbatches(RunOptions, unset=options.PLANNED)
@options.weights
@click.option(
    "--correction",
    metavar="NAME[=VALUE]",
    show_default="none",
    help="Correct for gradients of older weights, without a flush: lr-discount[=UPDATES], weight-prediction or "
    "nesterov[=G].",
)
@options.choice(
    "--precision", of=RunOptions, help="What stages compute in; bf16 is autocast, weights and messages stay fp32."
)
@options.choice(
    "--transport",
    of=RunOptions,
    help="How tensors go between workers; auto shares memory, of GPUs too, within a machine.",
)
@options.choice("--wire-dtype", of=RunOptions, help="What fp32 activations and gradients are sent as to other workers.")
@options.count(
    "--loader-workers",
    of=RunOptions,
    help="Processes that load for each replica of the first stage; 0 loads in the training process.",
    unset="what the profile's loading time needs, at most the cores; 0 if that is under 1 ms or 2 % of a minibatch's",
)
@options.count(
    "--threads",
    of=RunOptions,
    help="CPU threads of each worker.",
    unset="as many as the profile was measured with, at most the cores",
)
@options.count(
    "--log-every",
    of=RunOptions,
    help="Updates between two lines where stderr is no terminal, which shows a bar.",
    unset="10 seconds",
)
@click.option("--compile", "compiled", is_flag=True, help="Put each stage through torch.compile.")
@click.option("--trust", is_flag=True, help="Run the stage files as they are, edited by hand or from elsewhere.")
@options.machines
@options.as_json
def run(
    plan: str | None, dry_run: bool, as_json: bool, model: str | None, model_settings: tuple[str, ...], **settings: Any
) -> None:
    """Train PLAN's stages, each on its workers."""
    from pdtool.api.inputs import Inputs, candidate, with_settings
    from pdtool.api.training import rescheduled_as, trained
    from pdtool.cli.artifact_views import worker_table

    asked = RunOptions(**settings)
    inputs = with_settings(Inputs.load(candidate("plan", plan), model), model_settings)
    chosen = rescheduled_as(inputs, asked)
    if asked.compiled and chosen.kind.splits_backward:
        name = chosen.schedule
        note(f"a compiled stage computes all its gradients at once: {name} has nothing to put off, take 1f1b-flush")
    if dry_run:
        show(worker_table(chosen, asked.nnodes), err=False)
        return
    config, report = trained(inputs, chosen, asked)
    if is_first_worker(os.environ):
        _print_report(config, report, as_json)
    if report.target_reached is False:
        what = f"target {report.target} was not reached in {report.epochs} epoch(s)"
        raise TargetMissedError(what, "give more --epochs, with --resume")


def _print_report(config: RunConfig, report: Report, as_json: bool) -> None:
    from pdtool.cli.run_view import report_view

    if as_json:
        print_json(report)
    show(*report_view(report))
    note(f"wrote {config.out}/ (report.json, metrics.jsonl, trace.json, checkpoints/)")
