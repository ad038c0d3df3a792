"""The guide, the Grafana dashboard and the Prometheus rules use the names that are recorded, and all of them."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from signing_async.telemetry import names
from tests.guides import ROOT

FOLDER = ROOT / "signing_async/telemetry"
GUIDE = (FOLDER / "README.md").read_text("utf-8")
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.rules.yaml").read_text("utf-8"))
CONSTANTS = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
ATTRIBUTES = [value for value in CONSTANTS if value.startswith(("signing.", "signing_async."))]
SPANS = [each.name for each in vars(names).values() if isinstance(each, names.SpanType)]

SUFFIXES = {"s": "_seconds", "By": "_bytes"}
"""What Prometheus appends for a unit; it drops one in braces."""
_FUNCTIONS = {"histogram_quantile", "increase", "rate", "sum", "max", "count", "vector", "offset", "or", "unless", "by"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table of the guide whose heading begins so."""
    table = GUIDE[GUIDE.index(f"| {heading}") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_guide_has_every_metric_span_and_attribute() -> None:
    for metric, (name, kind, _, labels) in zip(names.METRICS, rows("metric"), strict=True):
        assert (name, kind) == (f"`{metric.name}`", f"{metric.kind}, {metric.unit}")
        assert {label for label in re.findall(r"`([\w.]+)`", labels) if "." in label} == set(metric.attributes), name
    assert [found[0] for row in rows("span") if (found := re.findall(r"^`([\w.]+)`$", row[0]))] == SPANS
    assert [row[0].strip("`") for row in rows("attribute")] == ATTRIBUTES


def test_no_name_is_the_namespace_of_another() -> None:
    """A search index refuses a field that is both a number and an object."""
    for taken in (ATTRIBUTES, [metric.name for metric in names.METRICS]):
        assert not [(name, other) for name in taken for other in taken if other.startswith(f"{name}.")]


def series(metric: names.Metric) -> set[str]:
    """The names of a metric's series in Prometheus."""
    name = metric.name.replace(".", "_") + SUFFIXES.get(metric.unit, "")
    if metric.kind == "histogram":
        return {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return {f"{name}_total" if metric.kind == "counter" else name}


def parse(query: str) -> tuple[set[str], set[str]]:
    """The series and the labels of a query."""
    used: set[str] = set()
    for labelled in re.findall(r"by \(([^)]*)\)", query):
        used.update(re.findall(r"\w+", labelled))
    for matchers in re.findall(r"\{([^}]*)\}", query):
        used.update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    rest = re.sub(r"by \([^)]*\)|\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", query)
    return set(re.findall(r"(?<![\w.])[a-z_]+\w*", rest)) - _FUNCTIONS - {"h", "m", "d"}, used


def test_dashboard_shows_every_metric_and_its_queries_and_the_rules_use_series_and_labels_that_exist() -> None:
    known = {name: metric for metric in names.METRICS for name in series(metric)}
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    rules = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    assert rules
    for query in shown + rules:
        found, used = parse(query)
        assert found, query
        for name in found:
            metric = known[name]
            labels = {label.replace(".", "_") for label in metric.attributes}
            assert used <= labels | ({"le"} if metric.kind == "histogram" else set()), query
    assert {known[name] for query in shown for name in parse(query)[0]} == set(names.METRICS)
