"""What export and postmortem say of the global norm under sharding: right, or nothing."""

import math
from typing import Any

import pytest

from sentinel.store.norms import with_global_norms


def row(rank: int, step: int, part: float | None, **more: Any) -> dict[str, Any]:
    values = {"attempt": 1, "generation": 0, "step": step, "rank": rank, "grad_norm": None}
    return {**values, "grad_norm_local": part, "grad_norm_source": "local", **more}


def norms(rows: list[dict[str, Any]], world: int = 2) -> list[float | None]:
    return [found["grad_norm"] for found in with_global_norms(rows, {1: world})]


def test_the_norm_is_on_every_rank_of_a_step_that_is_whole() -> None:
    assert norms([row(0, 1, 3.0), row(1, 1, 4.0), row(0, 2, 6.0), row(1, 2, 8.0)]) == [5.0, 5.0, 10.0, 10.0]


def test_a_step_that_misses_a_rank_has_none() -> None:
    assert norms([row(0, 1, 3.0), row(0, 2, 6.0), row(1, 2, 8.0)]) == [None, 10.0, 10.0]


def test_generations_and_attempts_are_kept_apart() -> None:
    apart = [row(0, 1, 3.0), row(1, 1, 4.0, generation=1), row(0, 1, 3.0, attempt=2), row(1, 1, 4.0, attempt=3)]
    assert norms(apart) == [None] * 4


def test_a_part_that_never_adds_up_is_left_alone() -> None:
    assert norms([row(0, 1, 3.0, grad_norm_source="part"), row(1, 1, 4.0)]) == [None, None]


def test_a_norm_that_is_known_stays() -> None:
    known = {"grad_norm": 7.0, "grad_norm_source": "clip"}
    assert norms([row(0, 1, None, **known), row(1, 1, None, **known)]) == [7.0, 7.0]


@pytest.mark.parametrize(("part", "whole"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_part_that_is_not_finite_makes_the_norm_so(part: float, whole: str) -> None:
    assert [str(norm) for norm in norms([row(0, 1, 3.0), row(1, 1, part)])] == [whole, whole]
