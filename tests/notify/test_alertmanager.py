"""A real Alertmanager is told that an incident fires and that it has ended, and passes both on."""

import asyncio
import math
import time

import pytest

from sentinel.notify import alert as alerts
from sentinel.notify.alertmanager import Alertmanager
from sentinel.notify.channel import Delivery
from sentinel.notify.sending import Sender
from sentinel.vocabulary import AlertChannel, AlertCondition, AlertOutcome, IncidentStatus, Severity
from tests.conftest import require_service
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.notify.alertmanager_server import AlertmanagerServer
from tests.notify.receiver import Receiver
from tests.store.building import incident
from tests.waiting import until

pytestmark = pytest.mark.service


@pytest.fixture
def receiver():
    with Receiver() as made:
        yield made


@pytest.fixture
def server(tmp_path, receiver):
    program = require_service("prometheus-alertmanager")
    with AlertmanagerServer(program, tmp_path / "alertmanager", receiver.url) as made:
        yield made


def passed_on(receiver, status):
    """The labels of what Alertmanager told its receiver."""
    return [one["labels"] for each in receiver.received for one in each.json["alerts"] if one["status"] == status]


def test_an_incident_of_a_run_fires_and_is_resolved(tmp_path, server, receiver):
    with DaemonProcess(tmp_path / "home", SENTINEL_NOTIFY__ALERTMANAGER__URL=server.url) as daemon:
        with WireClient(daemon.places.socket, "am-run") as client:
            client.start()
            client.steps(1, 3)
            client.step(4, loss=math.nan)
            client.all_stored()
            (firing,) = until(server.active)
            assert firing["labels"]["alertname"] == "nonfinite_loss"
            assert (firing["labels"]["run_id"], firing["labels"]["rank"]) == ("am-run", "0")
            assert firing["status"]["state"] == "active"
            until(lambda: passed_on(receiver, "firing"))
            client.end(4)
            client.all_stored()
        until(lambda: server.active() == [])
        until(lambda: passed_on(receiver, "resolved"))
    assert passed_on(receiver, "resolved")[0] == passed_on(receiver, "firing")[0] == firing["labels"]


def send(server, alert) -> Delivery:
    async def once() -> Delivery:
        async with Sender() as sender:
            return await sender.attempt(Alertmanager(server.url).request(alert, time.time()), 10.0)

    return asyncio.run(once())


def test_a_severity_that_rose_leaves_one_alert_and_the_end_leaves_none(server):
    now = time.time()
    milder = incident(
        severity=Severity.WARNING, status=IncidentStatus.OPEN, opened_at=now - 5, resolved_at=None, evidence={}
    )
    worse = incident(status=IncidentStatus.OPEN, opened_at=now - 5, resolved_at=None, evidence={})
    over = incident(opened_at=now - 5, resolved_at=now, evidence={})
    faces, shown = (), []
    for seen in (milder, worse, over):
        condition = AlertCondition.FIRING if seen.resolved_at is None else AlertCondition.RESOLVED
        alert = alerts.of_incident(seen, condition, AlertChannel.ALERTMANAGER, evidence={}, earlier=faces)
        assert send(server, alert).outcome is AlertOutcome.SENT
        faces = (*faces, alert.face)
        shown.append([one["labels"]["severity"] for one in server.active()])
    assert shown == [["warning"], ["critical"], []]
