"""How much pdtool says: with `-q` results and errors only, with `-v` more than usual."""

from __future__ import annotations


class Verbosity:
    """What the command line asked for; one command runs in a process."""

    is_quiet = False
    is_verbose = False

    @classmethod
    def reset(cls) -> None:
        """Say as much as usual: a new command line begins."""
        cls.is_quiet = cls.is_verbose = False
