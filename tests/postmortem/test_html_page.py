"""The page is one file that needs nothing else, tells what the report tells, and believes nothing that a run says."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sentinel.cli import main
from sentinel.postmortem.html_page import material, page, write
from sentinel.records import Trouble
from sentinel.store.history import History
from sentinel.store.rows import STEP_COLUMNS
from tests.postmortem.pages import HOSTILE, crowded_run, failing_run, hostile_run, long_run, nan_run, quiet_run
from tests.store.building import RUN, START, entries, hello, rolled_back_run, url_in

MOST_BYTES = 6 * 2**20
PLOTLY = "/* plotly.js */"


class Found(HTMLParser):
    """Every element, and all text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.blocks: list[str] = []
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in {"script", "style"}:
            self.blocks.append(data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict:
        return json.loads(next(block for block in self.blocks if block.startswith('{"figures"')))


def page_of(folder: Path) -> str:
    with History(url_in(folder)) as history:
        return page(material(history, RUN), PLOTLY)


def test_it_tells_what_happened_what_was_done_and_what_it_cost(tmp_path: Path) -> None:
    rolled_back_run(tmp_path).close()
    text = Found(page_of(tmp_path)).text
    for part in (
        "The run completed 13 steps. Sentinel found 1 incident and acted on it; all ended well. 74% of the time",
        "Loss spike at step 7 (it began at 6): the run was rolled back to step 4, skipping 3 batches",
        "the loss jumped to 9.1",
        "4 steps taken back (2.00 s), 0.25 s of turns",
        "poisoned data",
        "pause was refused",
        "74.3%: 6.50 s in steps that count, 2.25 s in steps taken back",
        "balances",
        f"sentinel postmortem {RUN}",
        "Not recorded: gradient norm, learning rate, device memory, host memory.",
    ):
        assert part in text


def test_generations_are_told_apart_and_history_is_grey(tmp_path: Path) -> None:
    rolled_back_run(tmp_path).close()
    data = Found(page_of(tmp_path)).data
    timeline, loss, *_ = data["figures"]
    assert timeline["lanes"] == ["generation 0", "generation 1", "incidents", "actions", "snapshots"]
    history, live = loss["traces"]
    assert (history["color"], live["color"]) == ("@history", "@loss")
    assert history["steps"] == [4, 5, 6, 7, 8]
    assert live["steps"] == [1, 2, 3, 4, None, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert live["x"] == [1, 2, 3, 4, None, *range(9, 18)]
    assert data["turns"] == [{"x": 8.5, "steps": 8, "words": "rollback to 4"}]
    assert data["bands"][0]["steps"] == [6, 8]


def test_nothing_is_fetched_and_no_script_runs_but_the_two_that_are_ours(tmp_path: Path) -> None:
    rolled_back_run(tmp_path).close()
    found = Found(page_of(tmp_path))
    for tag, given in found.elements:
        assert tag not in {"iframe", "object", "embed", "img", "base", "form"}
        assert not [name for name in given if name.startswith("on")], tag
        addresses = [given[name] for name in ("src", "href", "srcset", "action") if given.get(name)]
        assert all(address.startswith(("data:", "#")) for address in addresses), addresses
    scripts = [given for tag, given in found.elements if tag == "script"]
    assert [given.get("type") for given in scripts] == ["application/json", None, None]
    (policy,) = [given["content"] for _, given in found.elements if given.get("http-equiv")]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_what_a_run_says_is_text_wherever_it_stands(tmp_path: Path) -> None:
    hostile_run(tmp_path)
    whole = page_of(tmp_path)
    found = Found(whole)
    assert HOSTILE not in whole
    assert found.text.count("alert(1)") >= 5, "name, argument, configuration, incident and trouble are all shown"
    assert [tag for tag, _ in found.elements].count("script") == 3
    assert not [given for tag, given in found.elements if tag in {"img", "svg"}]
    assert found.data["figures"], "the data block is still JSON"


def test_what_looks_like_a_secret_stays_behind(tmp_path: Path) -> None:
    hostile_run(tmp_path)
    whole = page_of(tmp_path)
    assert "hunter2" not in whole
    assert "--api-key" in whole
    assert "wandb.token" in whole
    assert "4711" in whole, "max_tokens is no secret"


def test_two_hundred_thousand_steps_fit_and_no_incident_is_lost(tmp_path: Path) -> None:
    plotly = pytest.importorskip("plotly.offline").get_plotlyjs()
    told = long_run(200_000, bad={5, 70_001, 70_002, 199_990}, spike=123_456)
    text = page(told, plotly)
    assert len(text.encode()) <= MOST_BYTES
    data = Found(text.replace(plotly, "")).data
    loss = next(figure for figure in data["figures"] if figure["name"] == "loss")
    assert loss["nonfinite"] == {"loss": 4}
    marked = [step for step in loss["traces"][-1]["steps"] if step is not None]
    assert marked == [5, 70_001, 70_002, 199_990]
    live = loss["traces"][0]
    assert len(live["x"]) < 5000
    at = live["steps"].index(123_456)
    assert live["y"][at] == 50.0
    assert live["steps"][at - 5 : at + 6] == list(range(123_451, 123_462)), "around an incident every step is drawn"


def test_hundreds_of_incidents_and_every_signal_fit_too(tmp_path: Path) -> None:
    plotly = pytest.importorskip("plotly.offline").get_plotlyjs()
    text = page(crowded_run(60_000, incidents=400, snapshots=3000), plotly)
    assert len(text.encode()) <= MOST_BYTES
    found = Found(text.replace(plotly, ""))
    timeline = found.data["figures"][0]
    (incidents,) = [trace for trace in timeline["traces"] if trace["name"] == "critical"]
    assert len([step for step in incidents["steps"] if step is not None]) == 2 * 400
    assert "The first 150 incidents are shaded" in found.text
    assert "Of 3,000 snapshots the timeline shows 400" in found.text
    assert "340 more are in sentinel postmortem --json" in found.text
    (drawn,) = [trace for trace in timeline["traces"] if trace["name"] == "snapshots"]
    assert drawn["colors"].count("@bad") == 3, "what matters is drawn first"


def test_a_run_without_incidents_says_so(tmp_path: Path) -> None:
    quiet_run(tmp_path)
    found = Found(page_of(tmp_path))
    assert "Nothing wrong was found in 60 steps." in found.text
    assert ("p", {"class": "verdict good"}) in found.elements
    assert found.data["bands"] == found.data["turns"] == []


def test_a_run_of_nothing_but_nan_marks_every_step(tmp_path: Path) -> None:
    nan_run(tmp_path)
    found = Found(page_of(tmp_path))
    assert "60 not finite" in found.text
    assert "Its last loss is not finite. Sentinel found 1 incident and took no action." in found.text
    assert ("p", {"class": "verdict critical"}) in found.elements
    loss = next(figure for figure in found.data["figures"] if figure["name"] == "loss")
    assert [trace["name"] for trace in loss["traces"]] == ["loss", "not finite"]
    assert loss["traces"][-1]["text"][0] == "loss is NaN at steps 1 to 60, 60 of them"
    assert set(loss["traces"][0]["y"]) == {None}


def test_a_failed_run_says_what_ended_it(tmp_path: Path) -> None:
    failing_run(tmp_path)
    found = Found(page_of(tmp_path))
    assert "RuntimeError: the disk is full" in found.text
    assert ("p", {"class": "verdict critical"}) in found.elements


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    from sentinel.store.database import Store

    store = Store.open(url_in(tmp_path))
    store.register_rank(hello(), "box", START)
    store.close()
    assert "No step was recorded yet" in Found(page_of(tmp_path)).text


def test_troubles_of_sentinel_itself_are_told(tmp_path: Path) -> None:
    store = rolled_back_run(tmp_path)
    store.write(entries(Trouble(22, START + 41, 13, "probe", "the memory probe failed")), critical=False)
    store.close()
    assert "the memory probe failed" in Found(page_of(tmp_path)).text


def test_the_command_writes_the_page_whole_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    rolled_back_run(tmp_path).close()
    out = tmp_path / "page.html"
    assert main(["postmortem", "--html", str(out), "--home", str(tmp_path)]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_text().endswith("</html>\n")
    assert main(["postmortem", "--html", str(out), "--json", "--home", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["run_id"] == RUN
    assert main(["postmortem", "--html", str(tmp_path / "nowhere" / "page.html"), "--home", str(tmp_path)]) == 1
    assert "name a file in a folder of yours" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("*html*")) == ["page.html"], "no draft is left"


def test_without_plotly_the_error_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled_back_run(tmp_path).close()
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["postmortem", "--html", str(tmp_path / "page.html"), "--home", str(tmp_path)]) == 1
    assert "pip install 'train-sentinel[report]'" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_the_text_needs_no_plotly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled_back_run(tmp_path).close()
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["postmortem", "--home", str(tmp_path)]) == 0
    assert "rolled back" in capsys.readouterr().out


def test_every_signal_that_is_plotted_is_a_column_of_the_steps() -> None:
    from sentinel.postmortem.html_charts import CHARTS
    from sentinel.postmortem.machine import MACHINE
    from sentinel.postmortem.series import SIGNALS
    from sentinel.postmortem.together import DERIVED

    assert set(SIGNALS) <= set(STEP_COLUMNS)
    assert {line.signal for chart in CHARTS for line in chart.lines} <= {*SIGNALS, *DERIVED, *MACHINE}


def test_writing_twice_gives_the_same_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    rolled_back_run(tmp_path).close()
    with History(url_in(tmp_path)) as history:
        for name in ("one.html", "two.html"):
            write(history, RUN, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
