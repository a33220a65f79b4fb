"""`sentinel daemon`: run the sidecar in the foreground."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sentinel.cli.options import AsJson, Home, places_of

if TYPE_CHECKING:
    from sentinel.daemon.app import Ready

Auto = Annotated[bool, typer.Option("--auto", help="Leave by itself soon after the last run has ended.")]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="A sentinel.toml; else SENTINEL_SETTINGS, else defaults.")
]


def command(auto: Auto = False, settings: SettingsFile = None, as_json: AsJson = False, home: Home = None) -> None:
    """Run the sidecar that runs report to. Prints one JSON line when it is ready; logs JSON lines to stderr."""
    del as_json  # the line is JSON either way
    from sentinel.daemon import app, logs
    from sentinel.daemon.settings import load

    found = load(settings, os.environ)
    places = places_of(home)
    logs.configure()
    app.serve(places, found, auto=auto, ready=_say)


def _say(ready: "Ready") -> None:
    # Whoever started us may have closed our standard output, or have gone.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.write(json.dumps({"ready": True, "url": ready.url, "socket": ready.socket}) + "\n")
        sys.stdout.flush()
