"""The four steps as commands: `profile`, `partition`, `codegen` and `run`."""

from __future__ import annotations

import os

import click

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_json, show, write_artifact
from pdtool.errors import TargetMissedError, UsageError
from pdtool.machines import is_first_worker
from pdtool.options.plan_options import PartitionOptions, ProfileOptions
from pdtool.options.run_options import RunOptions
from pdtool.units import counted


@command(epilog="\b\nExamples:\n  pdtool codegen\n  pdtool codegen plans/mnist-2.yaml -o /tmp/mnist --model mnist.py")
@click.argument("plan", required=False)
@options.output_folder("Folder to write.  [default: PLAN without .yaml]")
@options.option_of(RunOptions, "model")
@options.as_json
def codegen(plan: str | None, output: str | None, model: str | None, as_json: bool) -> None:
    """Write and check one PyTorch file per stage of PLAN.

    Without PLAN, it takes the only plan in plans/.
    """
    from pdtool.api.inputs import given_or_only
    from pdtool.api.training import codegen as write

    bundle = write(given_or_only("plan", plan), model=model, output=output)
    if as_json:
        print_json(bundle)


@command(
    epilog="\b\nExamples:\n  pdtool partition --topology 3\n"
    "  pdtool partition profiles/vgg16.json --topology 4x4 --bandwidth 10Gbit/s,12GB/s --memory 16GB"
)
@click.argument("profile", nargs=-1)
@options.options_of(PartitionOptions)
@options.flag(
    "--if-stale", help="Keep the file if it is a plan from this profile with the same options, even if you edited it."
)
@options.as_json
@options.output_file("File to write; - is stdout.  [default: plans/NAME-TOPOLOGY.yaml]")
def partition(
    profile: tuple[str, ...], asked: PartitionOptions, output: str | None, as_json: bool, if_stale: bool
) -> None:
    """Find the fastest plan to train PROFILE's model on a cluster.

    It compares pipelines, data parallelism and one worker alone.

    Without PROFILE, it takes the only profile in profiles/.

    To let pdtool choose the batch size, pass several profiles of the model with different batch sizes, and
    --samples-per-update. The plan is for the fastest of these sizes.
    """
    from pdtool.api.inputs import default_plan_path, given_or_only
    from pdtool.api.planning import keep_edits, planned_for
    from pdtool.cli.artifact_views import plan_view

    profiles = profile or [given_or_only("profile", None)]
    if if_stale:
        from pdtool.api.reuse import fresh_plan

        if known := fresh_plan(profiles, output, asked):
            if as_json:
                print_json(known)
            return
    plan = planned_for(profiles, asked)
    path = output or default_plan_path(plan.name)
    keep_edits(path)
    write_artifact(plan, path, as_json=as_json, view=plan_view(plan), is_named=output is not None)


@command(
    epilog="\b\nExamples:\n  pdtool profile pdtool/zoo/digits.py --set width=64 --batch-size 64\n"
    "  pdtool profile pdtool.zoo.llm --device a100-80gb --precision bf16 --batch-size 4"
)
@click.argument("model")
@options.output_file("File to write; - is stdout.  [default: profiles/NAME.json]")
@options.options_of(ProfileOptions)
@options.flag(
    "--if-stale", help="Keep the file if it is a profile of the same operators and HINTS with the same options."
)
@options.as_json
def profile(model: str, output: str | None, asked: ProfileOptions, as_json: bool, if_stale: bool) -> None:
    """Measure what each operator of MODEL costs, or estimate it.

    MODEL is model.py, model.py:FUNCTION, package.module or package.module:FUNCTION.
    """
    from pdtool.api.profiling import profiled
    from pdtool.cli.artifact_views import measured_view

    if if_stale:
        from pdtool.api.reuse import fresh_profile

        if known := fresh_profile(model, output, asked):
            if as_json:
                print_json(known)
            return
    result, target = profiled(model, output, asked)
    write_artifact(result, target, as_json=as_json, view=measured_view(result), is_named=output is not None)


@command(
    epilog="\b\nExamples:\n  pdtool run plans/mnist-2.yaml --epochs 10 --target accuracy=0.97\n"
    "  pdtool run -o runs/mnist --resume"
)
@click.argument("plan", required=False)
@options.options_of(RunOptions)
@options.flag("--dry-run", help="Print which worker does what on which host, then stop.")
@options.as_json
def run(plan: str | None, asked: RunOptions, dry_run: bool, as_json: bool) -> None:
    """Train PLAN's stages, each on its workers.

    Without PLAN, it takes the only plan in plans/.
    """
    from pdtool.api.training import to_train, train_plan
    from pdtool.artifacts.run_dir import RunDir
    from pdtool.cli.artifact_views import worker_table
    from pdtool.cli.run_view import report_view
    from pdtool.files import quoted

    inputs, chosen, asked = to_train(plan, asked, options.typed(click.get_current_context()), is_dry=dry_run)
    if asked.compiled and chosen.kind.splits_backward:
        name = chosen.schedule
        note(f"a compiled stage computes all its gradients at once, so {name} cannot delay any: use 1f1b-flush")
    if dry_run:
        if as_json:
            raise UsageError("--json cannot be combined with --dry-run, which prints a table", "leave one out")
        asked.machines.check_rank()
        show(worker_table(chosen, asked.nnodes), err=False)
        return
    config, report = train_plan(inputs, chosen, asked)
    if is_first_worker(os.environ):
        if as_json:
            print_json(report)
        show(*report_view(report))
        note(f"wrote {config.out}/ ({', '.join(RunDir(config.out).results)})")
        folder = quoted(config.out)
        note(f"see the run: pdtool report {folder}; export its weights: pdtool export {folder}")
    if report.target_reached is False:
        what = f"target {report.target} was not reached in {counted(report.epochs, 'epoch')}"
        command = f"{RunDir(config.out).resume_command(config.machines)} --epochs {2 * config.epochs}"
        raise TargetMissedError(what, f"train longer: `{command}`")
