"""The committed dashboards: what the generator writes, valid for Grafana, and true to the metrics that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from sentinel.cli.dashboards import FILES, PAGES
from tests import generated_docs
from tests.dashboards import expressions

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in (Path(__file__).parent / "schema").glob("*.json")
}
SCHEMA = SCHEMAS["dashboard"]
EVERYTHING = expressions.of_dashboards() + expressions.of_rules()
UIDS = {"run.json": "sentinel-run", "machine.json": "sentinel-machine", "sentinel.json": "sentinel-itself"}
OF_PROMETHEUS = {"instance", "job"}  # labels that a scrape adds
# Of an annotation from Prometheus. The package's types know those of Grafana's own source only, and say so.
ANNOTATION_KEYS = ("expr", "step", "tagKeys", "titleFormat")


def known() -> dict[str, set[str]]:
    """Labels by the name of a series, as a scrape sees it."""
    found: dict[str, set[str]] = {"up": set()}
    for family in generated_docs.families():
        found[family.name] = set(family.labels)
        if family.kind == "histogram":
            found |= {f"{family.name}_{part}": {*family.labels, "le"} for part in ("bucket", "sum", "count")}
    return found


def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "dashboards.generate", str(tmp_path)], cwd=ROOT, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr.decode()
    for name in PAGES:
        committed = (expressions.FOLDER / name).read_bytes()
        assert (tmp_path / name).read_bytes() == committed, "run `.venv/bin/python -m dashboards.generate`"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_valid_by_grafanas_own_schema(name: str) -> None:
    page = expressions.pages()[name]
    for annotation in page.get("annotations", {}).get("list", []):
        for key in ANNOTATION_KEYS:
            annotation.pop(key, None)
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert [(list(error.path), error.message) for error in validator.iter_errors(page)] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_options_of_each_panel_are_valid_for_its_sort(name: str) -> None:
    for panel in expressions.panels(expressions.pages()[name]):
        sort, custom = panel["type"], panel["fieldConfig"]["defaults"].get("custom")
        checked = [(f"{sort}.options", panel["options"])] + ([(f"{sort}.custom", custom)] if custom else [])
        for schema, value in checked:
            errors = jsonschema.Draft7Validator(SCHEMAS[schema]).iter_errors(value)
            assert [(list(error.path), error.message) for error in errors] == [], panel["title"]


@pytest.mark.parametrize(
    ("path", "value"),
    [(("panels", 1, "gridPos"), "wide"), (("templating", "list", 0, "type"), "list"), (("schemaVersion",), None)],
)
def test_the_schema_refuses_a_broken_page(path: tuple[str | int, ...], value: object) -> None:
    page = expressions.pages()["run.json"]
    node = page
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert not jsonschema.Draft7Validator(SCHEMA).is_valid(page)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_stable_identity_and_its_variables(name: str) -> None:
    page = expressions.pages()[name]
    assert page["uid"] == UIDS[name]
    assert page["schemaVersion"] in {41, 42}
    assert "id" not in page
    chosen = ["instance"] if name == "machine.json" else ["run_id", "rank"]
    assert [variable["name"] for variable in page["templating"]["list"]] == ["datasource", *chosen]


@pytest.mark.parametrize("name", PAGES)
def test_every_query_asks_the_chosen_data_source(name: str) -> None:
    page = expressions.pages()[name]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in expressions.panels(page):
        assert panel["datasource"] == chosen, panel["title"]
        assert [target["datasource"] for target in panel["targets"]] == [chosen] * len(panel["targets"])
        assert panel["description"], panel["title"]
    assert {json.dumps(one["datasource"]) for one in page["templating"]["list"][1:]} == {json.dumps(chosen)}


@pytest.mark.parametrize("name", PAGES)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name: str) -> None:
    found = expressions.pages()[name]["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in found)
        for x in range(place.get("x", 0), place.get("x", 0) + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("asked", EVERYTHING, ids=lambda asked: f"{asked.page}:{asked.place}")
def test_an_expression_names_only_metrics_and_labels_that_exist(asked: expressions.Asked) -> None:
    series = known()
    found = list(expressions.selectors(asked.expr))
    assert found, "no selector was found in it"
    for metric, labels in found:
        assert metric in series
        assert labels - series[metric] - OF_PROMETHEUS == set(), metric
    for labels, metrics in expressions.grouped(asked.expr):
        for metric in metrics:
            assert labels - series[metric] - OF_PROMETHEUS == set(), metric


def test_a_window_follows_the_step_so_that_nothing_falls_between_two_points() -> None:
    """The longer the time that is looked at, the further apart Grafana asks, for marks too."""
    windows = [window for asked in expressions.of_dashboards() for window in re.findall(r"\[(.*?)\]", asked.expr)]
    assert len(windows) > 1
    assert set(windows) == {"$__rate_interval"}


def test_every_metric_is_on_a_page_or_on_no_page_for_a_reason() -> None:
    shown = {
        re.sub("_bucket$", "", metric) for asked in EVERYTHING for metric, _ in expressions.selectors(asked.expr)
    }
    missing = {family.name for family in generated_docs.families()} - shown
    # It names the run, which the page's variable does.
    assert missing == {"sentinel_run_info"}


def test_a_legend_names_only_labels_that_its_series_have() -> None:
    series = known()
    for page in expressions.pages().values():
        for panel in expressions.panels(page):
            for target in panel["targets"]:
                labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                kept = [keep for keep, _ in expressions.grouped(target["expr"])]
                there = set.union(*(series[metric] for metric, _ in expressions.selectors(target["expr"])))
                assert labels <= (set.union(*kept) if kept else there | OF_PROMETHEUS), panel["title"]


def test_every_file_of_the_folder_is_handed_out() -> None:
    files = {path.relative_to(expressions.FOLDER).as_posix() for path in expressions.FOLDER.rglob("*.*")}
    assert {name for name in files if not name.endswith((".py", ".pyc"))} == set(FILES)
