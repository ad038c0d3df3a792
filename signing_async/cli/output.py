"""What a command prints: sentences, tables and progress for people, a JSON object a line for machines.

Standard output carries what was asked for; all else goes to standard error. On a terminal tables are styled and fitted
to its width; anywhere else they are plain, and nothing is cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from .exits import PIPE_CLOSED, facts_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.text import Text

__all__ = ["CONTROLS", "Output", "ago", "clean", "discard_output", "iso", "on_one_line"]

CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
"""Controls, and the marks that turn the direction of text, for a regular expression's brackets."""

_CONTROLS = re.compile(f"[{CONTROLS}]")
_NARROWEST = 12
_STYLES = {
    "draft": "yellow",
    "sent": "cyan",
    "completed": "green",
    "cancelled": "red",
    "signed": "green",
    "pending": "yellow",
}


class Output:
    """Where a command's words go; ``json`` is whether machines read them."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._bar: Progress | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether standard output is one."""
        return _is_terminal(sys.stdout)

    @property
    def live(self) -> bool:
        """Whether standard error can show something that moves."""
        return not self.json and _is_styled(sys.stderr)

    @cached_property
    def console(self) -> Console:
        """Rich's console of standard output, where that is a terminal."""
        return _console(sys.stdout)

    @cached_property
    def errors(self) -> Console:
        """Rich's console of standard error, where that is a terminal."""
        return _console(sys.stderr)

    def result(self, facts: Mapping[str, Any], text: str | None = None, colour: str | None = None) -> None:
        """What was asked for: the facts as a line of JSON, or the text; nothing where that is None."""
        if self.json:
            self._write(json.dumps(facts, default=_as_json) + "\n")
        elif text is not None:
            self.text(self.styled(clean(text), colour))

    def say(self, text: str, **facts: Any) -> None:
        """A remark for people, on standard error; for machines its facts, if it has any."""
        if not self.json:
            self._print(clean(text))
        elif facts:
            self._tell(facts)

    def failed(self, name: str, error: BaseException, facts: Mapping[str, Any]) -> None:
        """One piece of work that failed, among others: for machines it is a result like theirs."""
        if self.json:
            self.result({**facts, "error": facts_of(error)})
        else:
            name = on_one_line(name)
            words = str(error).removeprefix("source: ")  # the name of an argument of Python's
            self.error(words if name in words else f"{name}: {words}", {})

    def warn(self, text: str) -> None:
        """Something that may matter, on standard error."""
        if self.json:
            self._tell({"warning": text})
        else:
            self._print(f"Warning: {clean(text)}", "yellow")

    def error(self, text: str, facts: Mapping[str, Any]) -> None:
        """What went wrong, on standard error."""
        if self.json:
            self._tell({"error": facts})
        else:
            self._print(f"Error: {clean(text)}", "red")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, optional: Sequence[str] = ()) -> None:
        """Print rows for people.

        A terminal shows the first column and STATE in full. If it is too narrow, it leaves out the ``optional`` columns
        one by one, and then puts each cell on a line of its own.
        """
        if not self.is_terminal:
            self._write(_plain(columns, rows))
            return
        for name in optional:
            if not _overflows(columns, rows, self.console.width):
                break
            left_out = columns.index(name)
            columns = [*columns[:left_out], *columns[left_out + 1 :]]
            rows = [[*row[:left_out], *row[left_out + 1 :]] for row in rows]
        with self.console.capture() as captured:
            if optional and _overflows(columns, rows, self.console.width):
                self._print_stacked(columns, rows)
            else:
                self.console.print(self.table_of(columns, rows))
        self._write(captured.get())

    def _print_stacked(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        for row in rows:
            self.console.print(_cell(columns[0], str(row[0])), soft_wrap=True)
            for name, cell in zip(columns[1:], row[1:], strict=True):
                self.console.print(_cell(name, f"  {cell}"), no_wrap=True, overflow="ellipsis")

    def facts(self, title: str, pairs: Sequence[tuple[str, object]]) -> None:
        """A title, and what is known, a line each; a text's further lines are set in, so that they pass for no fact."""
        width = max(len(name) for name, _ in pairs) + 2
        margin = "\n" + " " * width
        lines = [f"{name:<{width}}{clean(str(value)).replace(chr(10), margin)}\n" for name, value in pairs]
        self._write(f"{self.styled(on_one_line(title), bold=True)}\n{''.join(lines)}")

    def text(self, words: str) -> None:
        """A line for people."""
        self._write(words + "\n")

    def styled(self, words: str, colour: str | None = None, *, bold: bool = False) -> str:
        """As standard output can show them."""
        if not _is_styled(sys.stdout):
            return words
        colour = colour if _is_coloured(sys.stdout) else None
        return click.style(words, fg=colour, bold=bold or None) if colour or bold else words

    def table_of(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> RenderableType:
        """The table of a terminal."""
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for number, column in enumerate(columns):
            widest = max((cell_len(clean(str(row[number]))) for row in rows), default=0) if number == 0 else 0
            table.add_column(Text(clean(column)), no_wrap=column == "STATE", min_width=widest)
        for row in rows:
            table.add_row(*(_cell(column, str(cell)) for column, cell in zip(columns, row, strict=True)))
        return table

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int | None, int, int | None], None]]:
        """A bar on standard error while something moves; it is told files done and in all, bytes done and in all.

        Where nothing can move there is none.
        """
        if not self.live:
            yield lambda files, files_total, size, size_total: None
            return
        with _bar(self.errors) as bar:
            task = bar.add_task(what, total=None, files="")
            self._bar = bar

            def tell(files: int, files_total: int | None, size: int, size_total: int | None) -> None:
                count = f"{files}/{'?' if files_total is None else files_total}"
                bar.update(task, completed=size, total=size_total, files=count)

            try:
                yield tell
            finally:
                self._bar = None

    def _tell(self, facts: Mapping[str, Any]) -> None:
        click.echo(json.dumps(facts, default=_as_json), err=True)

    def _print(self, text: str, style: str | None = None) -> None:
        if style and _is_coloured(sys.stderr):
            head, colon, rest = text.partition(":")
            text = click.style(head + colon, fg=style, bold=True) + rest
        if not self._above_bar(text + "\n", sys.stderr):
            click.echo(text, err=True)

    def _above_bar(self, text: str, stream: Any) -> bool:
        """Print above the bar what would go through it, on a terminal that shows both."""
        if self._bar is None or not _is_terminal(stream):
            return False
        from rich.text import Text

        self._bar.console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        return True

    def _write(self, text: str) -> None:
        if self._above_bar(text, sys.stdout):
            return
        self.binary(text)

    def binary(self, content: str | bytes) -> None:
        """To standard output, as it is."""
        try:
            click.echo(content, nl=False, color=True)
        except BrokenPipeError:
            # Whoever read has seen enough: what is still in the buffer goes nowhere, also at the end.
            discard_output()
            raise click.exceptions.Exit(PIPE_CLOSED) from None


def clean(text: str) -> str:
    """Without what would steer a terminal: a name may come from anywhere."""
    return "\n".join(_CONTROLS.sub("\ufffd", line) for line in text.split("\n"))


def on_one_line(text: str) -> str:
    """The same without line breaks: what stands behind one could pass for the command's own words."""
    return clean(text).replace("\n", " ")


def ago(moment: datetime | None, *, now: datetime | None = None) -> str:
    """A moment as people say it; the day where it is long ago or to come."""
    if moment is None:
        return ""
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if not -60 < seconds < 30 * 86_400:
        return iso(moment)[:10]
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


def iso(moment: datetime | None) -> str:
    """A moment to the second, in this machine's time zone."""
    if moment is None:
        return ""
    # "Never" is written as the first or the last moment that there is, and beyond that lies no time zone.
    with contextlib.suppress(OverflowError):
        moment = moment.astimezone()
    return moment.isoformat(" ", "seconds")


def _cell(column: str, text: str) -> Text:
    """One line, cut where there is no room for it."""
    from rich.text import Text

    style = _STYLES.get(text.split(" ")[0], "") if column == "STATE" else ""
    return Text(on_one_line(text), style, no_wrap=True, overflow="ellipsis")


def _overflows(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> bool:
    """Return whether the table is wider than the terminal, even if its wide columns are cut to `_NARROWEST`."""
    from rich.cells import cell_len

    total = 2 * (len(columns) - 1)
    for number, column in enumerate(columns):
        widest = max(cell_len(clean(str(cell))) for cell in (column, *(row[number] for row in rows)))
        total += widest if number == 0 or column == "STATE" else min(widest, _NARROWEST)
    return total > width


def _as_json(value: object) -> object:
    """What JSON does not know: moments, and records without their secrets."""
    import attrs

    if isinstance(value, datetime):
        return value.isoformat()
    kind: Any = type(value)
    if attrs.has(kind):
        shown = {field.name: getattr(value, field.name) for field in attrs.fields(kind) if field.repr}
        return {name.lstrip("_"): content for name, content in shown.items()}
    return str(value)


def _plain(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in nothing but text, a line for each row, and nothing cut off."""
    lines = [columns, *([on_one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "".join(f"{line.rstrip()}\n" for line in padded)


def _console(stream: Any) -> Console:
    from rich.console import Console

    return Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column

    whole = Column(no_wrap=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[files]}", table_column=whole),
        DownloadColumn(table_column=whole),
        TransferSpeedColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        console=console,
        transient=True,
        # Else standard output would go where the bar is, also where it is a file.
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _is_styled(stream: Any) -> bool:
    """Whether it is a terminal that knows more than text."""
    return _is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def _is_coloured(stream: Any) -> bool:
    return _is_styled(stream) and not os.environ.get("NO_COLOR")


def discard_output() -> None:
    """Let what is still to be written to standard output go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)
