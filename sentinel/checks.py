"""Refuse a setting's value: name the key, the value and the remedy."""

import difflib
import math

from sentinel.errors import SettingsError

_MAY_HOLD_SECRETS = ("notify.", "store.url")


def at_least(name: str, value: int, least: int, otherwise: str = "") -> None:
    """Raise SettingsError for a value below `least`; `otherwise` says what else the person may have meant."""
    if value < least:
        remedy = f" (or {otherwise})" if otherwise else ""
        raise SettingsError(f"{name} is {value}; it must be at least {least}{remedy}")


def positive(name: str, value: float) -> None:
    """Raise SettingsError unless the value is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise SettingsError(f"{name} is {value}; it must be a positive number")


def not_negative(name: str, value: float) -> None:
    """Raise SettingsError unless the value is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise SettingsError(f"{name} is {value}; it must be 0 or a positive number")


def ratio(name: str, value: float) -> None:
    """Raise SettingsError unless the value is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise SettingsError(f"{name} is {value}; it must be above 0 and at most 1")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise SettingsError for a word that is not among `choices`, naming the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {str(near[0])!r}?" if near else ""
        raise SettingsError(f"{name} has {value!r}; it must be one of {', '.join(choices)}{hint}")


def shown(name: str, value: object) -> str:
    """A value of the wrong type as an error may repeat it: not at all where it could be a misplaced secret."""
    return f"of type {type(value).__name__}" if name.startswith(_MAY_HOLD_SECRETS) else repr(value)
