"""`simulate`: execute a plan on a simulated clock, and compare it with other plans."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import print_data, show, status
from pdtool.errors import UsageError, suggestion
from pdtool.options.simulate_options import SimulateOptions

_TIMELINE_WIDTH, _GAIN_WIDTH = 1200, 640  # pixels
_file = partial(options.option, in_file=False, type=click.Path(path_type=Path), metavar="FILE")


@command(
    epilog="\b\nExamples:\n  pdtool simulate --trace trace.json\n"
    "  pdtool simulate plans/vgg16-4x4.yaml --sweep bandwidth=0.1..25Gbit/s --svg gain.svg"
)
@click.argument("plan", required=False)
@options.options_of(SimulateOptions)
@_file("--trace", help="Write a trace for Perfetto or chrome://tracing; - is stdout.")
@_file("--svg", help="Draw the start of the timeline, or with --sweep the gain by bandwidth; - is stdout.")
@options.option(
    "--sweep",
    metavar="bandwidth=LOW..HIGH",
    help="Vary the bandwidth of the outermost level (bandwidth=0.1..25Gbit/s), and compare with data parallelism.",
)
@options.flag("--json", "as_json", help="Print all figures as JSON on stdout.")
def simulate(
    plan: str | None, asked: SimulateOptions, trace: Path | None, svg: Path | None, sweep: str | None, as_json: bool
) -> None:
    """Simulate PLAN, data parallelism and other strategies.

    Without PLAN, it takes the only plan in plans/.

    If the plan flushes or was planned for --samples-per-update, the other strategies average as many samples per update
    as the plan. Hybrid parallelism does not, and data parallelism rounds the number up so that no worker is idle. For
    any other plan, data parallelism averages one minibatch of every worker, and GPipe averages the same number.
    """
    import json

    from pdtool.api.inputs import given_or_only, planned
    from pdtool.artifacts.chrome_trace import chrome_trace
    from pdtool.cli.artifact_views import comparison_view, simulation_data, simulation_view, sweep_view
    from pdtool.cli.terminal import write_text
    from pdtool.planner.choice.comparison import simulated
    from pdtool.reports.chart import gain_chart
    from pdtool.reports.figures import simulated_group
    from pdtool.reports.timeline_drawing import timeline_drawing
    from pdtool.units import format_seconds

    rates = _rates(sweep) if sweep else []
    piped = _is_piped(trace, svg, as_json)
    chosen, profile = planned(given_or_only("plan", plan))
    with status("simulating"):
        simulation = simulated(chosen, profile, asked.schedule, asked.minibatches, asked.against, rates)
    name, result, points = simulation.schedule, simulation.result, simulation.sweep
    if trace:
        write_text(json.dumps(chrome_trace(result.named_events)), trace, "; open it in https://ui.perfetto.dev")
    if svg:
        title = f"{chosen.name} ({chosen.config}, {name})"
        if points:
            own = chosen.cluster.levels[0].bandwidth_bytes_per_s
            picture = gain_chart(points, _GAIN_WIDTH, own, f"gain of {title} over data parallelism")
        else:
            times = f"{title}, {format_seconds(result.time_per_minibatch_s)} per minibatch"
            picture = timeline_drawing([simulated_group(result, simulation.shape, name, times)], _TIMELINE_WIDTH)
        write_text(picture.standalone(), svg)
    if as_json:
        print_data(simulation_data(chosen, simulation))
    else:
        compared = comparison_view(simulation.comparison)
        show(*simulation_view(chosen, name, result), "", *compared, err=piped)
        show(*(["", *sweep_view(points)] if points else []), err=piped)


def _is_piped(trace: Path | None, svg: Path | None, as_json: bool) -> bool:
    """Return whether a file goes to stdout, and so the tables to stderr; raises UsageError if two files would."""
    files = [f"{option} -" for option, path in (("--trace", trace), ("--svg", svg)) if path == Path("-")]
    outputs = files + ["--json"] * as_json
    if len(outputs) > 1:
        raise UsageError(f"{' and '.join(outputs)} would all go to stdout", "name files for all but one")
    return bool(files)


def _rates(text: str) -> list[float]:
    """Read `bandwidth=0.1..25Gbit/s` as bandwidths in bytes per second; raises UsageError."""
    from pdtool.planner.choice.comparison import bandwidth_grid
    from pdtool.units import format_bits_rate, parse_bandwidth

    match = re.fullmatch(r"bandwidth=([0-9.]+?)([A-Za-z/]*)\.\.([0-9.]+)([A-Za-z/]+)", text)
    if not match:
        near = suggestion(text.partition("=")[0], ["bandwidth"]) if not text.startswith("bandwidth=") else ""
        what = f"--sweep {text!r} is not a range of bandwidths"
        raise UsageError(what, f"{near} write bandwidth=0.1..25Gbit/s".lstrip())
    low, high = parse_bandwidth(match[1] + (match[2] or match[4])), parse_bandwidth(match[3] + match[4])
    if low >= high:
        ends = f"begins at {format_bits_rate(low)} and ends at {format_bits_rate(high)}"
        raise UsageError(f"--sweep {text!r} {ends}", "write the lower bandwidth first, and a higher one after it")
    return bandwidth_grid(low, high)
