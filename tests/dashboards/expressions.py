"""The expressions of our dashboards and rules, and what they refer to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml

from sentinel.cli.dashboards import PAGES

FOLDER = Path(__file__).parents[2] / "dashboards"


class Asked(NamedTuple):
    """One expression as it is written, and where it stands."""

    page: str
    place: str  # panel, annotation or alert
    expr: str


def pages() -> dict[str, dict[str, Any]]:
    return {name: json.loads((FOLDER / name).read_text(encoding="utf-8")) for name in PAGES}


def panels(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in page["panels"] if panel["type"] != "row"]


def of_dashboards() -> list[Asked]:
    found = []
    for name, page in pages().items():
        for panel in panels(page):
            found += [Asked(name, panel["title"], target["expr"]) for target in panel["targets"]]
        for annotation in page.get("annotations", {}).get("list", []):
            found += [Asked(name, annotation["name"], annotation["expr"])] if "expr" in annotation else []
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def of_rules() -> list[Asked]:
    return [Asked("rules.yml", rule["alert"], rule["expr"]) for rule in rules()]


def filled(expr: str, run_id: str = "r1", rank: str = ".*") -> str:
    """The expression as Grafana would send it."""
    values = {"$__rate_interval": "1m", "$run_id": run_id, "$rank": rank, "$instance": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels that it is matched by) of every selector."""
    for node in _nodes(promql_parser.parse(filled(expr))):
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name, {matcher.name for matcher in node.matchers.matchers}


def plain_selectors(expr: str) -> list[str]:
    """Every selector as it stands, without its range and offset: what must be there for the expression to mean it."""
    nodes = _nodes(promql_parser.parse(filled(expr)))
    return [f"{node.name}{node.matchers}" for node in nodes if isinstance(node, promql_parser.VectorSelector)]


def grouped(expr: str) -> Iterator[tuple[set[str], set[str]]]:
    """(labels that an aggregation keeps, metrics inside it)."""
    for node in _nodes(promql_parser.parse(filled(expr))):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            inside = {one.name for one in _nodes(node.expr) if isinstance(one, promql_parser.VectorSelector)}
            yield set(node.modifier.labels), inside


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from _nodes(child)
    for child in getattr(node, "args", None) or []:
        yield from _nodes(child)
