"""Two ranks that share a global batch leave the series that one rank leaves, however they are parallel, to 1e-5."""

import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.jobs import Home, must_balance
from tests.end_to_end.scripts.series_ranks import OVERFLOW_AT, STEPS, WAYS

RELATIVE = 1e-5
WORLD = 2
PARAMETERS = 4  # of the model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("series")) as opened:
        yield opened


class Played(NamedTuple):
    """What the ranks said of each way, by rank."""

    said: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def one(home: Home) -> Played:
    return play(home, 1)


@pytest.fixture(scope="module")
def two(home: Home) -> Played:
    return play(home, WORLD)


def play(home: Home, world: int) -> Played:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    jobs = [home.start("series_ranks", str(rank), str(world), port, *WAYS) for rank in range(world)]
    for job in jobs:
        job.finish(180)
    for way in WAYS:
        must_balance(home.ended(f"{way}-{world}"), dropped=0)
    return Played({way: [job.said(way) for job in jobs] for way in WAYS})


def series(home: Home, way: str, world: int) -> dict[int, dict[str, list[Any]]]:
    """Rank -> column -> its values, step by step."""
    rows = home.steps(f"{way}-{world}")
    columns = ("step", "loss", "grad_norm", "lr", "result", "applied", "skipped")
    return {rank: {name: [r[name] for r in rows if r["rank"] == rank] for name in columns} for rank in range(world)}


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_tells_its_own_losses(home: Home, two: Played, way: str) -> None:
    told = series(home, way, WORLD)
    for rank, said in enumerate(two.said[way]):
        assert told[rank]["step"] == list(range(1, STEPS + 1))
        assert told[rank]["loss"] == pytest.approx(said["losses"], rel=RELATIVE)
    assert told[0]["loss"] != told[1]["loss"], "each had a share of its own"


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_leave_the_series_of_one(home: Home, one: Played, two: Played, way: str) -> None:
    (alone,) = series(home, way, 1).values()
    both = series(home, way, WORLD)
    means = [sum(pair) / WORLD for pair in zip(*(both[rank]["loss"] for rank in both), strict=True)]
    assert means == pytest.approx(alone["loss"], rel=RELATIVE)
    for told in both.values():
        assert finite(told["grad_norm"]) == pytest.approx(finite(alone["grad_norm"]), rel=RELATIVE)
        for name in ("step", "result", "applied", "skipped"):
            assert told[name] == alone[name], name
        assert told["lr"] == pytest.approx(alone["lr"], rel=1e-6)
    assert len(set(alone["grad_norm"])) == STEPS, "it moves"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "scaled"])
def test_every_way_leaves_the_series_of_plain_ddp(home: Home, two: Played, way: str) -> None:
    plain, told = series(home, "ddp", WORLD), series(home, way, WORLD)
    for rank in plain:
        for name in ("loss", "grad_norm", "lr"):
            assert told[rank][name] == pytest.approx(plain[rank][name], rel=RELATIVE), name


def test_the_overflow_was_there_and_every_rank_skipped_it(home: Home, two: Played) -> None:
    for told in series(home, "scaled", WORLD).values():
        results = ["applied"] * STEPS
        results[OVERFLOW_AT] = "overflow"
        assert told["result"] == results
        assert told["skipped"][-1] == 1


def test_the_parameters_were_shared_out_and_the_norm_is_of_all(home: Home, two: Played) -> None:
    stepped = [said["stepped"] for said in two.said["zero"]]
    assert sum(stepped) == PARAMETERS
    assert max(stepped) < PARAMETERS, "no rank's inner optimizer knows all"


def finite(norms: list[float | None]) -> list[float]:
    """Without that of the overflowed step, which is no number."""
    return [norm for norm in norms if norm is not None and abs(norm) != float("inf")]
