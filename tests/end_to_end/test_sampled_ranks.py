"""Sampling on two gloo ranks: the same as on one, fingerprints, and each rank's own gradient norm under DDP."""

import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from sentinel.daemon.noise_scale import RunNoiseScale
from sentinel.records import StepRecord
from sentinel.sample import Sample
from sentinel.vocabulary import UpdateResult
from tests.client.sampling.samples import moved
from tests.end_to_end.jobs import Home, Job, must_balance
from tests.end_to_end.scripts.sampling_ranks import EVERY, FLIP_AT, LONG, WAYS

SYNCED = [way for way in WAYS if way not in ("unsynced", "fsdp2", "long", "flipped")]
GROUPS = {"0", "2"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("sampled")) as opened:
        yield opened


@pytest.fixture(scope="module")
def jobs(home: Home) -> dict[int, list[Job]]:
    started: dict[int, list[Job]] = {}
    for world, ways in ((1, ("ddp", "fsdp2")), (2, WAYS)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = [home.start("sampling_ranks", str(rank), str(world), port, *ways) for rank in range(world)]
        for job in ranks:
            job.finish(240)
        started[world] = ranks
    return started


def sampled(home: Home, run_id: str, rank: int) -> dict[int, dict[str, Any]]:
    must_balance(home.ended(run_id), dropped=0)
    rows = [row for row in home.steps(run_id) if row["rank"] == rank]
    found = {row["step"]: row["sampled"] | {"row": row} for row in rows if row["sampled"] is not None}
    assert EVERY in found
    assert all(step % EVERY == 0 for step in found)
    return found


def both(home: Home, run_id: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the two ranks sampled at the same steps."""
    one, two = (sampled(home, run_id, rank) for rank in (0, 1))
    return [(one[step], two[step]) for step in sorted(one.keys() & two.keys())]


@pytest.mark.parametrize("way", SYNCED)
def test_one_rank_and_two_sample_the_same_of_the_same_global_batch(home, jobs, way: str) -> None:
    plain = sampled(home, "ddp-1", 0)[EVERY]
    for rank in (0, 1):
        found = sampled(home, f"{way}-2", rank)[EVERY]
        for group in GROUPS:
            ours = next(norm for name, norm in found["group_norms"].items() if name.split(".")[-1] == group)
            assert ours == pytest.approx(plain["group_norms"][group], rel=1e-5)
        if way != "unused":  # which has more parameters, and so more zeros and weights
            assert moved(found["histogram"], plain["histogram"]) <= 1
            assert found["weight_norm"] == pytest.approx(plain["weight_norm"], rel=1e-5)
        assert found["update_norm"] == pytest.approx(plain["update_norm"], rel=1e-4)


@pytest.mark.parametrize("way", SYNCED)
def test_each_ranks_own_norm_is_that_of_its_gradient_before_the_average(home, jobs, way: str) -> None:
    for rank in (0, 1):
        own = jobs[2][rank].said(way)["own"]
        told = {step: one.get("local_grad_norm") for step, one in sampled(home, f"{way}-2", rank).items()}
        known = {step: norm for step, norm in told.items() if norm is not None}
        assert EVERY in known
        assert known == {step: pytest.approx(own[step - 1], rel=1e-5) for step in known}
    norms = [[jobs[2][rank].said(way)["own"][EVERY - 1] for rank in (0, 1)]]
    assert norms[0][0] != pytest.approx(norms[0][1], rel=1e-3), "the ranks' own gradients differ"


@pytest.mark.parametrize("way", SYNCED)
def test_hooks_are_on_the_parameters_in_sampled_steps_only_and_none_is_left(home, jobs, way: str) -> None:
    for job in jobs[2]:
        said = job.said(way)
        assert len(said["hooks"]) == 2, "few between, more in a sampled step"
        assert said["left"] == 0


@pytest.mark.parametrize("way", SYNCED)
def test_fingerprints_of_healthy_ranks_are_the_same(home, jobs, way: str) -> None:
    pairs = [(one.get("fingerprint"), two.get("fingerprint")) for one, two in both(home, f"{way}-2")]
    told = [(one, two) for one, two in pairs if one and two]
    assert told
    assert all(one == two and len(one) >= len(GROUPS) for one, two in told)


def test_in_a_thousand_steps_healthy_ranks_never_differ(home, jobs) -> None:
    pairs = [(one.get("fingerprint"), two.get("fingerprint")) for one, two in both(home, "long-2")]
    told = [(one, two) for one, two in pairs if one and two]
    assert len(told) > 10
    assert all(one == two for one, two in told)
    assert len({tuple(one.values()) for one, _ in told}) == len(told), "they change with every update"
    assert max(one["row"]["step"] for one, _ in both(home, "long-2")) > LONG - 40 * EVERY


def test_a_change_of_one_weight_by_a_millionth_shows_in_its_group(home, jobs) -> None:
    before, after = [], []
    for one, two in both(home, "flipped-2"):
        if one.get("fingerprint") and two.get("fingerprint"):
            (after if one["row"]["step"] > FLIP_AT else before).append((one["fingerprint"], two["fingerprint"]))
    assert before
    assert all(one == two for one, two in before)
    assert after
    assert all(one["0"] == two["0"] and one["2"] != two["2"] for one, two in after)


def test_where_nobody_averages_or_every_rank_holds_a_shard_there_is_none(home, jobs) -> None:
    """Ranks that train alone differ rightly."""
    for way in ("unsynced", "fsdp2"):
        for rank in (0, 1):
            taken = sampled(home, f"{way}-2", rank).values()
            assert all(one.get("fingerprint") is None for one in taken)
    assert all(one.get("local_grad_norm") is None for one in sampled(home, "fsdp2-2", 0).values())
    assert all(one.get("fingerprint") is None for one in sampled(home, "ddp-1", 0).values()), "alone there is nobody"


def test_squares_of_shards_add_up_over_the_ranks(home, jobs) -> None:
    whole = sampled(home, "fsdp2-1", 0)[EVERY]
    halves = [sampled(home, "fsdp2-2", rank)[EVERY] for rank in (0, 1)]
    for group, norm in whole["group_norms"].items():
        assert math.hypot(*(half["group_norms"].get(group, 0.0) for half in halves)) == pytest.approx(norm, rel=1e-5)
    for name in ("update_norm", "weight_norm"):
        assert math.hypot(*(half[name] for half in halves)) == pytest.approx(whole[name], rel=1e-4)
    summed = [sum(pair) for pair in zip(*(half["histogram"] for half in halves), strict=True)]
    assert moved(summed, whole["histogram"]) <= 2


def test_the_noise_scale_follows_from_what_both_ranks_told(home, jobs) -> None:
    of_run, told = RunNoiseScale(), []
    for pair in both(home, "long-2"):
        if any(one.get("local_grad_norm") is None for one in pair):
            continue
        records = {rank: _record(one) for rank, one in enumerate(pair)}
        told.append(of_run(records))
    assert len(told) > 10
    known = [value for value in told if value is not None]
    assert known
    assert all(0.0 < value < 1e9 for value in known)


def _record(one: dict[str, Any]) -> StepRecord:
    row, sample = one["row"], Sample(local_grad_norm=one["local_grad_norm"])
    return StepRecord(
        1,
        0,
        row["step"],
        1.0,
        UpdateResult.APPLIED,
        grad_norm=row["grad_norm"],
        samples=row["samples"],
        sampled=sample,
    )
