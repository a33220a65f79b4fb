"""From a message to everything that follows from it, on a real database; only the rank's link is a list."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.config import Settings
from sentinel.daemon import judging
from sentinel.daemon.core import Core
from sentinel.daemon.departures import Departures
from sentinel.daemon.dispatcher import Dispatcher
from sentinel.daemon.judging import Judging
from sentinel.daemon.metrics import Metrics
from sentinel.daemon.pipeline import Pipeline
from sentinel.daemon.rank import Fleet, Rank
from sentinel.daemon.series import RankSeries
from sentinel.daemon.writer import Writer
from sentinel.errors import TemporaryError
from sentinel.places import Places
from sentinel.records import Command, FromDaemon, Reflex
from sentinel.store.database import Store
from sentinel.store.history import History
from sentinel.vocabulary import Action, Kind, Outcome
from tests.daemon.wire_client import WireClient

NAN = float("nan")


class ListLink:
    """A link that keeps what it was told."""

    def __init__(self) -> None:
        self.sent: list[FromDaemon] = []

    def send(self, message: FromDaemon) -> None:
        self.sent.append(message)

    def close(self, reason: str) -> None:
        self.sent.clear()


class NoCommands(Store):
    """A store whose disk is full exactly when a command is to be written down."""

    refused = 0

    def save_command(self, *arguments: Any) -> None:
        self.refused += 1
        raise TemporaryError("disk full")


class Bench:
    """A daemon without sockets."""

    def __init__(self, folder: Path, kind: type[Store] = Store) -> None:
        self.url = f"sqlite:///{folder}/s.db"
        self.fleet, self.metrics = Fleet(), Metrics()
        self.writer = Writer(self._open, 0.01, lambda stored: None)
        core = Core(self.fleet, self.writer, self.metrics)
        self.dispatcher = Dispatcher(core)
        self.pipeline = Pipeline(core, self.dispatcher, Judging(core, self.dispatcher, Settings()))
        places = Places(folder, folder)
        self.departures = Departures(core, self.dispatcher, self.pipeline, places)
        self.client = WireClient(folder / "none")
        self.client.say = self._feed  # what a client says goes straight into the pipeline
        self.link = ListLink()
        self.rank: Rank | None = None
        self.store: Store | None = None
        self._kind = kind

    def _open(self) -> Store:
        self.store = self._kind.open(self.url)
        return self.store

    def _feed(self, message: Any) -> Any:
        assert self.rank is not None
        self.pipeline.handle(self.rank, message)
        return message

    async def arrive(self) -> None:
        self.rank = await self.departures.register(self.client.hello())
        self.rank.link = self.link

    @property
    def history(self) -> History:
        return History(self.url)

    def sent(self, kind: type) -> list:
        return [message for message in self.link.sent if isinstance(message, kind)]


def on(folder: Path, body: Callable[[Bench], Awaitable[None]], kind: type[Store] = Store) -> Bench:
    async def run() -> Bench:
        bench = Bench(folder, kind)
        await bench.writer.start()
        await bench.arrive()
        await body(bench)
        await bench.dispatcher.close()
        assert await bench.writer.close(10)
        return bench

    return asyncio.run(run())


def test_a_reflex_is_an_incident_with_the_action_that_was_taken(tmp_path):
    async def body(bench: Bench) -> None:
        bench.client.start()
        bench.client.steps(1, 5)
        bench.client.say(
            Reflex(bench.client.number(), 1.0, 0, 6, Kind.NONFINITE_GRADIENT, Action.SKIP_UPDATE, Outcome.APPLIED, 1)
        )
        bench.client.steps(7, 40)
        bench.client.end(40)

    bench = on(tmp_path, body)
    (incident,) = bench.history.incidents("r1")
    assert (incident["kind"], incident["first_step"], incident["status"]) == ("nonfinite_gradient", 6, "resolved")
    done = [row for row in bench.history.actions("r1") if row["action"] != "none"]
    assert [(row["action"], row["outcome"], row["applied_step"]) for row in done] == [("skip_update", "applied", 6)]
    assert done[0]["incident_id"] == incident["id"]
    assert bench.metrics.run("r1").actions[Action.SKIP_UPDATE, Outcome.APPLIED] == 1


def test_an_action_that_cannot_be_written_down_is_not_taken(tmp_path):
    async def body(bench: Bench) -> None:
        bench.client.start()
        bench.client.snapshot(0)
        bench.client.steps(1, 20)
        for step in (21, 22, 23):
            bench.client.step(step, loss=NAN, grad_norm=NAN)
        await bench.writer.flushed()
        await bench.writer.now(lambda store: None)
        await bench.writer.flushed()

    bench = on(tmp_path, body, NoCommands)
    assert isinstance(bench.store, NoCommands)
    assert bench.store.refused > 0
    assert bench.sent(Command) == []
    refused = [row for row in bench.history.actions("r1") if row["action"] == "rollback"]
    assert refused
    assert {(row["outcome"], row["outcome_reason"]) for row in refused} == {("refused", "no_record")}


class Broken:
    """A detector with a mistake in it."""

    name = "broken"
    calls = 0

    def observe(self, seen):
        Broken.calls += 1
        raise ZeroDivisionError("a mistake")

    def state(self):
        return {}

    def restore(self, state):
        return None


def test_a_detector_that_raises_three_times_is_disabled_and_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setattr(judging.catalogue, "build", lambda settings: (Broken(),))
    Broken.calls = 0

    async def body(bench: Bench) -> None:
        bench.client.start()
        bench.client.steps(1, 10)

    bench = on(tmp_path, body)
    assert Broken.calls == 3
    (incident,) = bench.history.incidents("r1")
    assert (incident["kind"], incident["evidence"]) == ("sentinel_degraded", {"part": "detector broken"})
    assert "a mistake" in incident["cause"]
    assert len(list(bench.history.steps("r1"))) == 10


def test_metrics_that_raise_do_not_stop_storing_and_detecting(tmp_path, monkeypatch):
    raised = []

    def fail(self, message):
        raised.append(message)
        raise RuntimeError("no metrics")

    monkeypatch.setattr(RankSeries, "take", fail)

    async def body(bench: Bench) -> None:
        bench.client.start()
        bench.client.steps(1, 10)

    bench = on(tmp_path, body)
    assert len(raised) == 3
    assert [row["kind"] for row in bench.history.incidents("r1")] == ["sentinel_degraded"]
    assert len(list(bench.history.steps("r1"))) == 10


@pytest.mark.parametrize(
    ("settings", "incidents"),
    [
        ({"detect": {"nonfinite": {"enabled": False}}}, 0),
        ({"detect": {"nonfinite": {"enabled": "certainly"}}}, 1),  # cannot be used: the daemon's own hold
        ({}, 1),
    ],
)
def test_a_run_brings_its_own_settings(tmp_path, settings, incidents):
    async def body(bench: Bench) -> None:
        bench.client.start(settings=settings)
        bench.client.steps(1, 5)
        bench.client.step(6, loss=NAN, grad_norm=NAN)

    assert len(on(tmp_path, body).history.incidents("r1")) == incidents


def test_records_of_an_older_generation_are_stored_and_not_judged(tmp_path):
    async def body(bench: Bench) -> None:
        bench.client.start()
        bench.client.step(1)
        bench.client.generation = 1
        bench.client.step(1)
        bench.client.step(2, generation=0, loss=NAN, grad_norm=NAN)

    bench = on(tmp_path, body)
    assert bench.history.incidents("r1") == []
    assert bench.history.conservation("r1")[0]["stored"] == 4
    assert bench.rank is not None
    assert (bench.rank.generation, bench.rank.step) == (1, 1)
