"""What every detector is: something that looks at observations in order and sometimes has a finding."""

from typing import Any, Protocol

from sentinel.records import Finding, Observation


class Detector(Protocol):
    """One anomaly's rule. O(1) per observation; reads no clock; never raises on any value of a field."""

    @property
    def name(self) -> str:
        """The word under which its findings stand in every report."""

    def observe(self, seen: Observation) -> Finding | None:
        """Called once for every observation of one rank, in the order of arrival.

        Returns a finding on every step on which the anomaly holds, so that its end can be told too.
        """

    def state(self) -> dict[str, Any]:
        """Everything learned so far, as plain data that shares nothing with the detector."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned; the given data stays untouched."""
