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
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import click

from .exits import PIPE_CLOSED, facts_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn
    from rich.table import Table

    from ..bulk import Progress

SECONDS_BETWEEN_LINES = 10.0
"""The interval of progress lines where no progress bar is shown."""

CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
"""Control characters and bidirectional marks, for a character class of a regular expression."""

_CONTROLS = re.compile(f"[{CONTROLS}]")
_NARROWEST = 12
_STYLES = dict.fromkeys(("draft", "pending"), "yellow") | dict.fromkeys(("completed", "signed"), "green")
_STYLES |= {"sent": "cyan", "cancelled": "red"}


class Output:
    """Prints a command's results, remarks and errors; as JSON if ``json``."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json

    @property
    def is_terminal(self) -> bool:
        """Whether standard output is a terminal."""
        return _is_terminal(sys.stdout)

    @property
    def live(self) -> bool:
        """Whether standard error can show a progress bar."""
        return not self.json and _is_styled(sys.stderr)

    @cached_property
    def console(self) -> Console:
        """Rich's console for standard output; use it only on a terminal."""
        return _console(sys.stdout)

    def result(self, facts: Mapping[str, Any], text: str | None = None, colour: str | None = None) -> None:
        """Print a result to standard output: the facts as a line of JSON, or the text if there is one."""
        if self.json:
            self.text(json.dumps(facts, default=_as_json))
        elif text is not None:
            self.text(self.styled(clean(text), colour))

    def say(self, text: str, **facts: Any) -> None:
        """Print a remark to standard error; with --json, its facts instead, if there are any."""
        if facts or not self.json:
            self._remark(clean(text), facts)

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
        self._remark(clean(text), {"warning": text}, "Warning: ", "yellow")

    def error(self, text: str, facts: Mapping[str, Any]) -> None:
        """Print an error to standard error."""
        self._remark(clean(text), {"error": facts}, "Error: ", "red")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, optional: Sequence[str] = ()) -> None:
        """Print rows for people.

        A terminal shows the first column and STATE in full. If the terminal is too narrow, ``optional`` columns are
        left out one by one; if that is not enough, each cell gets a line of its own.
        """
        lines = [tuple(columns), *(tuple(on_one_line(str(cell)) for cell in row) for row in rows)]
        if not self.is_terminal:
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            padded = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
            self.text("\n".join(line.rstrip() for line in padded))
            return
        width = self.console.width
        for name in optional:
            if _minimum(lines) > width:
                at = lines[0].index(name)
                lines = [(*line[:at], *line[at + 1 :]) for line in lines]
        with self.console.capture() as captured:
            if optional and _minimum(lines) > width:
                for first, *others in lines[1:]:
                    self.console.print(first)
                    for cell in others:
                        self.console.print(f"  {cell}", no_wrap=True, overflow="ellipsis", soft_wrap=False)
            else:
                self.console.print(self.table_of(lines[0], lines[1:]), soft_wrap=False)
        self.text(captured.get().removesuffix("\n"))

    def table_of(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
        """Return the table for a terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        cells = [[on_one_line(str(cell)) for cell in row] for row in rows]
        for number, column in enumerate(columns):
            widest = max((Text(row[number]).cell_len for row in cells), default=0) if number == 0 else 0
            table.add_column(Text(column), no_wrap=number == 0 or column == "STATE", min_width=widest)
        for row in cells:
            styles = [
                _STYLES.get(cell.split(" ")[0], "") if name == "STATE" else ""
                for name, cell in zip(columns, row, strict=True)
            ]
            table.add_row(
                *(Text(cell, style, no_wrap=True, overflow="ellipsis") for cell, style in zip(row, styles, strict=True))
            )
        return table

    def facts(self, title: str, pairs: Sequence[tuple[str, object]]) -> None:
        """Print a title and a line per fact. Further lines of a value are indented, so they do not look like facts."""
        width = max(len(name) for name, _ in pairs) + 2
        margin = "\n" + " " * width
        lines = [f"{name:<{width}}{clean(str(value)).replace(chr(10), margin)}" for name, value in pairs]
        self.text("\n".join([self.styled(on_one_line(title), bold=True), *lines]))

    def text(self, line: str) -> None:
        """Print a line for people."""
        self._write(lambda: sys.stdout.write(line + "\n"))

    def binary(self, content: bytes) -> None:
        """Write to standard output unchanged."""
        self._write(lambda: sys.stdout.buffer.write(content))

    def _write(self, write: Callable[[], int]) -> None:
        try:
            write()
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader closed the pipe: discard the buffer, also at exit.
            discard_output()
            raise click.exceptions.Exit(PIPE_CLOSED) from None

    def styled(self, text: str, colour: str | None = None, *, bold: bool = False) -> str:
        """Return the text with the styles that standard output supports."""
        if not _is_styled(sys.stdout):
            return text
        colour = colour if _is_coloured(sys.stdout) else None
        return click.style(text, fg=colour, bold=bold or None) if colour or bold else text

    @contextlib.contextmanager
    def progress(self, title: str) -> Iterator[Callable[[Progress], None] | None]:
        """Show a progress bar of bytes and yield its ``on_progress``; without a terminal, yield None."""
        if not self.live:
            yield None
            return
        from rich.progress import DownloadColumn, TransferSpeedColumn

        with self.bar(DownloadColumn, TransferSpeedColumn) as bar:
            task = bar.add_task(title, total=None, info="")

            def report(progress: Progress) -> None:
                files = f"{progress.files_done}/{'?' if progress.files_total is None else progress.files_total}"
                bar.update(task, completed=progress.bytes_done, total=progress.bytes_total, info=files)

            yield report

    def bar(self, *columns: type[ProgressColumn]) -> Bar:
        """Return a progress bar with the field ``info``, these columns and the remaining time; text goes above it."""
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        kinds: list[type[ProgressColumn]] = [*columns, TimeRemainingColumn]
        return Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green", pulse_style="cyan"),
            TextColumn("{task.fields[info]}", table_column=Column(no_wrap=True)),
            *(kind(table_column=Column(no_wrap=True)) for kind in kinds),
            console=_console(sys.stderr),
            transient=True,
            redirect_stdout=self.is_terminal,  # not a file
        )

    def _remark(self, text: str, facts: Mapping[str, Any], head: str = "", colour: str | None = None) -> None:
        if self.json:
            text, head = json.dumps(facts, default=_as_json), ""
        elif head and _is_coloured(sys.stderr):
            head = click.style(head.rstrip(" "), fg=colour, bold=True) + " "
        # Not `click.echo`: it bypasses a progress bar, and would write into its line.
        sys.stderr.write(f"{head}{text}\n")
        sys.stderr.flush()


class ProgressDisplay:
    """The number of items done: a bar with rate and remaining time on a terminal, an occasional line elsewhere."""

    def __init__(self, out: Output, what: str, total: int | None) -> None:
        self._out = out
        self._what = what
        self._total = total
        self._done = self._failed = 0
        self._info = ""
        self._began = self._last_line = time.monotonic()
        self._bar = out.bar() if out.live else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._what, total=self._total, info="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, failed: bool = False) -> None:
        """Count one item as done."""
        self._done += 1
        self._failed += failed
        now = time.monotonic()
        rate = self._done / max(now - self._began, 0.001)
        if self._bar is not None:
            info = f"{self._done}/{'?' if self._total is None else self._total} {rate:.1f}/s"
            info += f" {self._failed} failed" if self._failed else ""
            self._info = info
            self._bar.update(self._bar.task_ids[0], completed=self._done, info=info)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print_line(rate)

    def note(self, text: str) -> None:
        """Show a remark in the bar until the next item is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], info=f"{self._info} {text}".lstrip())

    def _print_line(self, rate: float) -> None:
        facts: dict[str, Any] = {"done": self._done, "total": self._total, "failed": self._failed, "rate": rate}
        text = f"{self._what}: {self._done}"
        if self._total is not None:
            facts["seconds_left"] = (self._total - self._done) / rate
            text += f" of {self._total}, {self._failed} failed"
        text += f", {rate:.1f} a second"
        if self._total is not None:
            text += f", about {timedelta(seconds=round(facts['seconds_left']))} left"
        self._out.say(text, progress=facts)


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


def discard_output() -> None:
    """Redirect standard output to the null device, so that buffered output is discarded."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    finally:
        os.close(null)


def _minimum(lines: Sequence[Sequence[str]]) -> int:
    """Return the width of a table whose first column and STATE are shown in full, and the others in part."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    return (
        sum(
            width + 2 if number == 0 or lines[0][number] == "STATE" else min(width, _NARROWEST) + 2
            for number, width in enumerate(widths)
        )
        - 2
    )


def _as_json(value: object) -> object:
    """Convert datetimes, and records without their secrets, for JSON."""
    import attrs

    if isinstance(value, datetime):
        return value.isoformat()
    if attrs.has(type(value)):
        shown: Any = value
        return attrs.asdict(shown, recurse=False, filter=lambda field, _: bool(field.repr))
    return str(value)


def _console(stream: Any) -> Console:
    from rich.console import Console

    return Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _is_styled(stream: Any) -> bool:
    """Return whether the stream is a terminal that supports control sequences."""
    return _is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def _is_coloured(stream: Any) -> bool:
    return _is_styled(stream) and not os.environ.get("NO_COLOR")
