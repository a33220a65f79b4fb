"""Under sharding a record is judged with the global norm, in its order, and never waits for ever."""

import math
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sentinel.daemon import norms as norms_module
from sentinel.daemon.metrics import Metrics
from sentinel.daemon.norms import MOST_HELD, Combining
from sentinel.daemon.rank import Fleet, Identity, Rank
from sentinel.records import Observation, Origin, Reflex, StepRecord
from sentinel.store.history import History
from sentinel.vocabulary import Action, Kind, Outcome, UpdateResult
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until


class Wire:
    """The way back to a rank; nothing goes there in these tests."""

    def send(self, message: Any) -> None:
        raise AssertionError(f"unexpected {message}")

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


class Bench:
    """A sharded run of several ranks, and a judge who writes down what comes to him."""

    def __init__(self, world: int = 2, connected: int | None = None) -> None:
        self.fleet, self.metrics = Fleet(), Metrics()
        self.judged: list[tuple[int, Observation]] = []
        self.combining = Combining(
            self.fleet, self.metrics, lambda rank, seen: self.judged.append((self.at(rank), seen))
        )
        self.ranks = [Rank(Origin("r1", 1, number), Identity(str(number), 1, 1.0), world) for number in range(world)]
        for rank in self.ranks[: world if connected is None else connected]:
            rank.link = Wire()
            self.fleet.admit(rank)
            self.metrics.rank("r1", rank.origin.rank).begin()

    def at(self, rank: Rank) -> int:
        return rank.origin.rank

    def step(self, rank: int, step: int, part: float | None = 3.0, generation: int = 0, **more: Any) -> None:
        source = None if part is None else "local"
        record = StepRecord(
            1, generation, step, 0.0, UpdateResult.APPLIED, grad_norm_local=part, grad_norm_source=source, **more
        )
        self.metrics.rank("r1", rank).take(record)
        self.combining.observe(self.ranks[rank], record)

    def steps(self, rank: int) -> list[tuple[int, float | None]]:
        """Step and norm of what was judged of a rank, in order."""
        seen = [(one.step, one.grad_norm) for who, one in self.judged if who == rank and isinstance(one, StepRecord)]
        return [(step, None if norm is None else round(norm, 6)) for step, norm in seen]

    def gauges(self) -> list[float | None]:
        return [self.metrics.rank("r1", number).gauges.get("grad_norm") for number in range(len(self.ranks))]


def test_squares_add_up_over_the_ranks_and_every_rank_is_judged_with_the_sum():
    bench = Bench()
    bench.step(0, 1, part=3.0)
    assert bench.judged == []
    assert bench.gauges() == [None, None]
    bench.step(1, 1, part=4.0)
    assert bench.steps(0) == bench.steps(1) == [(1, 5.0)]
    assert bench.gauges() == [5.0, 5.0]


def test_a_rank_far_ahead_waits_in_order_for_the_others():
    bench = Bench()
    for step in range(1, 51):
        bench.step(0, step)
    assert bench.judged == []
    for step in range(1, 51):
        bench.step(1, step, part=4.0)
    assert bench.steps(0) == bench.steps(1) == [(step, 5.0) for step in range(1, 51)]


def test_what_a_rank_says_besides_keeps_its_place():
    bench = Bench()
    bench.step(0, 1)
    reflex = Reflex(2, 0.0, 0, 2, Kind.NONFINITE_GRADIENT, Action.SKIP_UPDATE, Outcome.APPLIED, 1)
    bench.combining.observe(bench.ranks[0], reflex)
    assert bench.judged == []
    bench.step(1, 1, part=4.0)
    assert [type(seen) for who, seen in bench.judged if who == 0] == [StepRecord, Reflex]


def test_a_step_whose_record_was_dropped_on_one_rank_has_no_norm_on_any():
    bench = Bench(3)
    for step in (1, 2, 3):
        for rank in (0, 1, 2):
            if (rank, step) != (1, 2):
                bench.step(rank, step, part=2.0)
    whole = round(math.sqrt(12.0), 6)
    assert bench.steps(0) == bench.steps(2) == [(1, whole), (2, None), (3, whole)]
    assert bench.steps(1) == [(1, whole), (3, whole)]


def test_a_norm_of_another_generation_is_never_mixed_in():
    bench = Bench()
    bench.step(0, 5, part=3.0, generation=0)
    bench.step(1, 5, part=40.0, generation=1)  # the same step again, after a rollback
    bench.step(0, 5, part=30.0, generation=1)
    assert bench.steps(0) == [(5, None), (5, 50.0)]
    assert bench.steps(1) == [(5, 50.0)]


def test_with_a_rank_missing_nothing_waits_and_no_norm_is_told():
    bench = Bench(2, connected=1)
    bench.step(0, 1)
    assert bench.steps(0) == [(1, None)]
    assert bench.gauges()[0] is None


def test_a_rank_that_ends_is_judged_and_waited_for_no_longer():
    bench = Bench()
    bench.step(0, 1)
    bench.combining.end(bench.ranks[1])
    assert bench.steps(0) == [(1, None)]
    bench.step(0, 2)
    bench.combining.end(bench.ranks[0])
    assert bench.steps(0) == [(1, None), (2, None)]


def test_nothing_waits_longer_than_it_may(monkeypatch: pytest.MonkeyPatch):
    bench = Bench()
    bench.step(0, 1)
    bench.combining.overdue()
    assert bench.judged == []
    monkeypatch.setattr(norms_module, "MOST_SECONDS", -1.0)
    bench.combining.overdue()
    assert bench.steps(0) == [(1, None)]
    bench.step(1, 1, part=4.0)  # too late for the norm, but not for the judge
    bench.step(0, 2)
    assert bench.steps(1) == [(1, None)]


def test_what_is_held_is_bounded():
    bench = Bench()
    for step in range(1, 10 * MOST_HELD):
        bench.step(0, step)
    held = 10 * MOST_HELD - 1 - len(bench.steps(0))
    assert held == MOST_HELD
    (norms,) = bench.combining._runs.values()
    assert len(norms._parts) <= MOST_HELD
    assert norms._known == {}


def test_a_part_that_is_not_finite_is_one_bad_gradient_of_its_rank_and_none_of_the_gauge():
    bench = Bench()
    bench.step(0, 1)
    bench.step(1, 1, part=4.0)
    assert bench.gauges() == [5.0, 5.0]
    bench.step(0, 2)
    bench.step(1, 2, part=math.nan)
    (norm,) = {repr(one.grad_norm) for _, one in bench.judged if one.step == 2}
    assert norm == "nan"
    assert bench.gauges() == [None, None]
    assert [bench.metrics.rank("r1", rank).nonfinite["gradient"] for rank in (0, 1)] == [0, 1]


def test_a_run_that_is_not_sharded_passes_straight_through():
    bench = Bench()
    bench.step(0, 1, part=None, grad_norm=2.0)
    assert bench.steps(0) == [(1, 2.0)]
    assert bench.combining._runs == {}


def test_a_run_that_is_over_is_forgotten():
    bench = Bench()
    bench.step(0, 1)
    for rank in bench.ranks:
        bench.combining.end(rank)
    bench.combining.forget("r1")
    assert bench.combining._runs == {}
    assert bench.steps(0) == [(1, None)]


def test_a_real_daemon_shows_and_stores_the_same_norm_for_every_rank_and_none_where_a_record_was_dropped(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path / "home") as daemon, History(daemon.database) as history:
        ranks = [WireClient(daemon.places.socket, "r1", rank, 2) for rank in (0, 1)]
        for rank in ranks:
            rank.connect()
        for rank, part in zip(ranks, (3.0, 4.0), strict=True):
            rank.start()
            for step in range(1, 6):
                if (rank.rank, step) == (1, 3):
                    rank.drop(1)
                else:
                    rank.step(step, grad_norm=None, grad_norm_local=part * step, grad_norm_source="local")
            rank.all_stored()
        until(lambda: shown(daemon) == {"0": 25.0, "1": 25.0})
        rows = list(history.steps("r1"))
        for row in rows:
            assert row["grad_norm"] == (None if row["step"] == 3 else 5.0 * row["step"])
        assert len(rows) == 9
        for rank in ranks:
            rank.end(5)
            rank.all_stored()
            rank.close()
        until(lambda: history.run("r1")["status"] == "completed")
        assert [books["dropped"] for books in history.conservation("r1")] == [0, 1]
        assert history.incidents("r1") == []


def shown(daemon: DaemonProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    found = re.findall(r'^sentinel_grad_norm{rank="(\d)",run_id="r1"} (\S+)$', text, re.MULTILINE)
    return {rank: float(value) for rank, value in found}
