"""NaN, +inf, -inf and absent stay four distinct values."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from sentinel.store.values import from_text, put_back, set_aside, to_text

NUMBERS = st.none() | st.floats()
STRUCTURES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(-(2**60), 2**60),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def same(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(loss=NUMBERS, norm=NUMBERS)
def test_a_row_comes_back_as_it_was_and_holds_only_finite_numbers_in_between(loss: object, norm: object) -> None:
    row = {"loss": loss, "grad_norm": norm}
    set_aside(row, ("loss", "grad_norm"))
    assert all(row[name] is None or math.isfinite(row[name]) for name in ("loss", "grad_norm"))
    put_back(row)
    assert same(row, {"loss": loss, "grad_norm": norm})


@given(STRUCTURES)
def test_structured_values_come_back_as_they_were_through_strict_json(value: object) -> None:
    text = to_text(value)
    json.loads(text, parse_constant=lambda word: (_ for _ in ()).throw(AssertionError(word)))
    assert same(from_text(text), value)
