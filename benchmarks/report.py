"""What the comparisons found: tables, targets and charts, printed as they come, kept as figures, written as one page.

A comparison calls `show`, `judge` and `draw`. The figures are kept in ``results.json``, and from them alone come
``RESULTS.md`` and the charts: a comparison that is run again replaces its own section, and what `notes` says of a
missed target can be written without measuring again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import ssl
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from .charts import Bar, Chart, Panel, svg
from .notes import NOTES

OURS = "signing_async"
_FOLDER = Path(__file__).parent
_PEERS = (*("aiohttp", "attrs", "cattrs", "gidgethub", "httpx", "orjson", "pydantic", "stripe", "uvloop"),)


@attrs.frozen
class Table:
    """Figures to show: the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        lines = [list(self.columns), *(list(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        head, *body = (_line(line, widths) for line in lines)
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        parts = [f"### {self.title}", "", head, rule, *body]
        return "\n".join([*parts, "", self.note] if self.note else parts)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "| " + " | ".join([first, *others]) + " |"


@attrs.frozen
class Target:
    """A figure that is to be reached, and what was measured."""

    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def met(self) -> bool:
        # As it is shown: to two decimals.
        value = round(self.value, 2)
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    @property
    def bound(self) -> str:
        return f"≥ {self.at_least:g}{self.unit}" if self.at_least is not None else f"≤ {self.at_most:g}{self.unit}"

    @property
    def measured(self) -> str:
        return f"{self.value:.2f}{self.unit}"

    def __str__(self) -> str:
        return f"{self.what}: {self.measured} ({self.bound}: {'met' if self.met else 'MISSED'})"


@attrs.define
class Section:
    """What one comparison found."""

    about: str = ""
    tables: list[Table] = attrs.field(factory=list)
    targets: list[Target] = attrs.field(factory=list)
    charts: list[Chart] = attrs.field(factory=list)
    noticed: list[str] = attrs.field(factory=list)


_now = Section()
shown: list[Table] = _now.tables


def show(table: Table) -> None:
    """Print a table, and keep it."""
    _now.tables.append(table)
    print(table, end="\n\n", flush=True)


def judge(
    what: str, value: float, *, at_least: float | None = None, at_most: float | None = None, unit: str = ""
) -> None:
    """Print whether a target is met, and keep that."""
    target = Target(what, value, at_least, at_most, unit)
    _now.targets.append(target)
    print(target, end="\n\n", flush=True)


def draw(chart: Chart) -> None:
    """Keep a chart."""
    _now.charts.append(chart)


def notice(text: str) -> None:
    """Keep a sentence on what a user notices, for the page's first paragraph."""
    _now.noticed.append(text)


def collected(about: str) -> Section:
    """What was shown, judged and drawn since the last time."""
    section = Section(about, list(_now.tables), list(_now.targets), list(_now.charts), list(_now.noticed))
    for found in (_now.tables, _now.targets, _now.charts, _now.noticed):
        found.clear()
    return section


# Files


def keep(name: str, section: Section, names: Iterable[str], folder: Path = _FOLDER) -> None:
    """Put what a comparison found in the place of what it found before; ``names`` are all that there are."""
    path = folder / "results.json"
    sections = json.loads(path.read_text())["sections"] if path.exists() else {}
    sections[name] = attrs.asdict(section)
    there = {name: sections[name] for name in sorted(names) if name in sections}
    kept = {"machine": _machine(), "versions": _versions(), "sections": there}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def write(folder: Path = _FOLDER) -> None:
    """Write the page and the charts from the figures that are kept."""
    kept = json.loads((folder / "results.json").read_text())
    sections = {name: _section(data) for name, data in kept["sections"].items()}
    (folder / "RESULTS.md").write_text(_page(sections, kept["machine"], kept["versions"]))
    charts = folder / "charts"
    shutil.rmtree(charts, ignore_errors=True)
    charts.mkdir()
    for section in sections.values():
        for chart in section.charts:
            (charts / f"{chart.name}.svg").write_text(svg(chart))


def _section(data: dict[str, Any]) -> Section:
    charts = [
        Chart(
            **{
                **chart,
                "panels": [
                    Panel(**{**panel, "bars": [Bar(**bar) for bar in panel["bars"]]}) for panel in chart["panels"]
                ],
            }
        )
        for chart in data["charts"]
    ]
    tables = [Table(**table) for table in data["tables"]]
    return Section(
        data["about"], tables, [Target(**target) for target in data["targets"]], charts, data.get("noticed", [])
    )


def _page(sections: dict[str, Section], machine: str, versions: str) -> str:
    targets = [target for section in sections.values() for target in section.targets]
    missed: dict[str, list[str]] = {}
    for one in targets:
        if not one.met:
            missed.setdefault(NOTES.get(one.what, "not explained yet"), []).append(
                f"{one.what}: {one.measured} ({one.bound})"
            )
    parts = [
        "# Figures",
        " ".join(text for section in sections.values() for text in section.noticed),
        f"{sum(one.met for one in targets)} of {len(targets)} targets are met.",
        "\n".join(f"- Missed: {'; '.join(figures)}. Why: {why}" for why, figures in missed.items()),
        "Written by `python -m benchmarks --write`; `python -m benchmarks NAME` measures one of the comparisons.",
        f"Machine: {machine}. What is measured runs on one core, the server on the other. {versions}.",
        "Candidates take turns (ABAB…) after a warm-up. A ratio is the median of the ratios of neighbouring runs; "
        "times of a machine like this one mean little by themselves. Every run is checked to have done its work.",
    ]
    for name, section in sections.items():
        parts += [f"## {name}", section.about]
        parts += [f"![{chart.title}](charts/{chart.name}.svg)" for chart in section.charts]
        if section.targets:
            rows = [[one.what, one.bound, one.measured, "yes" if one.met else "**no**"] for one in section.targets]
            parts.append(str(Table("Targets", ("target", "bound", "measured", "met"), rows)))
        parts += [str(table) for table in section.tables]
    return "\n\n".join(filter(None, parts)) + "\n"


def _machine() -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} × {models[0] if models else platform.machine()}, {platform.system()} {platform.release()}"


def _versions() -> str:
    found = [f"Python {platform.python_version()}", ssl.OPENSSL_VERSION.rsplit(" ", 3)[0]]
    for name in _PEERS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is missing")
    if shutil.which("curl"):
        version = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
        found.append(" ".join(version.split()[:2]))
    return ", ".join(found)
