"""Ranks whose parameters differ are named, at once; ranks that never held the same are left alone."""

import doctest

import msgspec
import pytest

from sentinel.detect import catalogue, rank_desync
from sentinel.detect.rank_desync import LEAST_OPEN, MOST_OPEN, RankDesync
from sentinel.detect.run_detector import Comparison
from sentinel.detect_settings import DetectSettings, RankDesyncSettings
from sentinel.records import Finding
from sentinel.sample import Sample
from sentinel.vocabulary import Kind, Severity, Tier
from tests.detect.series import record

SAME = {"embed": 11, "layers.0": 12, "head": 13}


def told(step, prints=None, generation=0, **more):
    return record(step, generation=generation, sampled=Sample(fingerprint=SAME if prints is None else prints), **more)


def all_tell(detector, step, odd=(), world=3, generation=0, **more) -> Comparison | None:
    """Every rank tells; those in `odd` hold another `layers.0`. What the last one's record brings."""
    answers = []
    for rank in range(world):
        prints = {**SAME, "layers.0": 99 + rank} if rank in odd else SAME
        answers.append(detector.observe(rank, told(step, prints, generation, **more)))
    assert answers[:-1] == [None] * (world - 1)
    return answers[-1]


def make(world=3) -> RankDesync:
    return RankDesync(RankDesyncSettings(), world)


def found(comparison: Comparison | None) -> Finding:
    assert comparison is not None
    assert comparison.finding is not None
    return comparison.finding


def test_the_rank_that_differs_is_named_with_the_group_and_the_last_agreement():
    detector = make()
    assert all_tell(detector, 10) == Comparison(None)
    finding = found(all_tell(detector, 20, odd=[1]))
    assert (finding.kind, finding.tier, finding.severity) == (Kind.RANK_DESYNC, Tier.T0, Severity.CRITICAL)
    assert finding.ranks == (1,)
    assert (finding.step, finding.onset_step) == (20, 11)
    evidence = {"groups": ["layers.0"], "differing_groups": 1, "observers": [0, 2], "agreed_step": 10}
    assert finding.evidence == evidence
    assert "rank 1" in finding.summary
    assert "layers.0" in finding.summary


def test_of_two_ranks_both_are_named():
    detector = make(2)
    all_tell(detector, 10, world=2)
    finding = found(all_tell(detector, 20, odd=[1], world=2))
    assert (finding.ranks, finding.evidence["observers"]) == ((0, 1), [])


def test_without_a_majority_every_rank_is_named():
    detector = make(4)
    all_tell(detector, 10, world=4)
    assert found(all_tell(detector, 20, odd=[0, 1, 2, 3], world=4)).ranks == (0, 1, 2, 3)


def test_it_is_found_again_at_every_sample_until_the_ranks_agree():
    detector = make()
    all_tell(detector, 10)
    assert [found(all_tell(detector, step, odd=[2])).onset_step for step in (20, 30)] == [11, 11]
    assert all_tell(detector, 40) == Comparison(None)


def test_ranks_that_never_agreed_are_no_anomaly():
    detector = make()
    for step in (10, 20, 30):
        assert all_tell(detector, step, odd=[0, 1, 2]) == Comparison(None)


def test_under_ddp_the_first_difference_is_enough():
    finding = found(all_tell(make(), 10, odd=[1], communication_source="ddp"))
    assert (finding.onset_step, finding.evidence["agreed_step"]) == (10, None)


def test_a_dropped_record_hides_no_difference_of_the_others():
    detector = make(4)
    all_tell(detector, 10, world=4)
    for rank in (0, 1, 2):  # of rank 3 nothing comes any more
        detector.observe(rank, told(20, {**SAME, "head": 1} if rank == 1 else SAME))
    answers = [detector.observe(0, told(30 + step)) for step in range(MOST_OPEN)]
    finding = found(answers[-1])
    assert (finding.step, finding.ranks) == (20, (1,))


@pytest.mark.parametrize(("world", "most"), [(3, MOST_OPEN), (100_000, LEAST_OPEN)])
def test_what_waits_for_ranks_is_bounded(world, most):
    detector = make(world)
    for step in range(1000):
        detector.observe(0, told(step))
    assert len(detector.state()["waiting"]) == most


def test_a_rank_whose_records_come_long_after_the_others_is_compared_all_the_same():
    detector = make(2)
    steps = range(10, 10 * (MOST_OPEN + 1), 10)
    assert [detector.observe(0, told(step)) for step in steps] == [None] * len(steps)
    answers = [detector.observe(1, told(step, {**SAME, "head": 5} if step == 50 else SAME)) for step in steps]
    assert [answer.finding.step for answer in answers if answer.finding] == [50]


def test_ranks_that_sample_at_different_cadences_are_compared_where_all_do():
    detector = make()
    for step in range(1, 41):
        coarse = step % 4 == 0
        answers = [detector.observe(rank, told(step)) for rank in (0, 1, 2) if rank == 0 or coarse]
        assert answers[-1] == (Comparison(None) if coarse else None)
    assert detector.state()["waiting"] == []


def test_some_ranks_that_agree_prove_nothing_of_the_rest():
    detector = make()
    for step in range(MOST_OPEN + 20):
        assert [detector.observe(rank, told(step)) for rank in (0, 1)] == [None, None]


def test_a_step_that_was_given_up_is_never_opened_again():
    detector = make(2)
    for step in range(1, MOST_OPEN + 11):
        detector.observe(0, told(step))
    assert detector.observe(1, told(5)) is None
    assert detector.observe(1, told(11)) == Comparison(None)


def test_an_older_generation_is_history_and_never_compared_with_the_new_one():
    detector = make(2)
    all_tell(detector, 10, world=2)
    detector.observe(0, told(20))
    assert detector.observe(1, told(20, {**SAME, "head": 5}, generation=1)) is None
    assert detector.observe(1, told(20, {**SAME, "head": 4})) is None
    finding = found(detector.observe(0, told(20, generation=1)))
    assert (finding.onset_step, finding.evidence["agreed_step"]) == (20, None)


def test_only_groups_that_every_rank_has_are_compared():
    detector = make(2)
    for step in (10, 20):
        detector.observe(0, told(step, {"first": 1, "shared": 2}))
        assert detector.observe(1, told(step, {"last": 7, "shared": 2})) == Comparison(None)


def test_records_without_a_fingerprint_tell_nothing():
    detector = make(2)
    for rank in (0, 1):
        assert detector.observe(rank, record(10)) is None
        assert detector.observe(rank, record(10, sampled=Sample(update_norm=1.0))) is None


def test_taking_the_state_out_and_putting_it_back_changes_nothing():
    straight, moved = make(), make()
    for detector in (straight, moved):
        all_tell(detector, 10)
        detector.observe(0, told(20))
    fresh = make()
    fresh.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(moved.state()), strict=False))
    for detector in (straight, fresh):
        detector.observe(1, told(20, {**SAME, "head": 5}))
    assert repr(straight.observe(2, told(20))) == repr(fresh.observe(2, told(20)))


@pytest.mark.parametrize(("enabled", "world", "names"), [(True, 2, ["rank_desync"]), (True, 1, []), (False, 2, [])])
def test_it_runs_where_there_are_ranks_to_compare(enabled, world, names):
    settings = DetectSettings(rank_desync=RankDesyncSettings(enabled=enabled))
    assert [detector.name for detector in catalogue.build_for_run(settings, world)] == names


def test_the_example_in_the_docstring_holds():
    result = doctest.testmod(rank_desync)
    assert (result.failed, result.attempted >= 3) == (0, True)
