"""A home of its own, a daemon that speaks the wire, and each framework in turn."""

import pytest

from tests.client.conftest import daemon, home
from tests.hooks.frameworks import FRAMEWORKS, Framework, load

__all__ = ["daemon", "home"]


@pytest.fixture(params=FRAMEWORKS)
def framework(request) -> Framework:
    return load(request.param)
