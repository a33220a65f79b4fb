"""The sampled signals, in a list that one can see."""

from collections.abc import Callable
from typing import NamedTuple

from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.sampling.budget import Budget
from sentinel.client.sampling.group_norms import GroupNorms
from sentinel.client.sampling.groups import Groups
from sentinel.client.sampling.sampling import Sampling
from sentinel.client.sampling.signal import Signal
from sentinel.client.subject import Subject
from sentinel.config import SamplingSettings, Settings


class Context(NamedTuple):
    """What a signal is built from."""

    subject: Subject
    watched: list[WatchedOptimizer]
    settings: SamplingSettings
    groups: Groups


SIGNALS: dict[str, Callable[[Context], Signal]] = {
    "group_norms": lambda context: GroupNorms(context.groups),
}


def sampling(subject: Subject, watched: list[WatchedOptimizer], settings: Settings) -> Sampling | None:
    """The probe that takes them; None where sampling is switched off."""
    chosen = settings.sampling
    context = Context(subject, watched, chosen, Groups(subject, watched))
    signals = [SIGNALS[name](context) for name in chosen.names() if name in SIGNALS]
    return Sampling(signals, Budget(chosen.every_steps, chosen.cost_ratio), watched) if signals else None
