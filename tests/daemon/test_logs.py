"""The daemon's log: one JSON object a line, bounded, and never a reason to fail."""

import json
import subprocess
import sys
from pathlib import Path

from sentinel.daemon import logs

CODE = """
import structlog
from sentinel.daemon import logs
logs.configure()
structlog.get_logger().warning("incident", run="r", step=3)
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("failed")
"""


def logged(stderr) -> int:
    return subprocess.run([sys.executable, "-c", CODE], stderr=stderr, timeout=60, check=False).returncode


def test_every_line_is_one_json_object(tmp_path):
    path = tmp_path / "daemon.log"
    with path.open("ab") as log:
        assert logged(log) == 0
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["event"], first["level"], first["run"], first["step"]) == ("incident", "warning", "r", 3)
    assert "ZeroDivisionError" in second["exception"]


def test_a_log_that_is_too_large_begins_anew(tmp_path):
    path = tmp_path / "daemon.log"
    path.write_bytes(b"x" * (logs.LOG_BYTES + 1))
    with path.open("ab") as log:
        assert logged(log) == 0
    assert len(path.read_text().splitlines()) == 2


def test_a_full_disk_under_the_log_is_no_failure():
    with Path("/dev/full").open("wb") as log:
        assert logged(log) in (0, 120)  # 120: Python's own last flush of stderr, after our code
