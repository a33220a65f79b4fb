"""Run training scripts as child processes in a home of their own, and read what they left in its run database."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from sentinel import places, wire
from sentinel.errors import NoSuchRunError
from sentinel.postmortem.report import report
from sentinel.records import ControlReply, ControlRequest
from sentinel.store.history import History
from tests.waiting import until

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0  # for a process to import torch and begin on a machine with other work


class Job:
    """One training process. It says things by files in its folder, and hears by files too."""

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def said(self, name: str, seconds: float = START_SECONDS) -> Any:
        """Wait until the script has said `name`, and return what it said."""
        path = self.folder / name

        def answer() -> bool:
            ended = self.process.poll() is not None
            if ended and not path.exists():
                raise AssertionError(f"the script ended with {self.process.returncode}: {self.errors[-3000:]}")
            return path.exists()

        until(answer, seconds, f"the script says {name!r}")
        return json.loads(path.read_text())

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def finish(self, seconds: float = START_SECONDS) -> Any:
        """Wait for an orderly end; what it said as `end`."""
        code = self.wait(seconds)
        assert code == 0, f"exit code {code}: {self.errors[-3000:]}"
        return self.said("end")

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def told(self) -> list[str]:
        """What sentinel said on stderr, line by line."""
        return [line for line in self.errors.splitlines() if line.startswith("sentinel: ")]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


class Home:
    """A home, its jobs and its daemons. Ends everything that was started in it, and nothing else."""

    def __init__(self, folder: Path, home: Path | None = None, **variables: str) -> None:
        self.folder = folder
        self.path = home or folder / "home"
        # A Unix socket's path is short; pytest's folders are not.
        self._runtime = tempfile.mkdtemp(prefix="sentinel-test-")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SENTINEL_")}
        self.environ = {
            **kept,
            "OMP_NUM_THREADS": "1",
            "SENTINEL_HOME": str(self.path),
            "XDG_RUNTIME_DIR": self._runtime,
            "SENTINEL_HTTP__PORT": "0",
            **variables,
        }
        self.places = places.find(self.environ)
        self._jobs: list[Job] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.end()
        for daemon in self.daemons():
            with contextlib.suppress(psutil.NoSuchProcess):
                daemon.kill()
        until(lambda: not self.daemons(), 10.0, "the daemons are gone")
        shutil.rmtree(self._runtime, ignore_errors=True)

    def start(self, script: str, *arguments: str, **variables: str) -> Job:
        """Start `tests.end_to_end.scripts.<script>`; its first argument is its own folder."""
        folder = self.folder / f"{script}-{len(self._jobs)}"
        command = [sys.executable, "-m", f"tests.end_to_end.scripts.{script}", str(folder), *arguments]
        job = Job(command, folder, {**self.environ, **variables})
        self._jobs.append(job)
        return job

    def start_daemon(self) -> subprocess.Popen[bytes]:
        """One that leaves after its last run, as `attach` starts it."""
        command = [sys.executable, "-m", "sentinel.cli", "daemon", "--auto", "--home", str(self.path)]
        with (self.folder / "daemon.out").open("ab") as out:
            return subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def daemons(self) -> list[psutil.Process]:
        """Living daemons that were started by a trainer of this home."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                ours = "daemon" in words and str(self.path) in words
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def daemon(self, seconds: float = START_SECONDS) -> psutil.Process:
        """The one daemon of this home, once it answers."""
        until(lambda: self.ask("status") is not None, seconds, "a daemon answers")
        (daemon,) = self.daemons()
        return daemon

    def ask(self, verb: str, run: str = "latest", **arguments: Any) -> ControlReply | None:
        """What the daemon answers over its control socket; None if there is none or it hangs up."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(30.0)
            try:
                client.connect(str(self.places.socket))
                client.sendall(wire.encode(ControlRequest(wire.VERSION, verb, run, arguments)))
                frames = wire.FrameReader()
                while data := client.recv(1 << 16):
                    for body in frames.feed(data):
                        message = wire.decode_from_daemon(body)
                        assert isinstance(message, ControlReply)
                        return message
            except (OSError, TimeoutError):
                return None
        return None

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`sentinel WORDS...` in this home, as a person types it."""
        command = [sys.executable, "-m", "sentinel.cli", *words]
        return subprocess.run(
            command, cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def database(self) -> str:
        return f"sqlite:///{self.places.database}"

    def history(self) -> History:
        """Close it, or use it as a context manager."""
        return History(self.database)

    def report(self, run_id: str = "latest") -> dict[str, Any]:
        """What `sentinel postmortem --json` prints, with non-finite numbers as such."""
        with self.history() as history:
            return report(history, history.resolve(run_id))

    def steps(self, run_id: str = "latest", *, live_only: bool = False) -> list[dict[str, Any]]:
        """The rows that `sentinel export` writes."""
        with self.history() as history:
            return list(history.steps(history.resolve(run_id), live_only=live_only))

    def highest_step(self, run_id: str = "latest") -> int:
        """Of the records in the database so far, whatever their generation; 0 without any."""
        try:
            return max((row["step"] for row in self.steps(run_id)), default=0)
        except NoSuchRunError:
            return 0

    def stored(self, run_id: str = "latest") -> int:
        """How many messages the database holds."""
        try:
            with self.history() as history:
                return sum(row["stored"] for row in history.conservation(history.resolve(run_id)))
        except NoSuchRunError:
            return 0

    def ended(self, run_id: str = "latest", seconds: float = 30.0) -> dict[str, Any]:
        """The report once the run is over in the database."""
        until(lambda: self.report(run_id)["run"]["status"] != "running", seconds, "the run's end is stored")
        return self.report(run_id)


def must_balance(found: dict[str, Any], dropped: int | None = None) -> None:
    """Assert that produced = stored + dropped for every rank, nothing in flight; `dropped`: exactly so many."""
    assert found["conservation"], "no rank is known"
    for books in found["conservation"]:
        assert books["produced"] > 0, books
        assert books["in_flight"] == 0, books
        assert books["produced"] == books["stored"] + books["dropped"], books
        assert books["dropped"] == sum(books["dropped_by_reason"].values()), books
        assert dropped is None or books["dropped"] == dropped, books


def must_be_whole(rows: list[dict[str, Any]]) -> None:
    """Assert that live rows of one rank are the steps 1..N, each once, and that no key is there twice."""
    keys = [(row["attempt"], row["generation"], row["rank"], row["step"]) for row in rows]
    assert len(keys) == len(set(keys)), "a row is there twice"
    live = [row["step"] for row in rows if row["live"]]
    assert sorted(live) == list(range(1, len(live) + 1)), _holes(live)


def _holes(steps: list[int]) -> str:
    missing = sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))
    repeated = sorted({step for step in steps if steps.count(step) > 1})
    return f"steps missing {missing[:20]}, repeated {repeated[:20]}, last {max(steps, default=0)}"
