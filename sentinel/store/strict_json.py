"""Write JSON that every reader accepts: no NaN, no Infinity, and still nothing lost.

A non-finite number becomes null, and the object it stands in says which it was in a key `nonfinite` beside it:

>>> dumps({"loss": float("nan"), "step": 3})
'{"loss": null, "step": 3, "nonfinite": "nan"}'

With several non-finite numbers in one object, lists in it included, the value is an object of their names:

>>> dumps({"loss": float("nan"), "last": [1.0, float("-inf")]})
'{"loss": null, "last": [1.0, null], "nonfinite": {"loss": "nan", "last[1]": "-inf"}}'

An object that has a key `nonfinite` of its own gets `nonfinite_values` instead.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from sentinel.store.values import word_of


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON. What is no JSON type is written as text."""
    return json.dumps(strict(value), allow_nan=False, indent=indent, ensure_ascii=False, default=str)


def strict(value: Any) -> Any:
    """The value as plain data without non-finite numbers."""
    return _without({}, "", value)


def _without(found: dict[str, str], name: str, value: Any) -> Any:
    """`value` made finite; what had to go is added to `found`, of the object around it, under `name`."""
    if isinstance(value, float) and not math.isfinite(value):
        found[name] = word_of(value)
        return None
    if isinstance(value, Mapping):
        return _object(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_without(found, f"{name}[{index}]", item) for index, item in enumerate(value)]
    return value


def _object(value: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, str] = {}
    plain = {str(name): _without(found, str(name), item) for name, item in value.items()}
    if found:
        key = "nonfinite_values" if "nonfinite" in plain else "nonfinite"
        plain[key] = next(iter(found.values())) if len(found) == 1 and next(iter(found)) in plain else found
    return plain
