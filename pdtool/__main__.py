"""Run the command `pdtool`, also as `python -m pdtool`."""

import sys


def main() -> None:
    """Run a command; import its modules here, where Ctrl-C ends it without a traceback."""
    try:
        from pdtool.cli.commands.app import main as command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    command(prog_name="pdtool")


if __name__ == "__main__":
    main()
