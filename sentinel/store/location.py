"""Decide where the run database of a home lies."""

import hashlib
import os
from pathlib import Path

from sentinel.places import Places, is_network, make_private


def url_of(places: Places, configured: str = "") -> str:
    """The database URL: what `store.url` says, else a SQLite file in the home.

    A home on a network file system gets a file on this node, because SQLite's locks are not safe there; whoever
    starts the daemon warns about it (`is_elsewhere`).
    """
    if configured:
        return configured
    return f"sqlite:///{_node_local(places) if is_elsewhere(places) else places.database}"


def is_elsewhere(places: Places) -> bool:
    """Whether the database cannot lie in the home."""
    return is_network(places.home)


def _node_local(places: Places) -> Path:
    # /var/tmp outlives a reboot; the name is hashed so that two homes never share a file.
    folder = Path("/var/tmp") / f"sentinel-{os.getuid()}"  # noqa: S108 -- made private before use
    make_private(folder)
    name = hashlib.sha256(os.fsencode(places.home)).hexdigest()[:24]
    return folder / f"{name}.db"
