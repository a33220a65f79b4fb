"""A home of its own and a daemon that speaks the wire, for the cases that need no more than the loop."""

from tests.client.conftest import daemon, home

__all__ = ["daemon", "home"]
