"""Where things live on this machine: the home, the sockets, the spools."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sentinel.errors import SettingsError

# Network file systems, by the type names of /proc/mounts: SQLite's locks are not safe there.
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "9p", "fuse.sshfs", "fuse.glusterfs", "afs"}
)


@dataclass(frozen=True, slots=True)
class Places:
    """All paths of one home. Making this object touches nothing on disk."""

    home: Path  # database, spools, run directories
    runtime: Path  # sockets and locks, 0700

    @property
    def database(self) -> Path:
        return self.home / "sentinel.db"

    @property
    def daemon_log(self) -> Path:
        return self.home / "daemon.log"

    @property
    def targets(self) -> Path:
        """Prometheus file_sd."""
        return self.home / "targets.json"

    @property
    def spools(self) -> Path:
        return self.home / "spool"

    @property
    def socket(self) -> Path:
        return self.runtime / f"{self._key}.sock"

    @property
    def lock(self) -> Path:
        return self.runtime / f"{self._key}.lock"

    def spool(self, run_id: str, rank: int, nonce: str) -> Path:
        """One file per rank and process lifetime; the name tells the daemon whose it is."""
        return self.spools / f"{run_id}.{rank}.{nonce}.spool"

    @property
    def _key(self) -> str:
        # A Unix socket's path ends at 107 bytes, so the home is hashed, never spelled.
        return hashlib.sha256(os.fsencode(self.home)).hexdigest()[:24]


def find(environ: Mapping[str, str], home: str | os.PathLike[str] | None = None) -> Places:
    """The places of `home`, else of SENTINEL_HOME, else of the XDG state directory. Touches nothing."""
    chosen = home or environ.get("SENTINEL_HOME") or _default_home(environ)
    return Places(home=Path(chosen).expanduser().absolute(), runtime=_runtime(environ))


def make_private(directory: Path) -> None:
    """Create a 0700 directory of ours. Raises SettingsError if somebody else owns it or others may enter it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SettingsError(
            f"{directory} must be a directory of yours with mode 0700; remove it or set XDG_RUNTIME_DIR"
        )


def file_system(path: Path) -> str:
    """The type name of the file system that holds `path` (nearest existing parent), "" if unknown."""
    while not path.exists() and path != path.parent:
        path = path.parent
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        _, mount_point, mount_kind, *_ = line.split(" ")
        mount_point = mount_point.replace("\\040", " ")
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, mount_kind
    return kind


def is_network(path: Path) -> bool:
    return file_system(path) in NETWORK_FILE_SYSTEMS


def _default_home(environ: Mapping[str, str]) -> str:
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME') or '~'}/.local/state"
    return f"{state}/sentinel"


def _runtime(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_RUNTIME_DIR")
    # 107 bytes less the file's name: a longer directory cannot hold a socket.
    if given and Path(given).is_dir() and os.access(given, os.W_OK) and len(os.fsencode(given)) < 60:
        return Path(given) / "sentinel"
    return Path(tempfile.gettempdir()) / f"sentinel-{os.getuid()}"
