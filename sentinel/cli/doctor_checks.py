"""The checks of `sentinel doctor`. Each looks at one thing, changes nothing, and says what to do."""

import os
import platform
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from sentinel import __version__, config
from sentinel.errors import NoSuchRunError, SchemaTooOldError, SentinelError
from sentinel.places import Places, file_system, is_network

DISTRIBUTION = "train-sentinel"
LONGEST_SOCKET_BYTES = 107  # sun_path, less its final zero
LEAST_RING_BYTES = 64 * 2**20
LEAST_DISK_BYTES = 2**30


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Check(NamedTuple):
    """What was found."""

    name: str
    status: Status
    text: str


def examine(places: Places) -> list[Check]:
    """Every check, in the order in which one would put things right."""
    checks: list[Check] = []
    for look in (_versions, _packages, _name_clash, _settings, _home, _socket, _database, _memory, _daemon, _devices):
        name = look.__name__.removeprefix("_").replace("_", " ")
        try:
            checks.extend(look(places))
        except (SentinelError, OSError) as error:
            checks.append(Check(name, Status.FAILED, str(error)))
    return checks


def _versions(places: Places) -> Iterator[Check]:
    del places
    yield Check("sentinel", Status.OK, f"{__version__} at {Path(__file__).parents[1]}")
    yield Check("python", Status.OK, f"{platform.python_version()} at {sys.executable}")


def _packages(places: Places) -> Iterator[Check]:
    """What the distribution asks for, by extra. torch is never imported for it: that takes seconds."""
    del places
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Check("packages", Status.WARNING, f"{DISTRIBUTION} is not installed but runs from a folder")
        return
    for extra in ("", "torch", "daemon"):
        names = [name for line in wanted if (name := _required(line, extra))]
        yield _extra(extra, {name: _version(name) for name in names})


def _extra(extra: str, found: dict[str, str | None]) -> Check:
    missing = [name for name, version in found.items() if version is None]
    name = f"extra [{extra}]" if extra else "packages"
    if not missing:
        return Check(name, Status.OK, ", ".join(f"{each} {version}" for each, version in found.items()))
    remedy = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install --force-reinstall {DISTRIBUTION}"
    lost = {
        "torch": "no training loop can be watched from this environment",
        "daemon": "no daemon can be started here",
    }
    status = Status.WARNING if extra else Status.FAILED
    return Check(name, status, f"missing {', '.join(missing)}: {lost.get(extra, 'nothing works')}; {remedy}")


def _required(line: str, extra: str) -> str | None:
    name = re.match(r"[A-Za-z0-9._-]+", line)
    of_extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
    return name[0] if name and (of_extra[1] if of_extra else "") == extra else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _name_clash(places: Places) -> Iterator[Check]:
    """PyPI's `sentinel` is another package with the same import name."""
    del places
    for found in metadata.distributions(name="sentinel"):
        owned = [str(file) for file in found.files or () if str(file) in {"sentinel/__init__.py", "sentinel.py"}]
        text = f"the package `sentinel` {found.version} from PyPI is installed too"
        if owned:
            text += f" and owns {owned[0]}: pip uninstall sentinel, then pip install --force-reinstall {DISTRIBUTION}"
            yield Check("name clash", Status.FAILED, text)
        else:
            yield Check("name clash", Status.WARNING, f"{text}; pip uninstall sentinel")
        return
    yield Check("name clash", Status.OK, "no other package is called sentinel")


def _settings(places: Places) -> Iterator[Check]:
    del places
    settings = config.load_client(None, os.environ)
    source = os.environ.get("SENTINEL_SETTINGS") or "defaults and environment"
    yield Check("settings", Status.OK, f"{source}, mode {settings.mode}")


def _home(places: Places) -> Iterator[Check]:
    folder = places.home
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{places.home} cannot be written; set SENTINEL_HOME to a folder of yours"
        yield Check("home", Status.FAILED, text)
        return
    made = "" if places.home.exists() else " (made on first use)"
    yield Check("home", Status.OK, f"{places.home} is writable{made}")
    free = shutil.disk_usage(folder).free
    status = Status.OK if free >= LEAST_DISK_BYTES else Status.WARNING
    yield Check("disk", status, f"{free / 2**30:.1f} GiB free")
    kind = file_system(places.home) or "an unknown file system"
    if is_network(places.home):
        yield Check("home local", Status.WARNING, f"{kind} is a network file system; the database lies on this node")
    else:
        yield Check("home local", Status.OK, f"on {kind}")


def _socket(places: Places) -> Iterator[Check]:
    length = len(os.fsencode(places.socket))
    if length > LONGEST_SOCKET_BYTES:
        text = f"{places.socket} has {length} bytes, more than {LONGEST_SOCKET_BYTES}; set XDG_RUNTIME_DIR shorter"
        yield Check("socket", Status.FAILED, text)
        return
    if places.runtime.exists():
        found = places.runtime.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            text = f"{places.runtime} must be a directory of yours with mode 0700; remove it or set XDG_RUNTIME_DIR"
            yield Check("socket", Status.FAILED, text)
            return
    yield Check("socket", Status.OK, f"{places.socket} ({length} of {LONGEST_SOCKET_BYTES} bytes)")


def _database(places: Places) -> Iterator[Check]:
    from sentinel.cli.options import database_url
    from sentinel.store.history import History

    try:
        with History(database_url(places)) as history:
            yield Check("database", Status.OK, f"{history.place} holds {len(history.runs())} runs")
    except NoSuchRunError:
        yield Check("database", Status.OK, "none yet; the first run makes it")
    except SchemaTooOldError as error:
        yield Check("database", Status.WARNING, str(error))  # whatever runs next upgrades it


def _memory(places: Places) -> Iterator[Check]:
    import psutil

    del places
    snapshot = config.load_client(None, os.environ).snapshot
    available = psutil.virtual_memory().available
    ring = int(available * snapshot.memory_ratio)
    text = (
        f"{ring / 2**30:.1f} GiB for the RAM ring "
        f"(snapshot.memory_ratio {snapshot.memory_ratio:g} of {available / 2**30:.1f} GiB available)"
    )
    if ring < LEAST_RING_BYTES:
        yield Check("memory", Status.WARNING, f"{text}; a model that does not fit cannot be rolled back")
    else:
        yield Check("memory", Status.OK, text)


def _daemon(places: Places) -> Iterator[Check]:
    from sentinel.cli.runs import daemon_url

    if not places.socket.exists():
        yield Check("daemon", Status.OK, "none is running; attach starts one")
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1.0)
            client.connect(str(places.socket))
    except OSError as error:
        text = f"{places.socket} does not answer ({error.strerror or error}); the next daemon cleans it up"
        yield Check("daemon", Status.WARNING, text)
        return
    url = daemon_url(places)
    yield Check("daemon", Status.OK, f"reachable at {url}" if url else "reachable, without HTTP (no free port)")


def _devices(places: Places) -> Iterator[Check]:
    del places
    handles = "process handles notice a death at once" if hasattr(os, "pidfd_open") else "deaths are polled for"
    yield Check("processes", Status.OK, handles)
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except ImportError:
        yield Check("gpu", Status.OK, "nvidia-ml-py is not installed, so nothing of a GPU is measured")
    except Exception as error:  # noqa: BLE001 - NVML raises its own hierarchy; any of it means the same here
        yield Check("gpu", Status.OK, f"no GPU here ({error})")
    else:
        yield Check("gpu", Status.OK, f"{count} NVIDIA devices")
