"""Any JSON we print can be read by any reader, and says what was not finite."""

import doctest
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from sentinel.store import strict_json
from sentinel.vocabulary import Kind

ANYTHING = st.recursive(
    st.none() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(ANYTHING)
def test_no_reader_meets_nan_or_infinity(value: object) -> None:
    text = strict_json.dumps({"value": value})
    json.loads(text, parse_constant=lambda word: (_ for _ in ()).throw(AssertionError(f"{word} in {text}")))


def test_one_number_is_named_by_a_word_and_several_by_their_keys() -> None:
    assert strict_json.strict({"loss": -math.inf}) == {"loss": None, "nonfinite": "-inf"}
    assert strict_json.strict({"a": math.nan, "b": math.inf}) == {
        "a": None,
        "b": None,
        "nonfinite": {"a": "nan", "b": "inf"},
    }


def test_the_word_stands_in_the_object_of_its_number_and_in_no_other() -> None:
    assert strict_json.strict({"outer": 1.0, "inner": {"x": math.nan}}) == {
        "outer": 1.0,
        "inner": {"x": None, "nonfinite": "nan"},
    }


def test_a_number_inside_a_list_is_named_with_its_place() -> None:
    assert strict_json.strict({"last": [1.0, math.nan]}) == {"last": [1.0, None], "nonfinite": {"last[1]": "nan"}}


def test_a_key_called_nonfinite_is_not_overwritten() -> None:
    found = strict_json.strict({"nonfinite": ["w1"], "value": math.inf})
    assert found == {"nonfinite": ["w1"], "value": None, "nonfinite_values": "inf"}


def test_words_of_ours_and_tuples_are_plain_json() -> None:
    assert json.loads(strict_json.dumps({"kind": Kind.OOM, "ranks": (0, 1)})) == {"kind": "oom", "ranks": [0, 1]}


def test_the_examples_of_the_module_hold() -> None:
    result = doctest.testmod(strict_json)
    assert result.attempted >= 2
    assert result.failed == 0
