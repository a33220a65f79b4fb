"""The sampled signals, in a list that one can see."""

from collections.abc import Callable
from typing import NamedTuple

from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.sampling.budget import Budget
from sentinel.client.sampling.expert_load import ExpertLoad
from sentinel.client.sampling.fingerprint import Fingerprint
from sentinel.client.sampling.group_norms import GroupNorms
from sentinel.client.sampling.groups import Groups
from sentinel.client.sampling.histogram import Histogram
from sentinel.client.sampling.local_norm import LocalNorm
from sentinel.client.sampling.replicas import Replicas
from sentinel.client.sampling.sampling import Sampling
from sentinel.client.sampling.signal import Signal
from sentinel.client.sampling.update_ratio import UpdateRatio
from sentinel.client.subject import Subject
from sentinel.config import SamplingSettings, Settings


class Context(NamedTuple):
    """What a signal is built from."""

    subject: Subject
    watched: list[WatchedOptimizer]
    settings: SamplingSettings
    groups: Groups
    replicas: Replicas


SIGNALS: dict[str, Callable[[Context], Signal]] = {
    "group_norms": lambda of: GroupNorms(of.groups),
    "histogram": lambda of: Histogram(of.watched, of.settings.histogram_elements),
    "update_ratio": lambda of: UpdateRatio(of.watched, of.settings.update_elements),
    "fingerprint": lambda of: Fingerprint(of.groups, of.replicas, of.watched),
    "local_grad_norm": lambda of: LocalNorm(of.replicas, of.watched),
    "expert_load": lambda of: ExpertLoad(of.subject),
}


def sampling(subject: Subject, watched: list[WatchedOptimizer], settings: Settings) -> Sampling:
    """The probe that takes them. With none chosen it still tells the expert load that the loop reports."""
    chosen = settings.sampling
    context = Context(subject, watched, chosen, Groups(subject, watched), Replicas(subject))
    signals = [SIGNALS[name](context) for name in chosen.names()]
    return Sampling(signals, Budget(chosen.every_steps, chosen.cost_ratio), watched, context.replicas)
