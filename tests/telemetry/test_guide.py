"""The guide's tables are complete."""

from __future__ import annotations

import re

import pytest

from signing_async.telemetry import names
from tests.guides import ROOT

GUIDE = (ROOT / "signing_async/telemetry/README.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose heading begins so."""
    table = GUIDE[GUIDE.index(f"| {heading}") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_every_metric_is_in_the_guide() -> None:
    shown = [tuple(row[:2]) for row in rows("metric")]
    assert shown == [(f"`{metric.name}`", f"{metric.kind}, {metric.unit}") for metric in names.METRICS]


def test_every_span_event_and_attribute_is_in_the_guide() -> None:
    spans = [found[0] for row in rows("span") if (found := re.findall(r"^`([\w.]+)`$", row[0]))]
    assert tuple(spans) == names.SPANS
    assert tuple(row[0].strip("`") for row in rows("event")) == names.EVENTS
    assert tuple(row[0].strip("`") for row in rows("attribute")) == names.ATTRIBUTES


@pytest.mark.parametrize("taken", [names.ATTRIBUTES, tuple(metric.name for metric in names.METRICS)])
def test_no_name_is_the_namespace_of_another(taken: tuple[str, ...]) -> None:
    """A search index refuses a field that is both a number and an object."""
    assert not [(name, other) for name in taken for other in taken if other.startswith(f"{name}.")]


def test_table_of_metrics_has_no_name_twice() -> None:
    all_names = [metric.name for metric in names.METRICS]
    assert len(set(all_names)) == len(all_names)
    constants = {value for value in vars(names).values() if isinstance(value, names.Metric)}
    assert constants == set(names.METRICS)
