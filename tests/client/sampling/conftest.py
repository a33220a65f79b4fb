"""A daemon that speaks the wire, and a budget that lets every signal be taken at every fourth step."""

import pytest

from tests.client.conftest import daemon, home

__all__ = ["daemon", "home"]

EVERY = 4  # warm-up ends with step 3


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 4 is sampled for certain: nothing has been spent before it. Later ones as far as the budget allows."""
    monkeypatch.setenv("SENTINEL_SAMPLING__EVERY_STEPS", str(EVERY))
    monkeypatch.setenv("SENTINEL_SAMPLING__COST_RATIO", "1.0")
