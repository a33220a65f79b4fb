"""Decide where the run database of a home lies."""

import hashlib
import os
import socket
from pathlib import Path

from sentinel.config import StoreSettings
from sentinel.errors import SettingsError
from sentinel.places import Places, is_network, make_private
from sentinel.store.engine import sqlite_file

DEFAULTS = StoreSettings()


def url_of(places: Places, store: StoreSettings = DEFAULTS) -> str:
    """The database URL: what `store.url` or the file `store.url_file` says, else a SQLite file in the home.

    A home on a network file system gets a file on this node, because SQLite's locks are not safe there; whoever
    starts the daemon warns about it (`is_elsewhere`). The URL may hold a password: show `engine.shown(url)` only.
    Raises SettingsError for a file without a URL.
    """
    if store.url_file:
        return _read(Path(store.url_file).expanduser())
    if store.url:
        return store.url
    return f"sqlite:///{_node_local(places) if _is_remote(places) else places.database}"


def is_elsewhere(places: Places, store: StoreSettings = DEFAULTS) -> bool:
    """Whether nobody chose a database and it cannot lie in the home."""
    return not (store.url or store.url_file) and _is_remote(places)


def owner_of(places: Places, url: str) -> str:
    """The name of this home's daemon in a database that others may share; "" for a file, which has one daemon."""
    return "" if sqlite_file(url) else f"{socket.gethostname()}:{places.home}"


def _is_remote(places: Places) -> bool:
    return is_network(places.home)


def _read(path: Path) -> str:
    try:
        found = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SettingsError(f"store.url_file {str(path)!r} cannot be read: {why}; name a readable file") from None
    if not found or "\n" in found:
        raise SettingsError(f"store.url_file {str(path)!r} must hold one line, the database URL")
    return found


def _node_local(places: Places) -> Path:
    # /var/tmp outlives a reboot; the name is hashed so that two homes never share a file.
    folder = Path("/var/tmp") / f"sentinel-{os.getuid()}"  # noqa: S108 -- made private before use
    make_private(folder)
    name = hashlib.sha256(os.fsencode(places.home)).hexdigest()[:24]
    return folder / f"{name}.db"
