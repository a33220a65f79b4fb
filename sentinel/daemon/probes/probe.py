"""What a probe of the machine is, and what it says."""

from typing import NamedTuple, Protocol


class Reading(NamedTuple):
    """One value, as it was measured. Of a counter: what the system itself has counted so far."""

    name: str  # of the metric, without `sentinel_` and `_total`
    labels: tuple[str, ...]  # in the metric's order (node_metrics.py)
    value: float


class Probe(Protocol):
    """Called in a thread of its own, never twice at once. What it raises is counted, and ends it if it goes on."""

    @property
    def name(self) -> str: ...

    @property
    def every_seconds(self) -> float:
        """The least time between two calls."""

    def read(self) -> list[Reading]:
        """Everything that can be had now. What cannot be had here is absent; that is no error."""
