"""Options in groups in `pdtool COMMAND --help`, where there are many of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import click

_FEW = 9  # so many options are taken in at a glance without groups
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
_OTHER = "Options"
_SECTIONS = {
    "Model": ("model_settings", "batch_size", "model", "calibrate"),
    "Cluster": ("topology", "cluster", "bandwidth", "latency", "memory", "workers"),
    "Plan": (
        *("replicas", "strategy", "straight", "schedule", "microbatches", "global_batch_size", "weights"),
        *("update_every", "chunks", "recompute", "cost_model", "simplest", "max_cuts"),
    ),
    "Training": ("epochs", "steps", "target", "seed", "resume", "correction", "log_every"),
    "Computing": (
        *("device", "threads", "precision", "compiled", "loader_workers", "transport", "wire_dtype"),
        *("compute", "scale", "minibatches", "timeout", "trust"),
    ),
    "Machines": ("nnodes", "node_rank", "rdzv_endpoint"),
    "Output": (
        *("output", "if_stale", "as_json", "dry_run", "against"),
        *("quiet", "verbose", "_click_default_help", "help"),
    ),
}
_SECTION_OF = {option: section for section, options in _SECTIONS.items() for option in options}


class SectionedCommand(click.Command):
    """A command whose help lists many options by what they are about; an option in no section stands at the top."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        if len(params) <= _FEW:
            super().format_options(ctx, formatter)
            return
        rows: dict[str, list[tuple[str, str]]] = {section: [] for section in (_OTHER, *_SECTIONS)}
        for param in params:
            if record := _as_given(param, ctx).get_help_record(ctx):
                rows[_SECTION_OF.get(param.name or "", _OTHER)].append(record)
        for section, records in rows.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)


def _as_given(param: click.Option, ctx: click.Context) -> click.Option:
    """Return the option, or one that shows as its default what the project's defaults give."""
    if param.name not in (ctx.default_map or {}):
        return param
    shown = copy(param)
    shown.show_default = True
    return shown


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], SectionedCommand]:
    """Define a command of pdtool, as `click.command` does; its help is the same with and without the group."""
    return click.command(name, cls=SectionedCommand, context_settings=CONTEXT_SETTINGS, **settings)
