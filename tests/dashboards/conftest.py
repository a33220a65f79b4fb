"""What the tests of the dashboards share: the contract server listens on the loopback interface only."""

import pytest


@pytest.fixture(scope="session")
def httpserver_listen_address() -> tuple[str, int]:
    return ("127.0.0.1", 0)
