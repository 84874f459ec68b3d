"""The commands. Each parses its options, calls one part and tells what came of it; nothing else prints or exits.

Only click is imported here and at the top of each command's file, so that `pdtool --help` answers at once and
planning never loads torch.
"""

from __future__ import annotations

from typing import Any

import click

from pdtool import __version__
from pdtool.cli.check import check
from pdtool.cli.codegen import codegen
from pdtool.cli.export import export
from pdtool.cli.import_ import import_
from pdtool.cli.partition import partition
from pdtool.cli.probe import probe
from pdtool.cli.profile import profile
from pdtool.cli.run import run
from pdtool.cli.shell import completion, schema
from pdtool.cli.show import show
from pdtool.cli.simulate import simulate
from pdtool.errors import PdtoolError

_EPILOG = """\b
Exit codes:
  0  done                        4  no feasible plan
  1  failed                      5  a worker died
  2  usage                       6  target metric not reached
  3  bad or stale artifact     130  interrupted

\b
Examples:
  pdtool profile pdtool/zoo/digits.py
  pdtool partition --topology 3
"""


class Commands(click.Group):
    """The one place where errors become messages and exit codes; click itself sees to usage and closed pipes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PdtoolError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            raise
        except OSError as error:
            click.echo(f"error: {error.filename or 'the output'} failed: {error.strerror}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of the road, not of the alphabet


@click.group(cls=Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pdtool", message="%(prog)s %(version)s")
def main() -> None:
    """Turn an ordinary PyTorch model into a pipeline-parallel training job.

    The road: profile, partition, codegen, run. Each reads and writes a file that you can open.
    """


for _command in (profile, import_, probe, partition, simulate, check, codegen, run, show, export, schema, completion):
    main.add_command(_command)
