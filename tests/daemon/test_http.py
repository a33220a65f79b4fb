"""Health, metrics, the page and the API, asked over a real socket."""

import http.client
import json
import shutil
import subprocess
import urllib.request

import pytest

from sentinel.store.strict_json import dumps
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until


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
    connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=10)
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


def test_a_disk_that_refuses_shows_in_ready_and_nothing_is_acknowledged_meanwhile(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        client = WireClient(daemon.places.socket, "locked")
        client.connect()
        client.start()
        client.all_stored()
        with _Locked(daemon):
            client.steps(1, 5)
            status, text = until(lambda: _unready(daemon), 30)
            assert status == 503
            assert "not ready" in text
            assert client.stored_seq == 1
        client.all_stored(30)
        assert until(lambda: ask(daemon, "/-/ready")[0] == 200)
        client.close()


def _unready(daemon: DaemonProcess) -> tuple[int, str] | None:
    status, text = ask(daemon, "/-/ready")
    return (status, text) if status != 200 else None


class _Locked:
    """Another process's write lock on the database, longer than the daemon's patience."""

    def __init__(self, daemon: DaemonProcess) -> None:
        import sqlite3

        self._connection = sqlite3.connect(daemon.places.database, isolation_level=None)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *error: object) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()
