"""The Grafana dashboard and the Prometheus rules use the metrics and the attributes that exist, and all of them."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
import yaml

from signing_async.telemetry import names

PACKAGE = files("signing_async.telemetry")
DASHBOARD: dict[str, Any] = json.loads(PACKAGE.joinpath("grafana.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load(PACKAGE.joinpath("prometheus.rules.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]

SUFFIXES = {"s": "_seconds", "By": "_bytes"}
"""What Prometheus appends for a unit; it drops one in braces."""
_FUNCTIONS = {"histogram_quantile", "increase", "rate", "sum", "max", "count", "vector", "offset", "or", "unless", "by"}


def series(metric: names.Metric) -> set[str]:
    """The names of a metric's series in Prometheus."""
    name = metric.name.replace(".", "_") + SUFFIXES.get(metric.unit, "")
    if metric.kind == "histogram":
        return {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return {f"{name}_total" if metric.kind == "counter" else name}


def labels(metric: names.Metric) -> set[str]:
    """The labels of a metric's series."""
    return {name.replace(".", "_") for name in metric.attributes} | ({"le"} if metric.kind == "histogram" else set())


SERIES = {name: metric for metric in names.METRICS for name in series(metric)}


def parse(query: str) -> tuple[set[str], set[str]]:
    """The series and the labels of a query."""
    used: set[str] = set()
    for labelled in re.findall(r"by \(([^)]*)\)", query):
        used.update(re.findall(r"\w+", labelled))
    for matchers in re.findall(r"\{([^}]*)\}", query):
        used.update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    rest = re.sub(r"by \([^)]*\)|\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", query)
    return set(re.findall(r"(?<![\w.])[a-z_]+\w*", rest)) - _FUNCTIONS, used


@pytest.mark.parametrize("query", QUERIES)
def test_query_uses_series_and_labels_that_exist(query: str) -> None:
    found, used = parse(query)
    found -= {"h", "m", "d"}
    assert found
    assert found <= SERIES.keys()
    for name in found:
        assert used <= labels(SERIES[name])


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {SERIES[name] for panel in PANELS for target in panel["targets"] for name in parse(target["expr"])[0]}
    assert shown == set(names.METRICS)
