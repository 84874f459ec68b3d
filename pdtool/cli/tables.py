"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, names: int = 1, title: str = "") -> Table:
    """A table whose first `names` columns are words and whose other columns are figures."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < names else "right", overflow="fold", no_wrap=index >= names)
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made
