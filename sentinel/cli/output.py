"""Print for a person or for a program: one console, one way to write JSON."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES = 110  # columns when nobody's terminal says otherwise


def console() -> "Console":
    """For standard output. Colours and the width of the terminal where there is one, plain text in a pipe."""
    from rich.console import Console

    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(file=sys.stdout, highlight=False, width=None if wide else _WIDTH_OF_FILES)


def print_json(value: Any) -> None:
    """One strict JSON document on standard output."""
    from sentinel.store.strict_json import dumps

    print(dumps(value, indent=2))
