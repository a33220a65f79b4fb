"""Carry NaN, +inf, -inf and absent through a database as four distinct values.

SQLite turns NaN into NULL and other databases differ again, so no non-finite number is ever handed to one. A float
column holds NULL instead, and the row's `nonfinite` column names the fields: `loss=nan,grad_norm=inf`. Inside
structured values, which are stored as JSON text, such a number becomes `{"~float": "nan"}`.
"""

import json
import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import msgspec

_TAG = "~float"


def word_of(number: float) -> str:
    """`nan`, `inf` or `-inf` for a non-finite number."""
    if math.isnan(number):
        return "nan"
    return "inf" if number > 0 else "-inf"


def set_aside(row: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Replace non-finite floats of these columns by NULL and name them in `row["nonfinite"]`."""
    found = []
    for name in names:
        value = row[name]
        if value is not None and not math.isfinite(value):
            found.append(f"{name}={word_of(value)}")
            row[name] = None
    row["nonfinite"] = ",".join(found) or None


def put_back(row: MutableMapping[str, Any]) -> None:
    """Undo `set_aside`; the column `nonfinite` leaves the row."""
    for part in (row.pop("nonfinite", None) or "").split(","):
        name, _, word = part.partition("=")
        if name:
            row[name] = float(word)


def finite(number: float | None) -> float | None:
    """A number for a column without a `nonfinite` twin, where only our own clock writes."""
    return number if number is not None and math.isfinite(number) else None


def to_text(value: Any) -> str:
    """Strict JSON that `from_text` reads back exactly, non-finite numbers included."""
    return json.dumps(_tagged(msgspec.to_builtins(value, str_keys=True)), allow_nan=False, separators=(",", ":"))


def from_text(text: str | None) -> Any:
    """The value that `to_text` wrote; None for NULL."""
    return None if text is None else _untagged(json.loads(text))


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: word_of(value)}
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    return value


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and _TAG in value:
            return float(value[_TAG])
        return {key: _untagged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    return value
