"""`sentinel demo --watch`: the live page and the metrics are there until Ctrl-C, and nothing is left behind."""

import json
import os
import signal
import threading
import urllib.request

import pytest

from sentinel.cli import main
from sentinel.demo import scenario, training
from sentinel.demo.scenario import Variant
from tests.demo.test_run import BOTH, PLAN
from tests.waiting import until


def test_watch_keeps_daemon_and_training_up_until_ctrl_c(tmp_path, monkeypatch, capsys):
    def played(plan, home, watch):
        with scenario._home(home):
            text = training.load_text(PLAN)
            saved = training.train(text, PLAN, BOTH, _unwatched, protected=True)
        return dict.fromkeys(Variant, saved)

    targets = tmp_path / "home" / "targets.json"
    going = threading.Event()
    seen = {}

    def again(_plan, home, watch, enough):
        going.set()
        whole(PLAN, home, watch, enough)

    def look_then_interrupt():
        try:
            assert going.wait(60)
            (group,) = json.loads(targets.read_text())
            url = f"http://{group['targets'][0]}"
            seen["page"] = until(lambda: _get(url) if "demo" in _get(url) else "", 30, "the page shows the new run")
            seen["metrics"] = until(
                lambda: found if "sentinel_loss{" in (found := _get(f"{url}/metrics")) else "", 30, "its loss"
            )
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    whole = scenario.again
    monkeypatch.setattr(scenario, "play", played)
    monkeypatch.setattr(scenario, "again", again)
    monkeypatch.setenv("SENTINEL_HTTP__PORT", "0")
    before = signal.getsignal(signal.SIGINT)
    visitor = threading.Thread(target=look_then_interrupt)
    visitor.start()
    code = main(["demo", "--out", str(tmp_path), "--watch"])
    visitor.join(10)
    shown = capsys.readouterr().out
    assert code == 1, "the made-up runs are all alike, so the promise that unprotected ones break is not kept"
    assert "prefers-color-scheme" in seen["page"]
    assert "sentinel_loss{" in seen["metrics"]
    assert "live until Ctrl-C" in shown
    assert signal.getsignal(signal.SIGINT) == before
    assert not targets.exists(), "the daemon has left"
    assert main(["runs", "--json", "--home", str(tmp_path / "home")]) == 0
    assert {run["status"] for run in json.loads(capsys.readouterr().out)} == {"completed"}


def test_watch_and_json_exclude_each_other(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--watch", "--json"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_the_end_tells_how_to_see_all_of_it_and_a_page_lies_beside_the_home(tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")

    def played(plan, home, watch):
        with scenario._home(home):
            saved = training.train(training.load_text(PLAN), PLAN, BOTH, _unwatched, protected=True)
        return dict.fromkeys(Variant, saved)

    monkeypatch.setattr(scenario, "play", played)
    main(["demo", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    for part in ("postmortem.html", "sentinel export", "sentinel demo --watch", "sentinel dashboards render"):
        assert part in shown
    assert "Loss spike" in (tmp_path / "postmortem.html").read_text()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def _unwatched(step: int, loss: float) -> None:
    """Nobody looks at the progress."""
