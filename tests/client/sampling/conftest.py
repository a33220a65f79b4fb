"""A home of its own and a daemon that speaks the wire."""

from tests.client.conftest import daemon, home

__all__ = ["daemon", "home"]
