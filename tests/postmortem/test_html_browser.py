"""The page in a real browser: drawn whole, without a complaint and without asking the network, in every look."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sentinel.postmortem.html_page import material, page, plotly_script
from sentinel.postmortem.series import gather
from sentinel.store.history import History
from sentinel.store.timeline import segments
from tests.conftest import require_service
from tests.postmortem.browser import Browser, View
from tests.postmortem.pages import HOSTILE, full_run, hostile_run, long_run, nan_run, quiet_run
from tests.postmortem.test_diagnosis import row
from tests.store.building import RUN, rolled_back_run, url_in

pytestmark = pytest.mark.service

DRAWN = "document.documentElement.dataset.drawn"
PLOTS = "document.querySelectorAll('.plot svg.main-svg').length > 0 && document.querySelectorAll('.plot').length"
VIEWS = [View(width, dark) for width in (1280, 390) for dark in (False, True)]
GENERATION = {"attempt": 1, "generation": 0, "target_step": 0}
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(require_service("chromium")) as started:
        yield started


def page_in(folder: Path, build: Callable[[Path], object]) -> Path:
    """The file of a run that `build` puts into the folder's database."""
    store = build(folder)
    if store is not None:
        store.close()
    path = folder / "page.html"
    with History(url_in(folder)) as history:
        path.write_text(page(material(history, RUN), plotly_script()))
    return path


@pytest.mark.parametrize("build", [rolled_back_run, quiet_run, nan_run, full_run])
def test_every_look_is_drawn_without_a_complaint_or_a_request(
    browser: Browser, tmp_path: Path, build: Callable[[Path], object]
) -> None:
    path = page_in(tmp_path, build)
    papers = set()
    for view in VIEWS:
        browser.open(path, view)
        browser.until(DRAWN)
        assert browser.run(PLOTS) == int(browser.run(DRAWN)) >= 3
        assert browser.run("document.documentElement.scrollWidth") == view.width, "nothing is wider than the screen"
        papers.add((view.dark, browser.run("getComputedStyle(document.body).backgroundColor")))
        browser.screenshot(tmp_path / "seen.png")
        assert (tmp_path / "seen.png").read_bytes().startswith(PNG)
        assert browser.complaints == []
        assert browser.requests == []
    assert len(papers) == 2, "light and dark differ, and width does not matter"


def test_a_hostile_run_is_drawn_like_any_other(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_in(tmp_path, hostile_run), VIEWS[1])
    browser.until(DRAWN)
    assert browser.run(PLOTS) == int(browser.run(DRAWN))
    browser.run("Plotly.Fx.hover('plot-timeline', [{curveNumber: 1, pointNumber: 0}])")
    browser.until("document.querySelector('.hoverlayer .hovertext') !== null")
    assert "<script>alert(1)" in browser.run("document.querySelector('.hoverlayer .hovertext').textContent")
    assert browser.run("document.querySelectorAll('img, .hoverlayer a').length") == 0
    assert (browser.complaints, browser.requests) == ([], [])


def test_incidents_rollbacks_and_history_are_in_the_picture(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_in(tmp_path, rolled_back_run), VIEWS[0])
    browser.until(DRAWN)
    loss = "document.querySelector('#plot-loss"
    assert browser.run(f"{loss} .annotation-text').textContent") == "rollback to 4"
    assert browser.run(f"{loss}').layout.shapes.map(shape => shape.type).join()") == "rect,line"
    assert browser.run(f"{loss}').data.map(trace => trace.name).join()") == "loss, taken back,loss"


def test_the_axis_can_be_the_step_and_all_plots_zoom_together(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_in(tmp_path, rolled_back_run), VIEWS[0])
    browser.until(DRAWN)
    longest = "Math.max(...document.querySelector('#plot-loss').data.flatMap(trace => trace.x))"
    assert browser.run(longest) == 17
    browser.run("document.querySelector('[data-axis=step]').click()")
    assert browser.run(longest) == 13
    browser.run("Plotly.relayout('plot-loss', {'xaxis.range[0]': 3, 'xaxis.range[1]': 9}).then(() => true)")
    browser.until("document.querySelector('#plot-timeline').layout.xaxis.range.join() === '3,9'")
    assert browser.complaints == []


def test_heat_maps_and_stacks_are_drawn_and_by_step_without_what_was_taken_back(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(page_in(tmp_path, full_run), VIEWS[0])
    browser.until(DRAWN)
    heats = "['histogram', 'groups', 'waits', 'experts']"
    assert browser.run(f"{heats}.every(name => document.querySelector(`#plot-${{name}} .heatmaplayer image`))")
    parts = "document.querySelector('#plot-parts').data"
    assert browser.run(f"{parts}.map(trace => trace.name).join()") == (
        "data wait,forward,backward,communication wait,optimizer,other"
    )
    bars = "document.querySelectorAll('#plot-parts .barlayer .point').length"
    in_order = browser.run(bars)
    browser.run("document.querySelector('[data-axis=step]').click()")
    browser.until(f"{bars} < {in_order}")
    edges = "document.querySelector('#plot-groups').data[0].x"
    assert browser.run(f"{edges}.every((edge, number) => number === 0 || edge > {edges}[number - 1])")
    assert browser.complaints == []


def test_the_name_of_a_layer_group_is_text(browser: Browser, tmp_path: Path) -> None:
    told = long_run(50, set(), 20)
    rows = [row(step, sampled={"group_norms": {HOSTILE: 1.0, "<b>x</b>": 2.0}}) for step in range(1, 51)]
    path = tmp_path / "page.html"
    path.write_text(page(told._replace(series=gather(segments([GENERATION]), rows)), plotly_script()))
    browser.open(path, VIEWS[0])
    browser.until(DRAWN)
    assert "<b>x</b>" in browser.run("document.querySelector('#plot-groups .yaxislayer-above').textContent")
    browser.run("Plotly.Fx.hover('plot-groups', {xval: 10, yval: 0})")
    browser.until("document.querySelector('#plot-groups .hovertext') !== null")
    assert "<script>alert(1)" in browser.run("document.querySelector('#plot-groups .hovertext').textContent")
    assert (browser.complaints, browser.requests) == ([], [])


def test_a_change_of_the_colour_scheme_is_followed_at_once(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_in(tmp_path, quiet_run), View(1280, dark=False))
    browser.until(DRAWN)
    colour = "document.querySelector('#plot-loss').data[0].line.color"
    light = browser.run(colour)
    browser.look_as(View(1280, dark=True))
    browser.until(f"{colour} !== '{light}'")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 27)"


def test_a_page_that_asks_the_network_is_noticed(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><img src='http://sentinel.invalid/x.png'><script>console.error('oh')</script>")
    browser.open(path, VIEWS[0])
    assert browser.requests == ["http://sentinel.invalid/x.png"]
    assert any("oh" in complaint for complaint in browser.complaints)


def test_a_script_that_got_in_would_not_run(browser: Browser, tmp_path: Path) -> None:
    path = page_in(tmp_path, quiet_run)
    path.write_text(path.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>"))
    browser.open(path, VIEWS[0])
    browser.until(DRAWN)
    assert browser.run("document.title") == "gpt: postmortem"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_two_hundred_thousand_steps_are_drawn(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "long.html"
    path.write_text(page(long_run(200_000, bad={70_001}, spike=123_456), plotly_script()))
    browser.open(path, VIEWS[0])
    browser.until(DRAWN)
    assert browser.run("document.querySelectorAll('#plot-loss .scatterlayer path.js-line').length") >= 1
    assert browser.complaints == []
