"""A real Prometheus scrapes a real run: every panel's query returns data, and so does all that the rules look at."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require_service
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.dashboards import expressions
from tests.end_to_end.prometheus_server import PrometheusServer
from tests.waiting import until

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[2]
ASKED = expressions.of_dashboards()
SELECTORS = sorted({one for asked in expressions.of_rules() for one in expressions.plain_selectors(asked.expr)})
# A loop on the CPU without a gradient scaler has no such signals; a rank that speaks the wire protocol says them.
OF_A_GPU = {"Device memory", "Loss scale"}
MIB = 1 << 20

Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """By expression, what a Prometheus says that has seen a fault in the run; empty is what stayed empty."""
    program = require_service("prometheus")
    folder = tmp_path_factory.mktemp("dashboards")
    with (
        DaemonProcess(folder / "home") as daemon,
        PrometheusServer(program, folder / "server", daemon.places.targets) as server,
        WireClient(daemon.places.socket, "gpu-run") as gpu_rank,
    ):
        _start_gpu_rank(gpu_rank)
        training = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.patient_loop", str(folder)], env=daemon.environ, cwd=ROOT
        )
        try:
            until((folder / "steps").exists, 60.0, "the run trains")
            until(lambda: server.query('sentinel_loss{run_id="patient"}'), 20.0, "Prometheus knows the loss")
            (folder / "break").touch()
            until((folder / "broken").exists, 20.0, "the fault fires")
            yield _ask_all(server)
        finally:
            (folder / "stop").touch()
            _end(training)


def test_the_fault_is_in_the_numbers(answers: Answers) -> None:
    (rule,) = [asked for asked in expressions.of_rules() if asked.place == "SentinelNonfinite"]
    assert {series["metric"]["what"] for series in answers[_sent(rule)]} == {"gradient"}


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked.page}:{asked.place}")
def test_a_query_returns_data(asked: expressions.Asked, answers: Answers) -> None:
    assert answers[_sent(asked)], _sent(asked)


@pytest.mark.parametrize("selector", SELECTORS)
def test_what_a_rule_looks_at_is_there(selector: str, answers: Answers) -> None:
    assert answers[selector], selector


def test_a_run_that_does_not_exist_has_no_data(answers: Answers) -> None:
    """So that data in the other tests means that the query found the run."""
    (asked,) = [one for one in ASKED if one.place == "Loss" and one.expr.startswith("sentinel_loss")]
    assert answers[expressions.filled(asked.expr, "nobody")] == []


def _ask_all(server: PrometheusServer) -> Answers:
    (nonfinite,) = [asked for asked in expressions.of_rules() if asked.place == "SentinelNonfinite"]
    wanted = [*map(_sent, ASKED), _sent(nonfinite), *SELECTORS]
    found: Answers = {}
    deadline = threading.Event()
    timer = threading.Timer(40.0, deadline.set)
    timer.start()
    while not deadline.is_set() and len(found) < len(set(wanted)):
        found |= {query: answer for query in wanted if query not in found and (answer := server.query(query))}
        deadline.wait(0.5)
    timer.cancel()
    nobody = [expressions.filled(asked.expr, "nobody") for asked in ASKED]
    return {query: found.get(query, []) for query in wanted} | {query: server.query(query) for query in nobody}


def _sent(asked: expressions.Asked) -> str:
    return expressions.filled(asked.expr, "gpu-run" if asked.place in OF_A_GPU else "patient")


def _start_gpu_rank(rank: WireClient) -> None:
    rank.start(devices=["GPU-0"])
    memory = {"memory_allocated_bytes": 10 * MIB, "memory_reserved_bytes": 20 * MIB, "memory_peak_bytes": 15 * MIB}
    rank.steps(1, 5, loss_scale=65536.0, **memory)
    rank.all_stored()


def _end(training: subprocess.Popen[bytes]) -> None:
    try:
        training.wait(30)
    except subprocess.TimeoutExpired:
        training.kill()
        training.wait(10)
