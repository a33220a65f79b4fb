"""Alerts are written with their incident, once each, and leave in order."""

import pytest

from sentinel.alert_settings import NotifySettings, RouteSettings
from sentinel.daemon.announcing import Announcer
from sentinel.notify import alert as alerts
from sentinel.store import outbox
from sentinel.store.database import Store
from sentinel.vocabulary import AlertChannel, AlertState, IncidentStatus, Kind, Severity
from tests.store.building import RUN, hello, incident

OPEN = {"status": IncidentStatus.OPEN, "resolved_at": None, "cause": ""}
WEBHOOK, SLACK = AlertChannel.WEBHOOK, AlertChannel.SLACK


class Bench:
    """A store whose incidents are announced."""

    def __init__(self, url, settings=NotifySettings(), channels=(WEBHOOK,)):  # noqa: B008 - immutable
        self.filed = 0
        self.store = Store.open(url)
        self.store.register_rank(hello(), "box", 0.0)
        self.store.on_incident = Announcer(settings, frozenset(channels), self._count).announce

    def _count(self):
        self.filed += 1

    def save(self, **changes):
        self.store.save_incident(incident(**changes))

    def rows(self, incident_id="i1"):
        return self.store.run(lambda connection: outbox.filed(connection, RUN, incident_id))

    def due(self, channel=WEBHOOK):
        return self.store.run(lambda connection: outbox.due(connection, channel))

    def claim(self, known, next_at=0.0):
        return self.store.run(lambda connection: outbox.claim(connection, known, next_at))

    def settle(self, alert_id, state, due_at=None):
        self.store.run(lambda connection: outbox.settle(connection, alert_id, state, "because", due_at))


@pytest.fixture
def bench(url):
    made = Bench(url)
    yield made
    made.store.close()


def stages(rows):
    return [row["id"].removeprefix("i1-") for row in rows]


def test_an_incident_is_announced_when_it_opens_grows_worse_and_ends_and_no_more_often(bench):
    for _ in range(3):
        bench.save(severity=Severity.WARNING, **OPEN)
    for step in (9, 10):
        bench.save(last_step=step, **OPEN)
    bench.save()
    bench.save()
    assert stages(bench.rows()) == ["firing-warning-webhook", "firing-critical-webhook", "resolved-webhook"]
    assert bench.filed == 3


def test_an_incident_first_seen_when_it_is_over_is_announced_all_the_same(bench):
    bench.save()
    assert stages(bench.rows()) == ["firing-critical-webhook", "resolved-webhook"]


def test_nobody_hears_of_the_end_of_what_was_never_announced(bench):
    bench.save(severity=Severity.INFO, **OPEN)
    bench.save(severity=Severity.INFO)
    assert bench.rows() == []


def test_an_end_reaches_who_heard_of_the_beginning_whatever_the_routes_say_now(url):
    settings = NotifySettings(route=(RouteSettings("slack", kinds=("nonfinite_gradient",)), RouteSettings("webhook")))
    bench = Bench(url, settings, (WEBHOOK, SLACK))
    bench.save(kind=Kind.NONFINITE_GRADIENT, **OPEN)
    bench.save(kind=Kind.NONFINITE_LOSS)  # the same incident, by another name
    assert sorted(stages(bench.rows())) == [
        "firing-critical-slack",
        "firing-critical-webhook",
        "resolved-slack",
        "resolved-webhook",
    ]
    last = alerts.decode(bench.rows()[-1]["body"])
    assert [face.kind for face in last.earlier] == [Kind.NONFINITE_GRADIENT]
    bench.store.close()


def test_alerts_of_a_transaction_that_failed_are_gone_with_its_incident(bench):
    def spoil(_connection):
        bench.save(**OPEN)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.store.run(spoil)
    assert bench.filed == 1
    assert bench.rows() == []


def test_an_alert_that_cannot_be_made_costs_no_incident(bench, monkeypatch):
    def refuse(_alert):
        raise ValueError("surrogates not allowed")

    monkeypatch.setattr(alerts, "encode", refuse)
    bench.save(**OPEN)
    assert bench.rows() == []
    monkeypatch.undo()
    bench.save(**OPEN)
    assert stages(bench.rows()) == ["firing-critical-webhook"]


def test_order_holds_when_the_clock_is_set_back(bench, monkeypatch):
    bench.save(**OPEN)
    monkeypatch.setattr("sentinel.daemon.announcing.time.time", lambda: 5.0)
    bench.save()
    assert [one.id for one in bench.due()] == ["i1-firing-critical-webhook", "i1-resolved-webhook"]


def test_one_alert_is_claimed_by_one_sender(bench):
    bench.save(**OPEN)
    (known,) = bench.due()
    assert bench.claim(known) is not None
    assert bench.claim(known) is None
    (again,) = bench.due()
    assert again.tries == 1


def test_what_was_sent_or_given_up_is_not_due(bench):
    bench.save()
    bench.settle("i1-firing-critical-webhook", AlertState.SENT)
    (rest,) = bench.due()
    assert bench.claim(rest).delivered_before
    bench.settle(rest.id, AlertState.FAILED)
    assert bench.due() == []


def test_only_what_was_tried_in_vain_is_given_up_for_its_age(bench):
    bench.save(**OPEN)

    def give_up(connection):
        return outbox.give_up_older(connection, WEBHOOK, float("1e12"), "too old")

    assert bench.store.run(give_up) == 0
    bench.claim(bench.due()[0])
    assert bench.store.run(give_up) == 1
    assert [(row["state"], row["reason"]) for row in bench.rows()] == [("failed", "too old")]
