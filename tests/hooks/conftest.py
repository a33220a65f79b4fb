"""A home of its own, a daemon that speaks the wire, and each framework in turn."""

import pytest

from tests.client.conftest import daemon, home
from tests.hooks.frameworks import FRAMEWORKS, Framework

__all__ = ["daemon", "home"]


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.name)
def framework(request) -> Framework:
    return request.param()
