"""Write a postmortem as one HTML page that needs nothing else: no network, no files beside it, light and dark.

What comes from a run is text (`html_markup` escapes it) or JSON in a data block; the page's policy lets no script run
but the two that are hashed here, and lets nothing be fetched.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sentinel.errors import PermanentError
from sentinel.postmortem.diagnosis import diagnose
from sentinel.postmortem.html_account import account, again, facts
from sentinel.postmortem.html_cells import cell_figures
from sentinel.postmortem.html_charts import GROUPS, WIDE
from sentinel.postmortem.html_figures import Figure, figures
from sentinel.postmortem.html_marks import MOST_SHADED, Marks, marks_of
from sentinel.postmortem.html_markup import Html, element, joined, raw
from sentinel.postmortem.html_story import ends_nonfinite, story, verdict
from sentinel.postmortem.html_timeline import MOST_DRAWN, timeline
from sentinel.postmortem.report import report
from sentinel.postmortem.series import Series, series_of
from sentinel.store.history import History
from sentinel.store.strict_json import dumps

_EXPECTED = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "step_seconds": "step time",
    "memory_peak_bytes": "device memory",
    "host_memory_bytes": "host memory",
}  # signals whose absence is told


class Material(NamedTuple):
    """All that a page tells."""

    report: Mapping[str, Any]
    provenance: Mapping[str, Any]
    decisions: Sequence[Mapping[str, Any]]
    findings: Sequence[Mapping[str, Any]]
    troubles: Sequence[Mapping[str, Any]]
    series: Series
    place: str  # the database, as a person may see it


def write(history: History, run_id: str, path: Path) -> None:
    """Write the page of a run, whole or not at all. Raises PermanentError without plotly or a writable folder."""
    text = page(material(history, run_id), plotly_script())
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PermanentError(
            f"the page cannot be written to {path} ({error.strerror}); name a file in a folder of yours"
        ) from None


def material(history: History, run_id: str) -> Material:
    return Material(
        report(history, run_id),
        history.run(run_id),
        history.actions(run_id),
        history.findings(run_id),
        [row for row in history.events(run_id) if row["kind"] == "trouble"],
        series_of(history, run_id),
        history.place,
    )


def plotly_script() -> str:
    """plotly.js, from the extra `report`. Raises PermanentError where that is missing."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped] # plotly has no types
    except ModuleNotFoundError:
        raise PermanentError(
            "the page needs plotly, which is not installed; pip install 'train-sentinel[report]'"
        ) from None
    return str(get_plotlyjs())


def page(told: Material, plotly: str) -> str:
    """The whole document."""
    marks = marks_of(told.report, told.decisions, told.findings, told.series)
    plots = [*cell_figures(told.series), *figures(told.series, marks)]
    drawn = [timeline(told.report, told.series, marks), *plots] if len(told.series) else []
    scripts = (plotly, _asset("page.js"))
    name = told.report["run"]["name"] or told.report["run"]["run_id"]
    head = joined(
        raw('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        raw('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        element("title", f"{name}: postmortem"),
        element("style", raw(_asset("page.css"))),
    )
    body = joined(
        _main(told, drawn),
        element("script", raw(_data(drawn, marks, told.series)), type="application/json", id="figures"),
        *(element("script", raw(script)) for script in scripts),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _main(told: Material, drawn: Sequence[Figure]) -> Html:
    run = told.report["run"]
    diagnoses = diagnose(told.report, told.series)
    return element(
        "main",
        element(
            "header",
            element("p", "sentinel postmortem", class_="brand"),
            element("h1", run["name"] or "run", " ", element("small", run["run_id"])),
            element("p", verdict(told.report, told.series), class_=f"verdict {_mood(told)}"),
            facts(run, told.provenance),
            class_="top",
        ),
        _plots(drawn, told),
        story(told.report, diagnoses, told.series),
        account(told.report, told.troubles),
        again(run["run_id"], told.place),
    )


def _mood(told: Material) -> str:
    if told.report["run"]["status"] in {"failed", "lost"} or ends_nonfinite(told.series):
        return "critical"
    if any(incident["status"] != "resolved" for incident in told.report["incidents"]):
        return "warning"
    return "good"


def _plots(drawn: Sequence[Figure], told: Material) -> Html:
    if not drawn:
        return element("p", "No step was recorded yet, so there is nothing to plot.", class_="calm")
    wide = [figure for figure in drawn if figure["name"] == "timeline" or figure["name"] in WIDE]
    grids = {group: [one for one in drawn if one not in wide and one["group"] == group] for group in GROUPS}
    missing = [label for name, label in _EXPECTED.items() if not told.series.columns[name].is_recorded]
    switch = element(
        "div",
        element("button", "in the order tried", type="button", data_axis="order", aria_pressed="true"),
        element("button", "by step", type="button", data_axis="step", aria_pressed="false"),
        class_="switch",
        role="group",
        aria_label="Horizontal axis",
    )
    legend = element(
        "p",
        element("span", class_="key live"),
        "counts ",
        element("span", class_="key history"),
        "taken back by a rollback or restart ",
        element("span", class_="key band"),
        "incident ",
        element("span", class_="key turn"),
        "rollback ",
        element("span", "✕", class_="cross"),
        "not finite",
        class_="legend",
    )
    return element(
        "section",
        element("h2", "What happened"),
        element("div", switch, legend, class_="tools"),
        element("noscript", element("p", "The plots need JavaScript; everything below does not.")),
        [_box(figure) for figure in wide],
        [
            [
                element("h3", group, class_="group"),
                element("div", [_box(figure) for figure in of_group], class_="grid"),
            ]
            for group, of_group in grids.items()
            if of_group
        ],
        element("p", _explained(missing, told), class_="quiet"),
        class_="plots",
    )


def _explained(missing: Sequence[str], told: Material) -> str:
    text = "Of several ranks the loss and the parts of a step are means, throughput is the sum, "
    text += "everything else the highest. "
    text += "Drag to zoom all plots, double-click to go back."
    if len(told.report["incidents"]) > MOST_SHADED:
        text += f" The first {MOST_SHADED} incidents are shaded; the timeline has them all."
    for many, what in ((told.report["checkpoints"], "snapshots"), (told.decisions, "actions")):
        text += f" Of {len(many):,} {what} the timeline shows {MOST_DRAWN}." if len(many) > MOST_DRAWN else ""
    return text + (f" Not recorded: {', '.join(missing)}." if missing else "")


def _box(figure: Figure) -> Html:
    counts = [f"{count:,} not finite" for count in figure.get("nonfinite", {}).values()]
    note = ", ".join([*([figure["unit"]] if len(figure.get("unit", "")) > 2 else []), *counts])
    return element(
        "figure",
        element("figcaption", figure["title"], element("span", note, class_="quiet") if note else None),
        element("div", id=f"plot-{figure['name']}", class_=f"plot {figure['name']}"),
        class_="whole" if figure.get("kind") == "bars" else None,
    )


def _data(drawn: Sequence[Figure], marks: Marks, series: Series) -> str:
    """JSON that ends no script element: `<` never stands in it as itself."""
    shapes = {
        "bands": [
            {
                "x": [band.first + 1, band.last + 1],
                "steps": [series.steps[band.first], series.steps[band.last]],
                "color": f"@{band.severity}",
            }
            for band in marks.bands[:MOST_SHADED]
        ],
        "turns": [{"x": turn.place + 0.5, "steps": turn.step_before, "words": turn.words} for turn in marks.turns],
    }
    text = dumps({"figures": drawn, **shapes})
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _asset(name: str) -> str:
    return resources.files("sentinel.postmortem").joinpath("page", name).read_text(encoding="utf-8")
