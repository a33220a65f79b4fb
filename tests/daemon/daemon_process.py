"""Start a real daemon as a child process, with a home and a runtime directory of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sentinel import places


class DaemonProcess:
    """`with DaemonProcess(tmp_path) as daemon:` waits until it is ready and ends it afterwards."""

    def __init__(self, home: Path, *arguments: str, **variables: str) -> None:
        self.home = home
        self.arguments = arguments
        # A Unix socket's path is short; pytest's folders are not.
        self._runtime = tempfile.mkdtemp(prefix="sentinel-test-")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SENTINEL_")}
        self.environ = {
            **kept,
            "SENTINEL_HOME": str(home),
            "XDG_RUNTIME_DIR": self._runtime,
            "SENTINEL_HTTP__PORT": "0",
            **variables,
        }
        self.places = places.find(self.environ)
        self.log = home.parent / f"{home.name}.log"
        self.process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        shutil.rmtree(self._runtime, ignore_errors=True)

    def start(self) -> None:
        """Start, or start again on the same home; wait for the ready line."""
        self.launch()
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the daemon did not get ready: {self.log_text()[-2000:]}"
        self.ready = json.loads(line)
        assert self.ready["ready"] is True

    def launch(self) -> None:
        self.home.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sentinel.cli", "daemon", *self.arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL
        self._close_pipe()

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.wait(15)

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        code = self.process.wait(seconds)
        self._close_pipe()
        return code

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._close_pipe()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def database(self) -> str:
        return f"sqlite:///{self.places.database}"

    def _close_pipe(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
