"""Tables of words and figures that fit the terminal, and the console that prints them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pdtool.errors import printable

_GAP = 2  # spaces between columns
_EASY_TO_READ = 16  # characters: drop another column before making a column of words narrower than this


class PlainConsole(Console):
    """A console that treats all text as plain text: no markup, no emoji, no control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert any string, also in tables, to its printed text."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


class Table:
    """A table that leaves out columns if the terminal is too narrow, and says which.

    Text breaks only between words, and figures never break. If no more columns can be left out, the table is wider than
    the terminal.

    Args:
        names: number of first columns that hold words; the others hold figures.
        drop: names of columns, if there are any, that a narrow terminal can do without, the least important first.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        names: int = 1,
        title: str = "",
        drop: Sequence[str] = (),
    ) -> None:
        self._columns, self._names, self._title = columns, names, title
        self._droppable = [name for name in drop if name in columns]
        self._cells = [[str(cell) for cell in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the columns that fit."""
        shown = self._fitting(options.max_width)
        if self._title:
            yield self._sentence(console, self._title, "italic")
        widths = self._widths(shown, options.max_width)
        for number, row in enumerate((self._columns, *self._cells)):
            for line in self._lines(console, row, widths):
                yield Text(line, style="" if number else "bold", no_wrap=True, overflow="ignore")
        if left_out := [name for index, name in enumerate(self._columns) if index not in shown]:
            note = f"(not shown at width {options.max_width}: {', '.join(left_out)})"
            yield self._sentence(console, note, "dim")

    def _sentence(self, console: Console, text: str, style: str) -> Text:
        """Return a line above or below; it breaks only on a terminal, so that a pipe gets it whole."""
        is_wrapped = console.is_terminal
        return Text(printable(text), style=style, no_wrap=not is_wrapped, overflow="fold" if is_wrapped else "ignore")

    def _fitting(self, width: int) -> list[int]:
        """Return the numbers of the columns that fit; drop as few as possible, and columns of equal figures first."""
        shown = list(range(len(self._columns)))
        for name in sorted(self._droppable, key=self._tells_rows_apart):
            if sum(self._needed(index, _EASY_TO_READ) + _GAP for index in shown) - _GAP <= width:
                break
            shown = [index for index in shown if self._columns[index] != name]
        return shown

    def _tells_rows_apart(self, column: str) -> bool:
        """Whether a column's values differ between rows."""
        return len({row[self._columns.index(column)] for row in self._cells}) > 1

    def _needed(self, index: int, broken_to: int | None) -> int:
        """Return the characters that a column needs, with words broken to lines of `broken_to`."""
        whole, longest_word = self._extents[index]
        if index >= self._names or broken_to is None:
            return whole
        return max(longest_word, min(whole, broken_to))

    @cached_property
    def _extents(self) -> list[tuple[int, int]]:
        """The characters of the longest cell of each column, and of its longest word."""
        extents = []
        for column in zip(self._columns, *self._cells, strict=True):
            cells = [printable(cell) for cell in column]
            words = (cell_len(word) for cell in cells for word in cell.split())
            extents.append((max(map(cell_len, cells)), max(words, default=0)))
        return extents

    def _widths(self, shown: Sequence[int], width: int) -> dict[int, int]:
        """Return the characters of each column; the widest columns of words give way until all fit."""
        widths = {index: self._needed(index, None) for index in shown}
        least = {index: self._needed(index, 0) for index in shown}
        while sum(widths.values()) + _GAP * (len(shown) - 1) > width:
            can_give = [index for index in shown if widths[index] > least[index]]
            if not can_give:
                break
            widths[max(can_give, key=lambda index: widths[index])] -= 1
        return widths

    def _lines(self, console: Console, row: Sequence[str], widths: dict[int, int]) -> Iterator[str]:
        """Write a row, on as many lines as its words need."""
        columns = [Text(printable(row[index])).wrap(console, width) for index, width in widths.items()]
        for parts in zip_longest(*([line.plain.rstrip() for line in lines] for lines in columns), fillvalue=""):
            padded = []
            for part, (index, width) in zip(parts, widths.items(), strict=True):
                space = " " * (width - cell_len(part))
                padded.append(part + space if index < self._names else space + part)
            yield (" " * _GAP).join(padded).rstrip()


Lines = Iterable[Table | str]  # a view of an artifact: tables, and lines of text between them


def abbreviated(names: Sequence[str]) -> str:
    """Join names as `stem, block1`; for a long list, the first two and the last."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"
