"""Tables of words and figures, and the console that prints them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdtool.printable import printable

Lines = Iterable[Table | str]  # what a view of an artifact yields: tables, and lines of text between them


class PlainConsole(Console):
    """A console to which each text is only text: no markup, no emoji, no control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Make the text that is printed of any string, also of those in tables."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, names: int = 1, title: str = "") -> Table:
    """Make a table whose first `names` columns are words and whose other columns are figures."""
    grid = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        grid.add_column(column, justify="left" if index < names else "right", overflow="fold", no_wrap=index >= names)
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    return grid


def abbreviated(names: Sequence[str]) -> str:
    """Join names as `stem, block1`; of a long list the first two and the last."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"
