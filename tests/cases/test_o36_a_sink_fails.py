"""O36: an exporter that raises on NaN killed training (pytorch#31855, tacotron2#549). Here whatever raises, the loop
goes on, and a NaN is stored, counted and displayed.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.end_to_end.jobs import ROOT, Home, Job, must_balance, must_be_whole
from tests.end_to_end.scripts.broken_daemon import EVERY
from tests.end_to_end.scripts.broken_parts import PARTS
from tests.waiting import until

NAN_LOSS_AT = 60
BREAK_EVERY = 100
BLOCKED_SECONDS = 0.5


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path) as opened:
        yield opened


def test_whatever_raises_in_the_training_process_stays_out_of_the_loop(home: Home) -> None:
    job = home.start("broken_parts")
    job.finish(120)
    clean = job.said("clean")
    for part in PARTS:
        said = job.said(part.replace(" ", "-"))
        assert said["raised"] > 0, f"{part} was never called"
        assert said["digest"] == clean, part
    assert "Traceback" not in job.errors
    assert [line for line in job.told if "internal error in" in line], "nothing was told"


def test_with_failing_sinks_in_the_daemon_training_goes_on_and_every_loss_is_counted(tmp_path: Path) -> None:
    with Home(tmp_path, SENTINEL_DAEMON__AUTOSTART="false") as home, _broken_daemon(home):
        job = home.start("steady", "--break-every", str(BREAK_EVERY), "--nan-loss-at", str(NAN_LOSS_AT))
        until(lambda: home.highest_step() > 2 * BREAK_EVERY, 60.0, "records are stored in spite of all")
        end = _finish(job)
        found = home.ended()
    (books,) = found["conservation"]
    refused = end["step"] // EVERY
    assert books["dropped_by_reason"] == {"unexplained": refused}
    must_balance(found, dropped=refused)
    degraded = {one["evidence"]["part"] for one in found["incidents"] if one["kind"] == "sentinel_degraded"}
    assert degraded == {"metrics", "detector loss_spike"}
    assert "nonfinite_loss" in {one["kind"] for one in found["incidents"]}


def test_a_nan_is_stored_counted_and_displayed(home: Home) -> None:
    job = home.start("steady", "--break-every", str(BREAK_EVERY), "--nan-loss-at", str(NAN_LOSS_AT))
    until(lambda: home.highest_step() > BREAK_EVERY + 5, 60.0, "both NaNs are stored")
    url = home.places.targets.read_text()
    address = f"http://{json.loads(url)[0]['targets'][0]}"
    metrics = httpx.get(f"{address}/metrics", timeout=10).text
    page = httpx.get(address, timeout=10)
    _finish(job)
    row = next(row for row in home.steps() if row["step"] == NAN_LOSS_AT + 1)
    assert math.isnan(row["loss"])
    assert math.isnan(row["grad_norm"])
    losses = next(line for line in metrics.splitlines() if "sentinel_nonfinite_total" in line and '"loss"' in line)
    assert losses.endswith(" 1.0"), losses
    values = {line.rpartition(" ")[2] for line in metrics.splitlines() if not line.startswith("#")}
    assert "NaN" not in values
    assert page.status_code == 200
    exported = home.cli("export", "latest").stdout.splitlines()
    (shown,) = [each for each in map(json.loads, exported) if each["step"] == NAN_LOSS_AT + 1]
    assert shown["loss"] is None
    assert shown["nonfinite"]["loss"] == "nan"
    told = home.cli("postmortem", "latest")
    assert told.returncode == 0, told.stderr
    assert f"loss is nan at step {NAN_LOSS_AT + 1}" in told.stdout
    assert json.loads(home.cli("postmortem", "latest", "--json").stdout)["incidents"]


def test_on_a_full_disk_training_goes_on_and_nothing_is_lost_once_there_is_room(home: Home) -> None:
    job = home.start("steady", "--break-every", str(BREAK_EVERY))
    daemon = home.daemon()
    until(lambda: home.highest_step() > 20, 60.0, "records are stored")
    whole = daemon.rlimit(psutil.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in home.path.iterdir() if path.name.startswith("sentinel.db"))
    daemon.rlimit(psutil.RLIMIT_FSIZE, (largest + 4096, whole[1]))
    address = json.loads(home.places.targets.read_text())[0]["targets"][0]
    ready = f"http://{address}/-/ready"
    until(lambda: httpx.get(ready, timeout=10).status_code == 503, 30.0, "the disk is full")
    before = home.stored()
    assert job.process.poll() is None
    daemon.rlimit(psutil.RLIMIT_FSIZE, whole)
    until(lambda: home.stored() > before + 50, 10.0, "records flow again")
    end = _finish(job)
    found = home.ended()
    assert found["run"]["steps"] == end["step"]
    must_balance(found, dropped=0)
    must_be_whole(home.steps())


def _finish(job: Job) -> Any:
    job.tell("stop")
    end = job.finish()
    assert end["broken"], "no NaN was there"
    assert end["finite"]
    assert end["max_seconds"] < BLOCKED_SECONDS
    assert "Traceback" not in job.errors
    return end


class _broken_daemon:
    """Started as a person starts one."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def __enter__(self) -> None:
        command = [sys.executable, "-m", "tests.end_to_end.scripts.broken_daemon"]
        with (self._home.folder / "broken.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._home.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(self._home.places.socket.exists, 60.0, "the daemon listens")

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait(10)
