"""The guide's tables are complete."""

from __future__ import annotations

import re

import pytest

from signing_async.telemetry import names
from tests.guides import ROOT

GUIDE = (ROOT / "signing_async/telemetry/README.md").read_text("utf-8")
CONSTANTS = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
SPANS = [each.name for each in vars(names).values() if isinstance(each, names.SpanType)]
ATTRIBUTES = [value for value in CONSTANTS.values() if value.startswith(("signing.", "signing_async."))]


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose heading begins so."""
    table = GUIDE[GUIDE.index(f"| {heading}") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_every_metric_is_in_the_guide() -> None:
    shown = [tuple(row[:2]) for row in rows("metric")]
    assert shown == [(f"`{metric.name}`", f"{metric.kind}, {metric.unit}") for metric in names.METRICS]


def labels(metric: names.Metric) -> set[str]:
    """The attributes that the guide gives to a metric."""
    (cell,) = (row[3] for row in rows("metric") if row[0] == f"`{metric.name}`")
    return {name for name in re.findall(r"`([\w.]+)`", cell) if "." in name}


@pytest.mark.parametrize("metric", names.METRICS, ids=lambda metric: metric.name)
def test_attributes_of_a_metric_are_those_of_the_guide(metric: names.Metric) -> None:
    assert set(metric.attributes) == labels(metric)


def test_every_span_and_attribute_is_in_the_guide() -> None:
    spans = [found[0] for row in rows("span") if (found := re.findall(r"^`([\w.]+)`$", row[0]))]
    assert spans == SPANS
    assert [row[0].strip("`") for row in rows("attribute")] == ATTRIBUTES


@pytest.mark.parametrize("taken", [ATTRIBUTES, [metric.name for metric in names.METRICS]])
def test_no_name_is_the_namespace_of_another(taken: list[str]) -> None:
    """A search index refuses a field that is both a number and an object."""
    assert not [(name, other) for name in taken for other in taken if other.startswith(f"{name}.")]
