"""Which rank a process is: torch's word where there is one, else the launcher's, else alone."""

import sys
from types import SimpleNamespace

import pytest

from sentinel.client.rank import ALONE, Rank, current

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def distributed(monkeypatch):
    def install(rank: int, world_size: int, initialized: bool = True) -> None:
        fake = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: initialized,
            get_rank=lambda: rank,
            get_world_size=lambda: world_size,
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", fake)

    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    return install


def test_a_process_without_a_launcher_is_alone(distributed) -> None:
    assert current({}) == ALONE == Rank(0, 0, 1, 1)


def test_the_launcher_says_rank_and_place_on_the_node(distributed) -> None:
    assert current(TORCHRUN) == Rank(5, 1, 8, 4)


def test_an_initialised_process_group_wins_over_the_variables(distributed) -> None:
    distributed(rank=3, world_size=8)
    assert current(TORCHRUN) == Rank(3, 1, 8, 4)


def test_a_process_group_that_is_not_initialised_says_nothing(distributed) -> None:
    distributed(rank=3, world_size=8, initialized=False)
    assert current({}) == ALONE


def test_spawned_ranks_without_variables_share_one_node(distributed) -> None:
    distributed(rank=2, world_size=4)
    assert current({}) == Rank(2, 2, 4, 4)


@pytest.mark.parametrize(
    "broken", [{"WORLD_SIZE": "x"}, {"RANK": "7", "WORLD_SIZE": "2"}, {"RANK": "-1", "WORLD_SIZE": ""}]
)
def test_nonsense_in_the_variables_means_alone(distributed, broken) -> None:
    assert current(broken) == ALONE


def test_asking_does_not_import_torch(distributed) -> None:
    current(TORCHRUN)
    assert "torch.distributed" not in sys.modules
