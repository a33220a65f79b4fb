"""The probes that hook into attempts, in a list that one can see."""

from collections.abc import Callable

from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.probe import Probe
from sentinel.client.subject import Subject
from sentinel.config import Settings

Factory = Callable[[Subject, list[WatchedOptimizer], Settings], Probe | None]

PROBES: tuple[Factory, ...] = ()


def build(subject: Subject, watched: list[WatchedOptimizer], settings: Settings) -> tuple[Probe, ...]:
    """A fresh set for one Run. A factory answers None where its signal is switched off or cannot be had."""
    made = (factory(subject, watched, settings) for factory in PROBES)
    return tuple(probe for probe in made if probe is not None)
