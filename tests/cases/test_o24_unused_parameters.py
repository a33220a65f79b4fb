"""O24, unused parameters and None gradients under DDP: no error made, none hidden (pytorch#43259, #68862)."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.jobs import Home, Job, must_balance
from tests.end_to_end.scripts.unused_ranks import STEPS, UNUSED


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("o24")) as opened:
        yield opened


@pytest.fixture(scope="module")
def jobs(home: Home) -> list[Job]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [home.start("unused_ranks", rank, port) for rank in ("0", "1")]
    for job in started:
        job.finish(120)
    return started


def said(jobs: list[Job], name: str) -> list[dict[str, Any]]:
    return [job.said(name) for job in jobs]


def test_the_error_about_unfinished_reduction_comes_where_it_came_without_sentinel(jobs: list[Job]) -> None:
    without = said(jobs, "unfound")
    assert all("finished reduction" in one["error"] for one in without), "DDP did not complain"
    assert {one["steps"] for one in without} == {1}
    assert said(jobs, "unfound-attached") == without


def test_with_unused_parameters_found_weights_and_bucket_rebuild_are_as_without_sentinel(jobs: list[Job]) -> None:
    without = said(jobs, "found")
    assert [(one["error"], one["steps"], one["absent"]) for one in without] == [("", STEPS, UNUSED)] * 2
    assert said(jobs, "found-attached") == without


def test_gradients_that_are_none_are_counted_as_absent_and_break_no_norm(home: Home, jobs: list[Job]) -> None:
    found, rows = home.ended("found-attached"), home.steps("found-attached")
    assert len(rows) == 2 * STEPS
    assert {row["gradients_absent"] for row in rows} == {UNUSED}
    assert all(row["grad_norm"] > 0.0 for row in rows)
    assert found["incidents"] == []
    must_balance(found, dropped=0)


def test_the_wait_is_told_although_gradients_are_missing(home: Home, jobs: list[Job]) -> None:
    home.ended("found-attached")
    waits = [row["communication_wait_seconds"] for row in home.steps("found-attached")]
    assert all(wait is not None and wait >= 0.0 for wait in waits)
