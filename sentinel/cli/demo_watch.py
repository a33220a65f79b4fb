"""Keep something to look at for `sentinel demo --watch`: a daemon that stays, and a run that goes on until Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel.errors import DaemonRunningError, PermanentError

if TYPE_CHECKING:
    from sentinel.demo.plan import Plan

LEAVE_SECONDS = 15.0  # most time for the daemon to finish what it accepted
_ANOTHER_RUNS = 3  # exit code of a daemon that found another on its home
_OTHER_HOME = ("SENTINEL_HOME", "SENTINEL_MODE", "SENTINEL_RUN_ID", "SENTINEL_SETTINGS")


@contextmanager
def sidecar(home: Path) -> Iterator[str]:
    """A daemon of our own for this home, and its address. It ends with the block, having written all it accepted.

    Raises DaemonRunningError if the home has one already, PermanentError if none can be started.
    """
    home.mkdir(parents=True, exist_ok=True)
    log = home / "daemon.log"
    environ = {name: value for name, value in os.environ.items() if name not in _OTHER_HOME}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sentinel.cli", "daemon", "--home", str(home)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,  # Ctrl-C is for us; the daemon leaves last
        )
    try:
        yield _address(process, home, log)
    finally:
        process.terminate()
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _address(process: "subprocess.Popen[str]", home: Path, log: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if line:
        return str(json.loads(line)["url"])
    if process.wait(LEAVE_SECONDS) == _ANOTHER_RUNS:
        raise DaemonRunningError(f"a daemon of {home} is up already; wait until it has left, or use another --out")
    raise PermanentError(f"the daemon did not start; see {log}")


def keep_going(plan: "Plan", home: Path) -> None:
    """Train under sentinel until Ctrl-C; the run that is going then ends in order. A second Ctrl-C ends at once."""
    from sentinel.demo.scenario import again

    enough = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def end(_number: int, _frame: Any) -> None:
        enough.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, end)
    try:
        again(plan, home, lambda _variant, _step, _loss: None, enough.is_set)
    finally:
        signal.signal(signal.SIGINT, before)
