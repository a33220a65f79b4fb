"""A real Prometheus scrapes a real run: every panel's query returns data, and so does all that the rules look at.

What only a machine with GPUs, RDMA and a control group tells comes from a second target.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.sample import HISTOGRAM_EDGES, Sample
from tests.conftest import require_service
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.dashboards import expressions
from tests.dashboards.machine_target import machine_target
from tests.end_to_end.prometheus_server import PrometheusServer
from tests.waiting import until

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[2]
ASKED = expressions.of_dashboards()
SELECTORS = sorted({one for asked in expressions.of_rules() for one in expressions.plain_selectors(asked.expr)})
# A loop on one CPU without a scaler, a scheduler, a clip and experts has no such signals; ranks that speak the wire
# protocol say them.
OF_RANKS = {
    *("Device memory", "Loss scale", "Scheduler's lead", "Waiting for other ranks", "How waiting is measured"),
    *("Tokens", "Samples", "Model FLOPs utilisation", "Expert imbalance", "Expert load", "Gradient values"),
    *("Gradient norm by layer group", "Update to weight", "Clipped", "Gradient values that are 0"),
    *("Parameters without a gradient", "Gradient noise scale"),
}
MIB = 1 << 20

Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """By expression, what a Prometheus says that has seen a fault in the run; empty is what stayed empty."""
    program = require_service("prometheus")
    folder = tmp_path_factory.mktemp("dashboards")
    with (
        DaemonProcess(folder / "home") as daemon,
        machine_target(folder / "machine", daemon.places.home / "targets-machine.json"),
        PrometheusServer(program, folder / "server", daemon.places.home / "targets*.json") as server,
        WireClient(daemon.places.socket, "ranks", 0, world_size=2) as first,
        WireClient(daemon.places.socket, "ranks", 1, world_size=2) as second,
    ):
        _say_everything(first, second)
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


def test_the_late_rank_waits_least(answers: Answers) -> None:
    (asked,) = [one for one in ASKED if one.place == "Waiting for other ranks"]
    waited = {series["metric"]["rank"]: float(series["value"][1]) for series in answers[_sent(asked)]}
    assert waited == {"0": 0.05, "1": 0.0}


def test_a_machine_shows_its_gpus_by_instance(answers: Answers) -> None:
    (asked,) = [one for one in ASKED if one.place == "GPU temperature"]
    shown = answers[_sent(asked)]
    assert {series["metric"]["gpu"]: series["value"][1] for series in shown} == {"GPU-a": "71", "GPU-b": "71"}
    (disk,) = [one for one in ASKED if one.place == "Disk free"]
    of_daemon = {series["metric"]["instance"] for series in answers[_sent(disk)]}
    assert of_daemon.isdisjoint({series["metric"]["instance"] for series in shown}), (
        "another machine than the daemon's"
    )


def test_parts_of_a_real_loop_add_up_to_its_step(answers: Answers) -> None:
    (asked,) = [one for one in ASKED if one.place == "Parts of a step"]
    parts = {series["metric"]["part"]: float(series["value"][1]) for series in answers[_sent(asked)]}
    assert parts.keys() >= {"backward", "optimizer", "other"}
    assert 0.02 <= sum(parts.values()) < 5.0, "the loop waits 0.02 s in every step"


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
    return expressions.filled(asked.expr, "ranks" if asked.place in OF_RANKS else "patient")


def _say_everything(*ranks: WireClient) -> None:
    memory = {"memory_allocated_bytes": 10 * MIB, "memory_reserved_bytes": 20 * MIB, "memory_peak_bytes": 15 * MIB}
    times = {"forward_seconds": 0.02, "backward_seconds": 0.06, "optimizer_seconds": 0.01, "data_wait_seconds": 0.001}
    counts = {"tokens": 100.0, "samples": 4.0, "mfu_ratio": 0.4, "scheduler_steps": 9, "gradients_absent": 1}
    sample = Sample(
        group_norms={"embed": 0.5, "layers.0": 2.0},
        histogram=[len(HISTOGRAM_EDGES), *range(len(HISTOGRAM_EDGES))],
        zeros=7,
        update_norm=0.01,
        weight_norm=2.0,
        local_grad_norm=1.2,
        expert_load={"layers.0.gate": [0.75, 0.25]},
    )
    for rank in ranks:
        rank.start(devices=[f"GPU-{rank.rank}"])
    for step in range(1, 13):
        for rank in ranks:
            # The second rank is the late one: it waits for nobody.
            waited = {"communication_wait_seconds": 0.05 * (1 - rank.rank), "communication_source": "ddp"}
            said = {**memory, **times, **counts, **waited}
            rank.step(step, loss_scale=65536.0, clip_fraction=0.2, sampled=sample, **said)
            rank.all_stored()


def _end(training: subprocess.Popen[bytes]) -> None:
    try:
        training.wait(30)
    except subprocess.TimeoutExpired:
        training.kill()
        training.wait(10)
