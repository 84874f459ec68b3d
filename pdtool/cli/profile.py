"""`profile`: model.py -> profiles/NAME.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pdtool.cli import options
from pdtool.cli.console import note, progress, show
from pdtool.cli.deliver import deliver

if TYPE_CHECKING:
    from pdtool.artifacts.profile import Profile


@click.command(
    epilog="\b\nExamples:\n  pdtool profile pdtool/zoo/digits.py --batch-size 64\n"
    "  pdtool profile pdtool.zoo.digits --set width=64 -o profiles/wide.json"
)
@click.argument("model")
@options.output("File to write; - is stdout.  [default: profiles/NAME.json]")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Setting for model(); may be repeated.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=32, show_default=True, metavar="N",
    help="Samples in one minibatch, the size that will run.",
)  # fmt: skip
@options.device
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", show_default="all cores",
    help="CPU threads to compute with, as many as each worker will have.",
)  # fmt: skip
@options.as_json
def profile(
    model: str, output: str | None, settings: tuple[str, ...], batch_size: int, device: str, threads: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure what each operator of MODEL costs on this machine.

    MODEL is model.py, model.py:FUNCTION, package.module or package.module:FUNCTION.
    """
    from pdtool.cli.render import profile_table
    from pdtool.frontend.modelfile import ModelFile, parse_ref
    from pdtool.profile.measure import measure

    file = ModelFile.load(parse_ref(model, settings), trusted=True)
    with progress("measuring operators") as tick:
        result = measure(file, batch_size=batch_size, device=device, threads=threads, progress=tick)
    show(profile_table(result, largest=12))
    _warn_of_coverage(result)
    deliver(result, output or f"profiles/{options.file_name(result.name)}.json", as_json=as_json)


def _warn_of_coverage(result: Profile) -> None:
    if result.device.kind == "measured" and not 0.9 <= result.coverage <= 1.1:
        note(
            f"warning: the operators' times add up to {result.coverage:.2f} of a whole step (0.9 to 1.1 is usual); "
            "is something else running on this machine?"
        )
