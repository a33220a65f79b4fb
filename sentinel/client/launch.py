"""Start a daemon beside the training process, and say why it ended if it did."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from sentinel.places import Places

MAX_STARTS = 5  # in a process's life
FIRST_PAUSE_SECONDS = 1.0  # before a second start; doubles with each
STARTING_SECONDS = 30.0  # after which a started daemon that does not answer is no longer waited for

_NEEDED = ("sqlalchemy", "starlette", "prometheus_client")
_ANOTHER_RUNS = 3  # exit code: another daemon holds the lock
_LOG_TAIL_BYTES = 4096

# What a launcher tells a rank; a daemon that believed it would take itself for one. CUDA_VISIBLE_DEVICES would hide
# devices from its probes, and a coverage run would measure it.
_NOT_INHERITED = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "COVERAGE_PROCESS_START",
    }
)
_NOT_INHERITED_PREFIXES = ("MASTER_", "TORCHELASTIC_", "ROLE_")


class _Sidecar(subprocess.Popen[bytes]):
    """Outlives the training on purpose: no warning that it still runs, under `python -W error` or `-X dev`."""

    def __del__(self) -> None:
        pass


class Launcher:
    """Starts at most five daemons, one at a time, never waits for one, and leaves no zombie.

    `trouble(what, text)` is told that no daemon can be had ("daemon"), or that ours ended with an error
    ("daemon_ended"). Times are of one monotonic clock.
    """

    def __init__(
        self,
        places: Places,
        settings_path: str | None,
        environ: Mapping[str, str],
        trouble: Callable[[str, str], None],
    ) -> None:
        self._places = places
        self._settings_path = settings_path
        self._environ = environ
        self._trouble = trouble
        self._process: _Sidecar | None = None
        self._log_start = 0
        self._starts = 0
        self._started_at = 0.0
        self._not_before = 0.0
        self.hopeless = False  # no daemon can be had from here
        self.failing = False  # the last one that was started ended with an error

    def starting(self, now: float) -> bool:
        """Whether a daemon was started that may still come up."""
        return self._process is not None and now - self._started_at < STARTING_SECONDS

    def start(self, now: float) -> None:
        """Start a daemon, unless one that we started lives, a pause is due, or it is hopeless. Never raises."""
        self.look(now)
        if self._process is not None or self.hopeless or now < self._not_before:
            return
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            self._give_up(
                f"no daemon: {', '.join(missing)} not installed; pip install 'train-sentinel[daemon]' "
                "(training goes on unprotected)"
            )
        elif self._starts >= MAX_STARTS:
            self._give_up(
                f"no daemon: it was started {MAX_STARTS} times and is gone again; see {self._places.daemon_log}"
            )
        else:
            self._start(now)

    def look(self, now: float) -> None:
        """Reap a daemon that ended and tell of its error. Never blocks, never raises."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._process = None
        self._not_before = now + FIRST_PAUSE_SECONDS * 2 ** (self._starts - 1)
        self.failing = code not in {0, _ANOTHER_RUNS}
        if self.failing:
            self._trouble("daemon_ended", self._obituary(code))

    def forget(self) -> None:
        """Leave a running daemon to itself: it ends on its own after its last run."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            # The standard library polls these whenever it starts a process, so that none stays a zombie for long.
            getattr(subprocess, "_active", []).append(process)

    def _start(self, now: float) -> None:
        command = [sys.executable, "-m", "sentinel.cli", "daemon", "--auto", "--home", str(self._places.home)]
        if self._settings_path is not None:
            command += ["--settings", str(Path(self._settings_path).absolute())]
        self._starts += 1
        self._started_at = now
        with _open_log(self._places.daemon_log) as log:
            self._log_start = log.seek(0, os.SEEK_END) if log.seekable() else 0
            try:
                self._process = _Sidecar(
                    command,
                    cwd="/",
                    env=daemon_environment(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    close_fds=True,
                    start_new_session=True,
                )
            except OSError as error:
                self._give_up(f"no daemon: {sys.executable} cannot be started: {error.strerror or error}")

    def _give_up(self, text: str) -> None:
        self.hopeless = True
        self._trouble("daemon", text)

    def _obituary(self, code: int) -> str:
        if code < 0:
            return f"the daemon was ended by signal {-code} ({signal.strsignal(-code)}); it is started again"
        return f"the daemon ended with code {code}: {self._last_words() or self._where_to_look()}"

    def _where_to_look(self) -> str:
        places = self._places
        if places.daemon_log.exists():
            return f"see {places.daemon_log}"
        return f"the home {places.home} cannot be written; set SENTINEL_HOME to a folder of yours"

    def _last_words(self) -> str:
        try:
            with self._places.daemon_log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _LOG_TAIL_BYTES))
                lines = log.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((_in_plain_words(line) for line in reversed(lines) if line.strip()), "")


def daemon_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The training process's variables without those that speak of its place in the job."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIXES)
    }


def _in_plain_words(line: str) -> str:
    """A log line for a person: of a JSON one what happened and why."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line.strip()
    if not isinstance(entry, dict):
        return line.strip()
    words = [str(entry[key]) for key in ("event", "error", "remedy", "reason") if entry.get(key)]
    return ": ".join(words) or line.strip()


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")
