"""When an auto-started daemon leaves."""

import pytest

from sentinel.daemon.lifetime import Lifetime
from sentinel.daemon.rank import Fleet


@pytest.fixture
def fleet():
    made = Fleet()
    made.ever = True
    made.last_end = 1000.0
    return made


def test_it_leaves_a_while_after_its_last_run(fleet):
    lifetime = Lifetime(fleet, 5.0, auto=True)
    assert [lifetime.is_over(now) for now in (1004.9, 1005.0)] == [False, True]


def test_it_stays_longer_for_work_that_is_left_but_not_for_ever(fleet):
    work = [True]
    lifetime = Lifetime(fleet, 5.0, auto=True, unfinished=lambda: bool(work), stay_seconds=600.0)
    assert [lifetime.is_over(now) for now in (1005.0, 1604.9, 1605.0)] == [False, False, True]
    work.clear()
    assert lifetime.is_over(1005.0)


def test_one_that_a_person_started_stays(fleet):
    assert not Lifetime(fleet, 5.0, auto=False).is_over(1e9)
