"""Turn what a user hands over (config, command line) into plain data: bounded, without secrets, never raising."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import islice
from typing import Any

import msgspec

MAX_DEPTH = 6
MAX_ITEMS = 1000  # of any one list or mapping
MAX_TEXT_CHARACTERS = 4096
HIDDEN = "***"
_CUT = "(cut)"

_SECRET = re.compile(
    r"token|password|passwd|secret|api[-_]?key|access[-_]?key|credential|private[-_]?key", re.IGNORECASE
)
# `max_tokens`, `tokens_per_batch`, `token_count`, `tokenizer` are numbers and names, not secrets.
_NOT_SECRET = re.compile(
    r"tokens|tokeni[sz]|token_(count|id|type|len|embed|drop)|(pad|eos|bos|unk|mask|sep|cls)_token", re.IGNORECASE
)


def data(config: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    """Keys and values as JSON-able data at most six deep; NaN stays; odd objects become text.

    A value whose key looks like a secret is hidden. Entries that would pass `most_bytes` in all are cut, and say so.
    """
    kept: dict[str, Any] = {}
    room = most_bytes
    for key, value in _first(config.items()):
        name = text(key)
        item = HIDDEN if is_secret(name) else _plain(value, MAX_DEPTH - 1)
        size = len(msgspec.msgpack.encode({name: item}))
        if size > room:
            item, size = _CUT, len(name) + len(_CUT) + 8
        if size > room:
            break
        kept[name] = item
        room -= size
    return kept


def argv(words: list[str], most_bytes: int) -> list[str]:
    """A command line without the values of secret options, cut where it passes `most_bytes`."""
    kept: list[str] = []
    hide_next, room = False, most_bytes
    for word in words:
        said = HIDDEN if hide_next and not word.startswith("-") else _hide_value(text(word))
        hide_next = word.startswith("-") and "=" not in word and is_secret(word)
        room -= len(said.encode(errors="replace")) + 1
        if room < 0:
            return [*kept, _CUT]
        kept.append(said)
    return kept


def is_secret(key: str) -> bool:
    """Whether a value under this key should not be written down."""
    return _SECRET.search(_NOT_SECRET.sub("", key)) is not None


def _plain(value: Any, levels: int) -> Any:
    if isinstance(value, Enum):
        value = value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name, None) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return _mapping(value, levels)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, levels - 1) for item in _first(value)] if levels > 0 else text(value)
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)  # NumPy's float64 is one too, and is not plain
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    return text(value)


def _mapping(value: Mapping[Any, Any], levels: int) -> Any:
    if levels <= 0:
        return "{...}"
    named = ((text(key), item) for key, item in _first(value.items()))
    return {name: HIDDEN if is_secret(name) else _plain(item, levels - 1) for name, item in named}


def _first(items: Iterable[Any]) -> list[Any]:
    return list(islice(items, MAX_ITEMS))


def text(value: object) -> str:
    """Text that any reader can decode: no lone surrogates, no endless length, whatever `str` of it does."""
    try:
        whole = str(value)
    except Exception:  # noqa: BLE001  # a user's __str__ may raise anything, and its value is worth no crash
        whole = f"<{type(value).__name__}>"
    return whole[:MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode("utf-8")


def _hide_value(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"{key}={HIDDEN}" if equals and value and is_secret(key) else word
