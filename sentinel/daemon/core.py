"""What nearly every part of the daemon works on."""

from typing import NamedTuple

from sentinel.daemon.metrics import Metrics
from sentinel.daemon.rank import Fleet
from sentinel.daemon.writer import Writer


class Core(NamedTuple):
    """Who is there, the way into the database, and the numbers for Prometheus."""

    fleet: Fleet
    writer: Writer
    metrics: Metrics
