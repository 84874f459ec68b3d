"""`python -m pdtool` is the command `pdtool`."""

from pdtool.cli import main

if __name__ == "__main__":
    main(prog_name="pdtool")
