"""Run the command `pdtool`, as `python -m pdtool`."""

from pdtool.cli.app import main

if __name__ == "__main__":
    main(prog_name="pdtool")
