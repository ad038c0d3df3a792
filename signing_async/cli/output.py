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

_NARROWEST = 12
_COLOURS = {"draft": "yellow", "pending": "yellow", "completed": "green", "signed": "green"}
_COLOURS |= {"sent": "cyan", "cancelled": "red"}


class Output:
    """Prints a command's results, remarks and errors; as JSON if ``json``."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def live(self) -> bool:
        return not self.json and _has_controls(sys.stderr)

    def result(self, facts: Mapping[str, Any], text: str | None = None, colour: str | None = None) -> None:
        """Print a result to standard output: the facts as a line of JSON, or the text if there is one."""
        if self.json:
            self.text(json.dumps(facts, default=_as_json))
        elif text is not None:
            self.text(self.styled(clean(text), colour))

    def say(self, text: str, **facts: Any) -> None:
        """Print a remark to standard error; with --json, its facts instead, if there are any."""
        if facts or not self.json:
            self._remark(text, facts)

    def failed(self, name: str, error: BaseException, facts: Mapping[str, Any]) -> None:
        """Print one failed item among several; with --json, it is a result like the others."""
        if self.json:
            self.result({**facts, "error": facts_of(error)})
        else:
            name = on_one_line(name)
            message = str(error).removeprefix("source: ")  # the name of a Python argument
            self.error(message if name in message else f"{name}: {message}", {})

    def warn(self, text: str) -> None:
        self._remark(text, {"warning": text}, "Warning:", "yellow")

    def error(self, text: str, facts: Mapping[str, Any]) -> None:
        self._remark(text, {"error": facts}, "Error:", "red")

    def _remark(self, text: str, facts: Mapping[str, Any], head: str = "", colour: str | None = None) -> None:
        text = clean(text)
        if self.json:
            text = json.dumps(facts, default=_as_json)
        elif head:
            text = f"{click.style(head, fg=colour, bold=True) if _has_colours(sys.stderr) else head} {text}"
        # Not `click.echo`: it bypasses a progress bar, and would write into its line.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, optional: Sequence[str] = ()) -> None:
        """Print rows for people.

        A terminal shows the first column, STATE and ID in full. If it is too narrow, ``optional`` columns are left out.
        """
        lines = [list(columns), *([on_one_line(str(cell)) for cell in row] for row in rows)]
        if not self.is_terminal:
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            padded = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
            self.text("\n".join(line.rstrip() for line in padded))
            return
        console = console_of(sys.stdout)
        for name in optional:
            if _minimum_width(lines) > console.width:
                at = lines[0].index(name)
                lines = [line[:at] + line[at + 1 :] for line in lines]
        with console.capture() as captured:
            console.print(table_of(lines[0], lines[1:]), soft_wrap=False)
        self.text(captured.get().removesuffix("\n"))

    def facts(self, title: str, pairs: Sequence[tuple[str, object]]) -> None:
        """Print a title and a line per fact. Further lines of a value are indented, so they do not look like facts."""
        width = max(len(name) for name, _ in pairs) + 2
        margin = "\n" + " " * width
        lines = [f"{name:<{width}}{clean(str(value)).replace(chr(10), margin)}" for name, value in pairs]
        self.text("\n".join([self.styled(on_one_line(title), bold=True), *lines]))

    def text(self, line: str) -> None:
        self._write(lambda: sys.stdout.write(line + "\n"))

    def binary(self, content: bytes) -> None:
        self._write(lambda: sys.stdout.buffer.write(content))

    def _write(self, write: Callable[[], int]) -> None:
        try:
            write()
            sys.stdout.flush()
        except BrokenPipeError:
            discard_output()
            raise click.exceptions.Exit(PIPE_CLOSED) from None

    def styled(self, text: str, colour: str | None = None, *, bold: bool = False) -> str:
        return click.style(text, fg=colour, bold=bold or None) if _has_colours(sys.stdout) else text

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
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green", pulse_style="cyan"),
            TextColumn("{task.fields[info]}", table_column=Column(no_wrap=True)),
            *(kind(table_column=Column(no_wrap=True)) for kind in columns),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console_of(sys.stderr),
            transient=True,
            redirect_stdout=self.is_terminal,  # not a file
        )


class ProgressDisplay:
    """The number of items done: a bar with rate and remaining time on a terminal, an occasional line elsewhere."""

    def __init__(self, out: Output, what: str, total: int | None) -> None:
        self._out, self._what, self._total = out, what, total
        self._done = self._failed = 0
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

    def note(self, remark: str = "") -> None:
        """Show the numbers in the bar, with a remark that stays until the next item is done."""
        if self._bar is not None:
            rate = self._done / max(time.monotonic() - self._began, 0.001)
            facts = (f"{self._done}/{'?' if self._total is None else self._total}", f"{rate:.1f}/s")
            failures = f"{self._failed} failed" if self._failed else ""
            info = " ".join(filter(None, (*facts, failures, remark)))
            self._bar.update(self._bar.task_ids[0], completed=self._done, info=info)

    def advance(self, *, failed: bool = False) -> None:
        self._done += 1
        self._failed += failed
        now = time.monotonic()
        rate = self._done / max(now - self._began, 0.001)
        if self._bar is not None:
            self.note()
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            facts: dict[str, Any] = {"done": self._done, "total": self._total, "failed": self._failed, "rate": rate}
            text = f"{self._done}, {rate:.1f} a second"
            if self._total is not None:
                facts["seconds_left"] = (self._total - self._done) / rate
                left = timedelta(seconds=round(facts["seconds_left"]))
                text = f"{self._done} of {self._total}, {self._failed} failed, {rate:.1f} a second, about {left} left"
            self._out.say(f"{self._what}: {text}", progress=facts)


def clean(text: str) -> str:
    """Replace control characters: names may come from anywhere."""
    return "\n".join(re.sub(f"[{CONTROLS}]", "\ufffd", line) for line in text.split("\n"))


def on_one_line(text: str) -> str:
    """Replace control characters and newlines: a second line could look like the command's own output."""
    return clean(text).replace("\n", " ")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ago(moment: datetime | None) -> str:
    seconds = -60.0 if moment is None else (datetime.now(UTC) - moment).total_seconds()
    if not -60 < seconds < 30 * 86_400:
        return iso(moment)[:10]
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


def iso(moment: datetime | None) -> str:
    if moment is None:
        return ""
    # A service may write "never" as the first or last possible time, which no other time zone can represent.
    with contextlib.suppress(OverflowError):
        moment = moment.astimezone()
    return moment.isoformat(" ", "seconds")


def discard_output() -> None:
    """Redirect standard output to the null device, so that buffered output is discarded, also at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    cells = [[Text(on_one_line(str(cell)), no_wrap=True, overflow="ellipsis") for cell in row] for row in rows]
    for number, (name, *column) in enumerate(zip(map(Text, columns), *cells, strict=True)):
        is_state = name.plain == "STATE"
        widest = 0 if number else max((cell.cell_len for cell in column), default=0)
        table.add_column(name, no_wrap=is_state or not number or name.plain == "ID", min_width=widest)
        for cell in column if is_state else ():
            cell.stylize(_COLOURS.get(cell.plain.split(" ")[0], ""))
    for row in cells:
        table.add_row(*row)
    return table


def _minimum_width(lines: Sequence[Sequence[str]]) -> int:
    """Return the width of a table whose first column, STATE and ID are shown in full, and the others in part."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for number, name in enumerate(lines[0]):
        if number and name not in ("STATE", "ID"):
            widths[number] = min(widths[number], _NARROWEST)
    return sum(widths) + 2 * len(widths) - 2


def _as_json(value: object) -> object:
    """Convert datetimes, and records without their secrets, for JSON."""
    import attrs

    if isinstance(value, datetime):
        return value.isoformat()
    if attrs.has(type(value)):
        shown: Any = value
        return attrs.asdict(shown, recurse=False, filter=lambda field, _: bool(field.repr))
    return str(value)


def console_of(stream: Any) -> Console:
    from rich.console import Console

    return Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _has_controls(stream: Any) -> bool:
    """Return whether the stream is a terminal that supports control sequences."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _has_colours(stream: Any) -> bool:
    return _has_controls(stream) and not os.environ.get("NO_COLOR")
