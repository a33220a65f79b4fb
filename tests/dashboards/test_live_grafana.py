"""Opt-in: push twice to a Grafana that somebody runs, named by two variables. It leaves its folder there."""

import os
import uuid
from pathlib import Path

import pytest

from sentinel.cli.grafana import Change, Note, Server, annotate, push, read_token
from tests.dashboards import expressions

URL = os.environ.get("SENTINEL_TEST_GRAFANA_URL", "")
TOKEN_FILE = os.environ.get("SENTINEL_TEST_GRAFANA_TOKEN_FILE", "")

pytestmark = pytest.mark.skipif(
    not (URL and TOKEN_FILE), reason="SENTINEL_TEST_GRAFANA_URL and SENTINEL_TEST_GRAFANA_TOKEN_FILE are not set"
)


@pytest.fixture
def server() -> Server:
    return Server(URL, read_token(Path(TOKEN_FILE)))


def test_dashboards_are_there_once(server: Server) -> None:
    pages = list(expressions.pages().values())
    first, second = (push(server, pages, "sentinel: test") for _ in range(2))
    assert first.keys() == second.keys() == {"sentinel-run", "sentinel-machine", "sentinel-itself"}
    assert Change.CREATED not in second.values()


def test_annotations_are_there_once(server: Server) -> None:
    note = Note("i-1", f"test-{uuid.uuid4().hex}", 1_700_000_000_000, 1_700_000_060_000, "a test of sentinel")
    assert annotate(server, [note]) == {"i-1": Change.CREATED}
    assert annotate(server, [note]) == {"i-1": Change.UNCHANGED}
