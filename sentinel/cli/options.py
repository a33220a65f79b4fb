"""The options that commands share."""

import os
from pathlib import Path
from typing import Annotated

import typer

from sentinel import config, places

Home = Annotated[
    Path | None,
    typer.Option(
        "--home", help="Where database and run directories live; else SENTINEL_HOME, else the XDG state folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print strict JSON instead of text.")]


def places_of(home: Path | None) -> places.Places:
    """All paths of the home that the command line or the environment names."""
    return places.find(os.environ, home)


def database_url(found: places.Places) -> str:
    """The run database of a home, as `store.url` or the default says. Raises SettingsError."""
    from sentinel.store.location import url_of

    return url_of(found, config.load_client(None, os.environ).store)
