"""Start Debian's Prometheus as a child process on the loopback interface, and ask it."""

import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.waiting import until

CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: sentinel
    file_sd_configs: [{{files: ['{targets}'], refresh_interval: 1s}}]
"""


class PrometheusServer:
    """`with PrometheusServer(...) as server:` waits until it answers, and ends it afterwards."""

    def __init__(self, program: str, folder: Path, targets: Path) -> None:
        self._program = program
        self._folder = folder
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        (folder / "prometheus.yml").write_text(CONFIG.format(targets=targets))

    def __enter__(self) -> Self:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._is_ready, 30.0, "Prometheus answers")
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

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The result of an instant query: one entry per series."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": promql}, timeout=10.0)
        answer.raise_for_status()
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def samples(self, selector: str) -> list[tuple[float, float]]:
        """(unix time, value) as scraped in the last five minutes, of the one series that matches."""
        series = self.query(f"{selector}[5m]")
        assert len(series) == 1, series
        return [(float(time), float(value)) for time, value in series[0]["values"]]

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        try:
            return httpx.get(f"{self._url}/-/ready", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
