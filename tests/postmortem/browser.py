"""A headless Chromium that tells what it logged, what it asked the network for, and how a page looks.

It is driven over a pipe (the DevTools protocol), so no port is opened; a name that it wanted to look up would fail.
"""

import base64
import fcntl
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe", "--disable-extensions"),
)


class View(NamedTuple):
    width: int
    dark: bool


class Browser:
    """`with Browser(program) as browser:`; one page at a time."""

    def __init__(self, program: str, seconds: float = 60.0) -> None:
        self._program = program
        self._seconds = seconds
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="sentinel-chromium-", ignore_cleanup_errors=True)
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; ours must not be in the way of either.
        high = [fcntl.fcntl(number, fcntl.F_DUPFD, 20) for number in (to_child, from_child)]
        self._process = subprocess.Popen(
            [self._program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=lambda: [os.dup2(number, place) for number, place in zip(high, (3, 4), strict=True)],  # noqa: PLW1509 -- one call, no lock
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number in (to_child, from_child, *high):
            os.close(number)
        targets = self._ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        self._folder.cleanup()

    def open(self, page: Path, view: View) -> None:
        """Load a file and wait until its plots are drawn."""
        self.look_as(view)
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        self.until("document.readyState === 'complete'")

    def look_as(self, view: View) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if view.dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=view.width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        deadline = time.monotonic() + self._seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """The whole page, or its top."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        found = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page: exceptions, console, log."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        found = []
        for event in self.events:
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in {"error", "warning", "assert"}:
                found.append(str(told["args"]))
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] in {"error", "warning"}:
                found.append(str(told["entry"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Whatever was asked of anybody, but the page's own file and what it carries in itself."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert any(url.startswith("file:") for url in urls), "the network was not watched"
        return [url for url in urls if not url.startswith(("data:", "blob:"))][1:]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._ask(method, self._session, **parameters)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if session:
            request["sessionId"] = session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + self._seconds
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has gone"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
