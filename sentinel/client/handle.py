"""Refer to what the user owns without keeping it alive, where that is possible."""

import weakref
from typing import Any


class Handle:
    """A weak reference where the object allows one, else a strong one."""

    __slots__ = ("_reference", "_strong")

    def __init__(self, target: Any) -> None:
        self._strong: Any = None
        try:
            self._reference: weakref.ref[Any] | None = weakref.ref(target)
        except TypeError:
            self._reference = None
            self._strong = target

    def __call__(self) -> Any:
        return self._strong if self._reference is None else self._reference()
