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
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from .exits import PIPE_CLOSED, facts_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

    from ..bulk import Progress

_NARROWEST = 12
SECONDS_BETWEEN_LINES = 10.0
"""The interval of progress lines where no progress bar is shown."""

CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
"""Control characters and bidirectional marks, for a character class of a regular expression."""

_COLOURS = {"draft": "yellow", "pending": "yellow", "completed": "green", "signed": "green"}
_COLOURS |= {"sent": "cyan", "cancelled": "red"}


class Output:
    """Prints a command's results, remarks and errors; as JSON if ``json``."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json

    @property
    def live(self) -> bool:
        return not self.json and _has_controls(sys.stderr)

    def result(self, facts: Mapping[str, Any], text: str | None = None, colour: str | None = None) -> None:
        """Print a result to standard output: the facts as a line of JSON, or the text if there is one."""
        if self.json:
            self._print(json.dumps(facts, default=_as_json))
        elif text is not None:
            self.text(clean(text), colour)

    def text(self, text: str, colour: str | None = None, *, bold: bool = False) -> None:
        """Print text for people to standard output; with --json, nothing."""
        if not self.json:
            self._print(self.styled(text, colour, bold=bold))

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

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        if_empty: str = "",
        *,
        optional: Sequence[str] = (),
    ) -> None:
        """Print rows for people. If a terminal is too narrow, ``optional`` columns are left out.

        It shows the first column, STATE, STATUS and ID in full.
        """
        if self.json or not rows:
            self.text(if_empty)
            return
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        def cell(name: str, text: str) -> Text:
            colour = _COLOURS.get(text.partition(" ")[0], "") if name in ("STATE", "STATUS") else ""
            return Text(text, colour, no_wrap=True, overflow="ellipsis")

        console, whole = _console(sys.stdout), {columns[0], "STATE", "STATUS", "ID"}
        cells = {name: [on_one_line(str(row[at])) for row in rows] for at, name in enumerate(columns)}
        widths = {name: max(map(cell_len, (name, *column))) for name, column in cells.items()}
        least = {name: width if name in whole else min(width, _NARROWEST) for name, width in widths.items()}
        for name in optional:
            if sum(least.values()) + 2 * len(least) - 2 > console.width:
                del cells[name], least[name]
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for name, width in least.items():
            table.add_column(name, min_width=width if name in whole else None, no_wrap=name in whole)
        for row in zip(*cells.values(), strict=True):
            table.add_row(*map(cell, cells, row))
        with console.capture() as captured:
            console.print(table, soft_wrap=False)
        self.text("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def facts(self, title: str, facts: Mapping[str, object]) -> None:
        """Print a title and a line for each fact that has a value; with --json, the facts as a line of JSON."""
        if self.json:
            self.result(facts)
            return
        shown = {name: _as_text(value) for name, value in facts.items() if value not in (None, "")}
        width = max(map(len, shown)) + 2
        # Further lines of a value are indented, so they do not look like facts.
        lines = [f"{name:<{width}}{text.replace(chr(10), chr(10) + ' ' * width)}" for name, text in shown.items()]
        self.text("\n".join([self.styled(on_one_line(title), bold=True), *lines]))

    def when(self, moment: datetime | None) -> str:
        """Return a time for a table: relative on a terminal."""
        return ago(moment) if sys.stdout.isatty() else iso(moment)

    def _print(self, line: str) -> None:
        self._write(lambda: sys.stdout.write(f"{line}\n"))

    def binary(self, content: bytes) -> None:
        self._write(lambda: sys.stdout.buffer.write(content))

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
            sys.stdout.flush()
        except BrokenPipeError:
            discard_output()
            raise click.exceptions.Exit(PIPE_CLOSED) from None

    def styled(self, text: str, colour: str | None = None, *, bold: bool = False) -> str:
        return click.style(text, fg=colour, bold=bold or None) if _has_colours(sys.stdout) else text

    @contextlib.contextmanager
    def byte_progress(self, title: str) -> Iterator[Callable[[Progress], None] | None]:
        """Show a progress bar of bytes and yield its ``on_progress``; without a terminal, yield None."""
        from rich.progress import DownloadColumn, TransferSpeedColumn

        with self._bar(title, None, DownloadColumn(), TransferSpeedColumn()) as update:

            def report(progress: Progress) -> None:
                files = f"{progress.files_done}/{'?' if progress.files_total is None else progress.files_total}"
                update(completed=progress.bytes_done, total=progress.bytes_total, info=files)

            yield report if self.live else None

    @contextlib.contextmanager
    def item_progress(self, title: str, total: int | None = None) -> Iterator[ItemProgress]:
        """Show how many items are done, in a bar on a terminal, elsewhere in an occasional line."""
        with self._bar(title, total) as update:
            yield ItemProgress(self, title, total, update)

    @contextlib.contextmanager
    def _bar(self, title: str, total: int | None, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
        """Show a progress bar on a terminal; yield the function that updates it. Text goes above the bar."""
        if not self.live:
            yield lambda **_: None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        bar = BarColumn(bar_width=None, complete_style="cyan", finished_style="green", pulse_style="cyan")
        with Progress(
            *(TextColumn("{task.description}"), bar, TextColumn("{task.fields[info]}"), *columns),
            TimeRemainingColumn(),
            console=_console(sys.stderr),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # not a file
        ) as progress:
            yield partial(progress.update, progress.add_task(title, total=total, info=""))


class ItemProgress:
    """Call it after each item, with whether the item failed."""

    def __init__(self, out: Output, title: str, total: int | None, update: Callable[..., None]) -> None:
        self._out, self._title, self._total, self._update = out, title, total, update
        self._done = self._failed = 0
        self._began = self._last_line = time.monotonic()

    def __call__(self, is_failure: bool) -> None:
        self._done, self._failed = self._done + 1, self._failed + is_failure
        self.note()
        if not self._out.live and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            facts = {"done": self._done, "total": self._total, "failed": self._failed}
            self._out.say(f"{self._title}: {self._numbers()}", progress=facts)

    def note(self, remark: str = "") -> None:
        """Show the numbers in the bar, with a remark that stays until the next item is done."""
        self._update(completed=self._done, info=f"{self._numbers()} {remark}".rstrip())

    def _numbers(self) -> str:
        rate = self._done / max(time.monotonic() - self._began, 0.001)
        failed = f" {self._failed} failed" if self._failed else ""
        return f"{self._done}/{'?' if self._total is None else self._total} {rate:.1f}/s{failed}"


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


def _console(stream: Any) -> Console:
    from rich.console import Console

    is_terminal = stream.isatty()
    width = None if is_terminal else 1_000_000
    return Console(file=stream, force_terminal=is_terminal, width=width, highlight=False, markup=False, emoji=False)


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return f"{iso(value)} ({ago(value)})"
    return clean(value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False))


def _as_json(value: object) -> object:
    """Convert datetimes, and records without their secrets, for JSON."""
    import attrs

    if isinstance(value, datetime):
        return value.isoformat()
    shown: Any = value
    return attrs.asdict(shown, recurse=False, filter=lambda field, _: bool(field.repr))


def _has_controls(stream: Any) -> bool:
    """Return whether the stream is a terminal that supports control sequences."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _has_colours(stream: Any) -> bool:
    return _has_controls(stream) and not os.environ.get("NO_COLOR")
