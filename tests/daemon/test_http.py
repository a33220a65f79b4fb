"""Health, metrics, the page and the API, asked over a real socket."""

import asyncio
import http.client
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from sentinel.config import HttpSettings
from sentinel.daemon.core import Core
from sentinel.daemon.dispatcher import Dispatcher
from sentinel.daemon.http import Http, Seen
from sentinel.daemon.metrics import Metrics
from sentinel.daemon.rank import Fleet
from sentinel.daemon.writer import Writer
from sentinel.store.database import Store
from sentinel.store.strict_json import dumps
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with DaemonProcess(tmp_path_factory.mktemp("http") / "home") as running:
        client = WireClient(running.places.socket, "seen<b>")
        client.connect()
        client.start()
        client.steps(1, 5)
        client.step(6, loss=float("nan"), reported={"accuracy": float("inf")})
        client.all_stored()
        yield running
        client.close()


def ask(daemon: DaemonProcess, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    return _get(daemon.url.removeprefix("http://"), path, method, **headers)


def _get(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def test_it_is_healthy_and_ready(daemon):
    assert ask(daemon, "/-/healthy") == (200, "alive\n")
    assert ask(daemon, "/-/ready") == (200, "ready\n")


def test_metrics_name_the_run(daemon):
    status, text = ask(daemon, "/metrics")
    assert status == 200
    assert (
        'sentinel_step{rank="0",run_id="seen<b>"} 6.0' in text
        or 'sentinel_step{run_id="seen<b>",rank="0"} 6.0' in text
    )
    assert "sentinel_build_info" in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics_of_a_real_daemon(daemon):
    _, text = ask(daemon, "/metrics")
    done = subprocess.run(["promtool", "check", "metrics"], input=text.encode(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_page_shows_live_runs_escaped_and_fetches_nothing(daemon):
    status, text = ask(daemon, "/")
    assert status == 200
    assert "name-of-seen&lt;b&gt;" in text
    assert "seen<b>" not in text
    assert "src=" not in text
    assert "http://" not in text


def test_the_api_is_strict_json(daemon):
    status, text = ask(daemon, "/api/v1/runs")
    assert status == 200
    assert [run["run_id"] for run in _strict(text)] == ["seen<b>"]
    status, text = ask(daemon, "/api/v1/runs/latest")
    assert status == 200
    assert _strict(text)["conservation"][0]["produced"] == 7


def _strict(text: str):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    assert json.loads(dumps(found)) == found
    return found


def test_what_does_not_exist_is_said_in_json(daemon):
    status, text = ask(daemon, "/api/v1/runs/nothing")
    assert status == 404
    assert "no run has the id" in json.loads(text)["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed_over_http(daemon, method):
    assert ask(daemon, "/api/v1/runs", method)[0] == 405


def test_head_is_answered(daemon):
    assert ask(daemon, "/-/healthy", "HEAD") == (200, "")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:1", 200),
        ("[::1]:5", 200),
        ("127.0.0.1", 200),
    ],
)
def test_a_foreign_host_name_is_refused(daemon, host, status):
    assert ask(daemon, "/-/healthy", Host=host)[0] == status


def test_it_listens_on_loopback_only(daemon):
    assert daemon.url.startswith("http://127.0.0.1:")


def test_prometheus_is_told_where_to_scrape(daemon):
    groups = json.loads(daemon.places.targets.read_text())
    (target,) = groups[0]["targets"]
    with urllib.request.urlopen(f"http://{target}/-/ready", timeout=5) as reply:
        assert reply.status == 200


def test_it_is_not_ready_while_the_database_takes_nothing(tmp_path):
    assert asyncio.run(_ask_unready(tmp_path)) == (503, "not ready: disk full\n")


async def _ask_unready(home: Path) -> tuple[int, str]:
    fleet, metrics = Fleet(), Metrics()
    dispatcher = Dispatcher(Core(fleet, Writer(_no_store, 0.05, dict), metrics))
    served = Http(
        HttpSettings(port=0), Seen(fleet, metrics, dispatcher, f"sqlite:///{home}/none.db", lambda: "disk full")
    )
    await served.start()
    try:
        return await asyncio.to_thread(_get, served.address, "/-/ready")
    finally:
        await served.close()


def _no_store() -> Store:
    raise AssertionError("HTTP never writes")
