"""Say which run this is and where it comes from: run id, name, provenance."""

import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sentinel.client import environment, plain
from sentinel.client.rank import Rank
from sentinel.errors import MisuseError

_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# No vowels, no 0/o or 1/l: never a word, never misread.
_LETTERS = "23456789bcdfghjkmnpqrstvwxz"

MAX_ARGV_BYTES = 16 * 1024
MAX_CONFIG_BYTES = 64 * 1024
MAX_NAME_CHARACTERS = 64


class Provenance(NamedTuple):
    """What is stored with the run so that it can be told apart and repeated (fields as in `RunStart`)."""

    host: str
    argv: list[str]
    cwd: str
    git: dict[str, Any]  # {"commit", "dirty"}; empty outside a repository
    packages: dict[str, str]
    config: dict[str, Any]
    devices: list[str]


def resolve_run_id(given: str | None, environ: Mapping[str, str], rank: Rank) -> str:
    """The run's id: the argument, SENTINEL_RUN_ID, torchrun's id, else a new one that all local ranks derive alike.

    Raises MisuseError for an id that is not 1 to 64 of letters, digits, `.`, `_`, `-`.
    """
    if given is not None:
        return check_run_id(given, "run_id")
    if environ.get("SENTINEL_RUN_ID"):
        return check_run_id(environ["SENTINEL_RUN_ID"], "SENTINEL_RUN_ID")
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    if elastic not in {"", "none"}:
        return elastic if _is_valid(elastic) else _cleaned(elastic)
    if rank.world_size > 1:
        return _common_id(environ)
    return random_run_id()


def check_run_id(run_id: object, source: str) -> str:
    """The id itself. Raises MisuseError naming `source` if it cannot be a file's name and a URL's part."""
    if isinstance(run_id, str) and _is_valid(run_id):
        return run_id
    raise MisuseError(
        f"{source} is {run_id!r}; it must be 1 to 64 characters out of letters, digits, '.', '_' and '-', "
        "with a letter or a digit among them"
    )


def random_run_id() -> str:
    """Short, new, and sorted by time among others: 20261130-2031-k3f9."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M}-" + "".join(secrets.choice(_LETTERS) for _ in range(4))


def new_nonce() -> str:
    """New in each process lifetime: tells the daemon which attempt this is."""
    return secrets.token_hex(8)


def default_name(argv: list[str]) -> str:
    """The script's name without its ending; the folder's for `python -m package`; "python" where there is neither."""
    script = Path(argv[0]) if argv and argv[0] not in {"", "-c", "-m"} else Path("python")
    stem = script.parent.name if script.stem == "__main__" else script.stem
    return (stem or "python")[:MAX_NAME_CHARACTERS]


def provenance(config: Mapping[str, Any] | None = None) -> Provenance:
    """Everything that `attach` stores with a run. Waits at most 2 s for git; trouble makes it shorter, not fail."""
    return Provenance(
        host=socket.gethostname(),
        argv=plain.argv(sys.argv, MAX_ARGV_BYTES),
        cwd=_working_folder(),
        git=environment.git(),
        packages=environment.packages(),
        config=plain.data(config or {}, MAX_CONFIG_BYTES),
        devices=environment.devices(),
    )


def _common_id(environ: Mapping[str, str]) -> str:
    """The same for all ranks that one launcher started on this node, another for its next start."""
    parent = os.getppid()
    parts = [
        _boot_id(),
        str(parent),
        _start_of(parent),
        environ.get("MASTER_ADDR", ""),
        environ.get("MASTER_PORT", ""),
    ]
    digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).digest()
    tail = "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:6])
    return f"{datetime.fromtimestamp(float(parts[2] or 0), UTC):%Y%m%d-%H%M}-{tail}"


def _start_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _is_valid(run_id: str) -> bool:
    return _VALID_ID.fullmatch(run_id) is not None and run_id.strip(".-_") != ""


def _cleaned(text: str) -> str:
    """A launcher's id is not ours to refuse: keep what is readable, and a hash so that two stay apart."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:48]
    return f"{readable or 'run'}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""  # it was removed under us
