"""What a command prints: sentences, tables and progress for people, or one JSON object per line for machines.

Results go to standard output, everything else to standard error. On a terminal, tables are styled and fitted to its
width; elsewhere they are plain and never truncated.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import click

from .exits import PIPE_CLOSED, facts_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn
    from rich.table import Column
    from rich.text import Text

    from ..bulk import Progress

SECONDS_BETWEEN_LINES = 10.0
"""The interval of progress lines where no progress bar is shown."""

CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
"""Control characters and bidirectional marks, for a character class of a regular expression."""

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
    """Prints a command's results, remarks and errors; as JSON if ``json``."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._bar: RichProgress | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether standard output is a terminal."""
        return _is_terminal(sys.stdout)

    @property
    def live(self) -> bool:
        """Whether standard error can show a progress bar."""
        return not self.json and _is_styled(sys.stderr)

    def time(self, moment: datetime | None) -> str:
        """Return a time for a table: relative to now on a terminal."""
        return ago(moment) if self.is_terminal else iso(moment)

    @cached_property
    def console(self) -> Console:
        """Rich's console for standard output; use it only on a terminal."""
        return _console(sys.stdout)

    @cached_property
    def errors(self) -> Console:
        """Rich's console for standard error; use it only on a terminal."""
        return _console(sys.stderr)

    def result(self, facts: Mapping[str, Any], text: str | None = None, colour: str | None = None) -> None:
        """Print a result to standard output: the facts as a line of JSON, or the text if there is one."""
        if self.json:
            self._write(json.dumps(facts, default=_as_json) + "\n")
        elif text is not None:
            self.text(self.styled(clean(text), colour))

    def say(self, text: str, **facts: Any) -> None:
        """Print a remark to standard error; with --json, its facts instead, if there are any."""
        if not self.json:
            self._print(clean(text))
        elif facts:
            self._print_json(facts)

    def failed(self, name: str, error: BaseException, facts: Mapping[str, Any]) -> None:
        """Print one failed item among several; with --json, it is a result like the others."""
        if self.json:
            self.result({**facts, "error": facts_of(error)})
        else:
            name = on_one_line(name)
            message = str(error).removeprefix("source: ")  # the name of a Python argument
            self.error(message if name in message else f"{name}: {message}", {})

    def warn(self, text: str) -> None:
        """Print a warning to standard error."""
        if self.json:
            self._print_json({"warning": text})
        else:
            self._print(f"Warning: {clean(text)}", "yellow")

    def error(self, text: str, facts: Mapping[str, Any]) -> None:
        """Print an error to standard error."""
        if self.json:
            self._print_json({"error": facts})
        else:
            self._print(f"Error: {clean(text)}", "red")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, optional: Sequence[str] = ()) -> None:
        """Print rows for people.

        A terminal shows the first column and STATE in full. If the terminal is too narrow, ``optional`` columns are
        left out one by one; if that is not enough, each cell gets a line of its own.
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
        """Print a title and a line per fact. Further lines of a value are indented, so they do not look like facts."""
        width = max(len(name) for name, _ in pairs) + 2
        margin = "\n" + " " * width
        lines = [f"{name:<{width}}{clean(str(value)).replace(chr(10), margin)}\n" for name, value in pairs]
        self._write(f"{self.styled(on_one_line(title), bold=True)}\n{''.join(lines)}")

    def text(self, line: str) -> None:
        """Print a line for people."""
        self._write(line + "\n")

    def styled(self, text: str, colour: str | None = None, *, bold: bool = False) -> str:
        """Return the text with the styles that standard output supports."""
        if not _is_styled(sys.stdout):
            return text
        colour = colour if _is_coloured(sys.stdout) else None
        return click.style(text, fg=colour, bold=bold or None) if colour or bold else text

    def table_of(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> RenderableType:
        """Return the table for a terminal."""
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
    def progress(self, title: str) -> Iterator[Callable[[Progress], None] | None]:
        """Show a progress bar of bytes and yield its ``on_progress``; without a terminal, yield None."""
        if not self.live:
            yield None
            return
        from rich.progress import DownloadColumn, TransferSpeedColumn

        with self.bar(DownloadColumn(table_column=_one_line()), TransferSpeedColumn(_one_line())) as bar:
            task = bar.add_task(title, total=None, info="")

            def report(progress: Progress) -> None:
                files = f"{progress.files_done}/{'?' if progress.files_total is None else progress.files_total}"
                bar.update(task, completed=progress.bytes_done, total=progress.bytes_total, info=files)

            yield report

    @contextlib.contextmanager
    def bar(self, *columns: ProgressColumn) -> Iterator[RichProgress]:
        """Show a progress bar with the field ``info``, these columns and the remaining time; print above it."""
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        with RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green", pulse_style="cyan"),
            TextColumn("{task.fields[info]}", table_column=_one_line()),
            *columns,
            TimeRemainingColumn(table_column=_one_line()),
            console=self.errors,
            transient=True,
            # Otherwise standard output would be redirected to the bar's stream, even if it is a file.
            redirect_stdout=False,
            redirect_stderr=False,
        ) as self._bar:
            try:
                yield self._bar
            finally:
                self._bar = None

    def _print_json(self, facts: Mapping[str, Any]) -> None:
        click.echo(json.dumps(facts, default=_as_json), err=True)

    def _print(self, text: str, style: str | None = None) -> None:
        if style and _is_coloured(sys.stderr):
            head, colon, rest = text.partition(":")
            text = click.style(head + colon, fg=style, bold=True) + rest
        if not self._print_above_bar(text + "\n", sys.stderr):
            click.echo(text, err=True)

    def _print_above_bar(self, text: str, stream: Any) -> bool:
        """Print above the progress bar if there is one and the stream is a terminal. Return whether it was printed."""
        if self._bar is None or not _is_terminal(stream):
            return False
        from rich.text import Text

        self._bar.console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        return True

    def _write(self, text: str) -> None:
        if self._print_above_bar(text, sys.stdout):
            return
        self.binary(text)

    def binary(self, content: str | bytes) -> None:
        """Write to standard output unchanged."""
        try:
            click.echo(content, nl=False, color=True)
        except BrokenPipeError:
            # The reader closed the pipe: discard the buffer, also at exit.
            discard_output()
            raise click.exceptions.Exit(PIPE_CLOSED) from None


def clean(text: str) -> str:
    """Replace control characters: names may come from anywhere."""
    return "\n".join(_CONTROLS.sub("\ufffd", line) for line in text.split("\n"))


def on_one_line(text: str) -> str:
    """Replace control characters and newlines: a second line could look like the command's own output."""
    return clean(text).replace("\n", " ")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ago(moment: datetime | None, *, now: datetime | None = None) -> str:
    """Return a time relative to now, or the date if it is long ago or in the future."""
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
    """Return a time to the second, in the local time zone."""
    if moment is None:
        return ""
    # A service may write "never" as the first or last possible time, which no other time zone can represent.
    with contextlib.suppress(OverflowError):
        moment = moment.astimezone()
    return moment.isoformat(" ", "seconds")


def _cell(column: str, text: str) -> Text:
    """Return a cell that is cut to one line."""
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
    """Convert datetimes, and records without their secrets, for JSON."""
    import attrs

    if isinstance(value, datetime):
        return value.isoformat()
    kind: Any = type(value)
    if attrs.has(kind):
        shown = {field.name: getattr(value, field.name) for field in attrs.fields(kind) if field.repr}
        return {name.lstrip("_"): content for name, content in shown.items()}
    return str(value)


def _plain(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return the table as plain text, one line per row, nothing truncated."""
    lines = [columns, *([on_one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "".join(f"{line.rstrip()}\n" for line in padded)


def _console(stream: Any) -> Console:
    from rich.console import Console

    return Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)


def _one_line() -> Column:
    from rich.table import Column

    return Column(no_wrap=True)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _is_styled(stream: Any) -> bool:
    """Return whether the stream is a terminal that supports control sequences."""
    return _is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def _is_coloured(stream: Any) -> bool:
    return _is_styled(stream) and not os.environ.get("NO_COLOR")


def discard_output() -> None:
    """Redirect standard output to the null device, so that buffered output is discarded."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    finally:
        os.close(null)


class ProgressDisplay:
    """The number of items done: a bar with rate and remaining time on a terminal, an occasional line elsewhere."""

    def __init__(self, out: Output, what: str, total: int | None) -> None:
        self._out = out
        self._what = what
        self._total = total
        self._done = self._failed = 0
        self._began = self._last_line = time.monotonic()
        self._exits = contextlib.ExitStack()
        self._bar: RichProgress | None = None
        self._info = ""

    def __enter__(self) -> Self:
        if self._out.live:
            self._bar = self._exits.enter_context(self._out.bar())
            self._bar.add_task(self._what, total=self._total, info="")
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def advance(self, *, failed: bool = False) -> None:
        """Count one item as done."""
        self._done += 1
        self._failed += failed
        now = time.monotonic()
        rate = self._done / max(now - self._began, 0.001)
        if self._bar is not None:
            self._info = f"{self._done}/{'?' if self._total is None else self._total} {rate:.1f}/s"
            self._info += f" {self._failed} failed" if self._failed else ""
            self._bar.update(self._bar.task_ids[0], completed=self._done, info=self._info)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print_line(rate)

    def note(self, text: str) -> None:
        """Show a remark in the bar until the next item is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], info=f"{self._info} {text}".lstrip())

    def _print_line(self, rate: float) -> None:
        facts: dict[str, Any] = {"done": self._done, "total": self._total, "failed": self._failed, "rate": rate}
        words = f"{self._what}: {self._done}"
        if self._total is not None:
            facts["seconds_left"] = (self._total - self._done) / rate
            words += f" of {self._total}, {self._failed} failed"
        words += f", {rate:.1f} a second"
        if "seconds_left" in facts:
            words += f", about {_duration(facts['seconds_left'])} left"
        self._out.say(words, progress=facts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
