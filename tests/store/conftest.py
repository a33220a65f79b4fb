"""The databases that the store's tests run on: SQLite in a file, and a PostgreSQL server of the tests' own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import postgres_server
from tests.postgres_server import Server
from tests.store.building import url_in

KINDS = ("sqlite", pytest.param("postgresql", marks=pytest.mark.service))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """One server for the whole session of this process."""
    with postgres_server.running() as server:
        yield server


@pytest.fixture(params=KINDS)
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """`new_url()` names an empty database, another one at each call; the test runs once per kind of database."""
    with ExitStack() as used:

        def make() -> str:
            if request.param == "postgresql":
                return used.enter_context(request.getfixturevalue("postgres").database())
            folder = tmp_path / f"database-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return url_in(folder)

        yield make


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    """An empty database; the test runs once per kind of database."""
    return new_url()
