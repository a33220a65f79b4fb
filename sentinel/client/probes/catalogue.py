"""The probes that hook into attempts, in a list that one can see."""

from collections.abc import Callable

import torch.distributed

from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.communication import CommunicationWait
from sentinel.client.probes.probe import Probe
from sentinel.client.probes.scheduler import scheduler_steps
from sentinel.client.probes.throughput import throughput
from sentinel.client.sampling.catalogue import sampling
from sentinel.client.subject import Subject
from sentinel.config import Settings

Factory = Callable[[Subject, list[WatchedOptimizer], Settings], Probe | None]

PROBES: tuple[Factory, ...] = (
    lambda subject, watched, _: CommunicationWait(subject, watched) if torch.distributed.is_available() else None,
    scheduler_steps,
    throughput,
    sampling,
)


def build(subject: Subject, watched: list[WatchedOptimizer], settings: Settings) -> tuple[Probe, ...]:
    """A fresh set for one Run. A factory answers None where its signal is switched off or cannot be had."""
    made = (factory(subject, watched, settings) for factory in PROBES)
    return tuple(probe for probe in made if probe is not None)
