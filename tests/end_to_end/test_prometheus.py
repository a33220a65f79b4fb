"""A real Prometheus scrapes a real run: what its queries say before, during and after a fault."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.conftest import require_service
from tests.daemon.daemon_process import DaemonProcess
from tests.end_to_end.prometheus_server import PrometheusServer
from tests.waiting import until

pytestmark = pytest.mark.service

RUN = '{run_id="patient"}'
ROOT = Path(__file__).parents[2]


class Seen(NamedTuple):
    """What was seen of one run, in the order in which it happened."""

    text: str  # of /metrics, in mid-run
    loss: list[dict[str, Any]]
    nonfinite_before: list[dict[str, Any]]
    incidents_before: list[dict[str, Any]]
    nonfinite_increase: float
    incidents_increase: float
    ended_at: float
    up: list[tuple[float, float]]  # samples of the scrape itself
    rank_up: list[tuple[float, float]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    program = require_service("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        DaemonProcess(folder / "home") as daemon,
        PrometheusServer(program, folder / "server", daemon.places.targets) as server,
    ):
        yield _watch(daemon, server, folder)


def test_promtool_finds_nothing_wrong_with_the_text(seen: Seen) -> None:
    checked = subprocess.run(
        [require_service("promtool"), "check", "metrics"],
        input=seen.text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "sentinel_loss{" in seen.text
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_query_returns_the_loss(seen: Seen) -> None:
    assert [series["metric"]["rank"] for series in seen.loss] == ["0"]
    assert 0.1 <= float(seen.loss[0]["value"][1]) < math.inf


def test_counters_are_zero_before_their_first_event(seen: Seen) -> None:
    assert {series["metric"]["what"] for series in seen.nonfinite_before} == {"loss", "gradient", "state", "other"}
    assert {series["metric"]["kind"] for series in seen.incidents_before} > {"nonfinite_gradient", "loss_spike"}
    events = [series for series in seen.nonfinite_before + seen.incidents_before if series["value"][1] != "0"]
    assert events == []


def test_the_first_event_is_an_increase(seen: Seen) -> None:
    assert seen.nonfinite_increase > 0
    assert seen.incidents_increase > 0


def test_series_of_an_ended_run_are_gone_within_two_scrapes(seen: Seen) -> None:
    scrapes = [when for when, _ in seen.up if when > seen.ended_at]
    shown = [when for when, _ in seen.rank_up if when > seen.ended_at]
    assert len(scrapes) >= 3
    assert len(shown) <= 1
    assert seen.rank_up[-1][1] == 0.0, "the rank was never shown as down"


def _watch(daemon: DaemonProcess, server: PrometheusServer, folder: Path) -> Seen:
    """One NaN gradient in an otherwise healthy run, and then its end."""
    training = subprocess.Popen(
        [sys.executable, "-m", "tests.end_to_end.patient_loop", str(folder)], env=daemon.environ, cwd=ROOT
    )
    try:
        until((folder / "steps").exists, 60.0, "the run trains")
        loss = until(lambda: server.query(f"sentinel_loss{RUN}"), 20.0, "Prometheus knows the loss")
        text = httpx.get(f"{daemon.url}/metrics", timeout=10.0).text
        before = server.query(f"sentinel_nonfinite_total{RUN}"), server.query(f"sentinel_incidents_total{RUN}")
        (folder / "break").touch()
        until((folder / "broken").exists, 20.0, "the fault fires")
        nonfinite = until(lambda: _increase(server, "sentinel_nonfinite_total"), 20.0, "the NaN is counted")
        incidents = until(lambda: _increase(server, "sentinel_incidents_total"), 20.0, "the incident is counted")
        (folder / "stop").touch()
        assert training.wait(30) == 0
        until(lambda: _status(daemon) == "completed", 20.0, "the run's end is stored")
        ended_at = time.time()
        until(lambda: len([1 for when, _ in server.samples("up") if when > ended_at]) >= 3, 20.0, "three scrapes")
        up, rank_up = server.samples("up"), server.samples(f"sentinel_rank_up{RUN}")
    finally:
        if training.poll() is None:
            training.kill()
            training.wait(10)
    return Seen(text, loss, *before, nonfinite, incidents, ended_at, up, rank_up)


def _increase(server: PrometheusServer, counter: str) -> float:
    found = server.query(f"sum(increase({counter}{RUN}[1m]))")
    return float(found[0]["value"][1]) if found else 0.0


def _status(daemon: DaemonProcess) -> str:
    runs = httpx.get(f"{daemon.url}/api/v1/runs", timeout=10.0).json()
    return str(runs[0]["status"])
