"""Start Debian's Alertmanager as a child process on the loopback interface, and ask it."""

import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.waiting import until

CONFIG = """\
route: {{receiver: test, group_by: [alertname, run_id], group_wait: 0s, group_interval: 1s}}
receivers:
  - name: test
    webhook_configs: [{{url: '{receiver}', send_resolved: true}}]
"""


class AlertmanagerServer:
    """`with AlertmanagerServer(...) as server:` waits until it answers, and ends it afterwards.

    It passes on what it is told to `receiver`, the URL of a webhook.
    """

    def __init__(self, program: str, folder: Path, receiver: str) -> None:
        self._program = program
        self._folder = folder
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        (folder / "alertmanager.yml").write_text(CONFIG.format(receiver=receiver))

    def __enter__(self) -> Self:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'alertmanager.yml'}",
                    f"--storage.path={self._folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                    "--cluster.listen-address=",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._is_ready, 30.0, "Alertmanager answers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def active(self) -> list[dict[str, Any]]:
        """The alerts that fire now."""
        answer = httpx.get(f"{self.url}/api/v2/alerts", params={"active": "true"}, timeout=10.0)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()
        return found

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
