"""Draws bars as SVG: axes from zero, this package in a colour of its own, readable on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

import attrs

_WIDTH = 800
_LABELS = 300
_FIGURES = 60
_ROW = 24
_BAR = 15
_MARGIN = 20

_STYLE = """
.card { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 13px system-ui, sans-serif }
.title { font-size: 16px; font-weight: 600 } .panel { font-weight: 600 } .small { font-size: 12px; fill: #59636e }
.ours { font-weight: 600 } .bar { fill: #8c959f } .bar.ours { fill: #0969da }
.grid { stroke: #d8dee4 } .axis { stroke: #59636e } .target { stroke: #bc4c00; stroke-width: 2; stroke-dasharray: 4 3 }
.aim { font-size: 12px; fill: #bc4c00 } .figure { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .small { fill: #9198a1 }
.bar { fill: #656c76 } .bar.ours { fill: #4493f8 } .grid { stroke: #262c36 } .axis { stroke: #9198a1 }
.target { stroke: #f0883e } .aim { fill: #f0883e } .figure { stroke: #0d1117 }
}
"""


@attrs.frozen
class Bar:
    """One candidate; without a value it is missing."""

    label: str
    value: float | None
    ours: bool = False


@attrs.frozen
class Panel:
    """Bars on an axis of their own. ``target`` is a line that this package's bar is not to pass."""

    title: str
    bars: Sequence[Bar]
    target: float | None = None


@attrs.frozen
class Chart:
    """Panels below each other; ``axis`` says what the bars measure."""

    name: str
    title: str
    axis: str
    panels: Sequence[Panel]


def svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    parts: list[str] = []
    at = _MARGIN + 16
    parts.append(_text(_MARGIN, at, chart.title, "title"))
    at += 20
    parts.append(_text(_MARGIN, at, chart.axis, "small"))
    for panel in chart.panels:
        at += 30
        lines, at = _panel(panel, at)
        parts += lines
    height = at + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(chart.title, {chr(34): "&quot;"})}">'
    )
    card = f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", card, *parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int) -> tuple[list[str], int]:
    """The panel's parts, and where it ends."""
    present = [bar.value for bar in panel.bars if bar.value is not None]
    step, most = _scale(max([*present, panel.target or 0.0]))
    wide = _WIDTH - _LABELS - _FIGURES - _MARGIN
    bottom = top + 14 + len(panel.bars) * _ROW

    def x(value: float) -> float:
        return round(_LABELS + wide * value / most, 1)

    parts = [_text(_MARGIN, top, panel.title, "panel")]
    for index in range(round(most / step) + 1):
        value = index * step
        parts.append(_line(x(value), top + 10, bottom, "axis" if index == 0 else "grid"))
        parts.append(_text(x(value), bottom + 16, f"{value:g}", "small", anchor="middle"))
    tops = [top + 14 + index * _ROW for index in range(len(panel.bars))]
    parts += [_shape(bar, at, x) for bar, at in zip(panel.bars, tops, strict=True) if bar.value is not None]
    if panel.target is not None:
        parts.append(_line(x(panel.target), top + 4, bottom, "target"))
        parts.append(_text(x(panel.target), top, f"target {panel.target:g}", "aim", anchor="middle"))
    for bar, at in zip(panel.bars, tops, strict=True):
        parts += _words(bar, at + _BAR - 3, x)
    return parts, bottom + 18


def _shape(bar: Bar, top: int, x: Callable[[float], float]) -> str:
    width = max(x(bar.value or 0.0) - _LABELS, 1)
    kind = "bar ours" if bar.ours else "bar"
    return f'<rect class="{kind}" x="{_LABELS}" y="{top}" width="{width:g}" height="{_BAR}"/>'


def _words(bar: Bar, y: int, x: Callable[[float], float]) -> list[str]:
    kind = "ours" if bar.ours else ""
    label = _text(_LABELS - 10, y, bar.label, kind, anchor="end")
    if bar.value is None:
        return [label, _text(_LABELS + 6, y, "not installed", "small")]
    return [label, _text(x(bar.value) + 6, y, _figure(bar.value), f"{kind} figure".strip())]


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _scale(most: float) -> tuple[float, float]:
    """The distance between lines, a round figure, and where the axis ends."""
    rough = (most or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return step, step * math.ceil(most / step * 0.999 or 1)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:g}" x2="{x:g}" y1="{top:g}" y2="{bottom:g}"/>'
