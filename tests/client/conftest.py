"""A home of its own and a daemon that speaks the wire, for every test of the client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sentinel import places
from sentinel.testing import FakeDaemon


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> places.Places:
    """Nothing outside tmp_path is touched, and no real daemon is started."""
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SENTINEL_DAEMON__AUTOSTART", "false")
    for name in (
        "SENTINEL_MODE",
        "SENTINEL_RUN_ID",
        "SENTINEL_SETTINGS",
        "RANK",
        "WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    # A busy machine may need longer to deliver what a test then counts.
    monkeypatch.setattr("sentinel.client.run.CLOSE_SECONDS", 10.0)
    torch.set_num_threads(1)
    found = places.find({"SENTINEL_HOME": str(tmp_path / "home"), "XDG_RUNTIME_DIR": str(tmp_path)})
    places.make_private(found.runtime)
    return found


@pytest.fixture
def daemon(home: places.Places) -> Iterator[FakeDaemon]:
    with FakeDaemon(home.socket) as fake:
        yield fake
