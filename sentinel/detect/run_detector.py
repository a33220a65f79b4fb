"""What a detector is that compares the ranks of a run, where a `Detector` sees one rank alone."""

from typing import Any, NamedTuple, Protocol

from sentinel.records import Finding, StepRecord


class Comparison(NamedTuple):
    """The ranks were compared; `finding` is None where nothing is wrong."""

    finding: Finding | None


class RunDetector(Protocol):
    """One anomaly's rule over all ranks. O(1) per record; reads no clock; never raises on any value of a field."""

    @property
    def name(self) -> str:
        """The word under which its findings stand in every report."""

    def observe(self, rank: int, seen: StepRecord) -> Comparison | None:
        """Called for every record of every rank, of each in the order of arrival; ranks come in any order.

        Returns a comparison when this record completed one, healthy or not, so that an anomaly's end can be told too.
        """

    def state(self) -> dict[str, Any]:
        """Everything learned so far, as plain data that shares nothing with the detector."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned; the given data stays untouched."""
