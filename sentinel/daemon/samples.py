"""Combine what the ranks of a run sampled at the same step: one value for the run, right with and without sharding.

Ranks may sample at different cadences, but all share the steps of the coarsest. A signal of a step is complete when
every rank that is up has told it. Under data parallelism any rank's gradient is the run's; under sharding
(`grad_norm_local` is told) squares add up, and a step that misses a rank tells nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from sentinel.records import HISTOGRAM_EDGES, Sample, StepRecord

MOST_GROUPS = 64  # layer groups that are shown
MOST_ROUTERS = 64
MOST_EXPERTS = 512  # over all routers: each is a series
MOST_OPEN = 4  # steps of a signal that wait for ranks; ranks in step are at most one apart

SIGNALS = ("group_norms", "histogram", "update_norm", "expert_load", "local_grad_norm")

Board = dict[int, StepRecord]  # rank -> its record of one step


class Shown(NamedTuple):
    """The latest of each signal, over all ranks; finite."""

    group_norms: Mapping[str, float]
    histogram: tuple[int, ...] | None  # by HISTOGRAM_EDGES, the last beyond them; of all ranks together
    zeros_ratio: float | None  # share of the gradient's values that are exactly 0
    update_ratio: float | None
    expert_load: Mapping[str, tuple[float, ...]]  # router -> share of the choices per expert


class Samples:
    """Of one run. Written from the event loop, read by the thread that renders."""

    def __init__(self) -> None:
        self.noise_scale: float | None = None
        self.noise_scale_of: Callable[[Mapping[int, StepRecord]], float | None] = lambda _: None
        self._up: set[int] = set()
        self._open: dict[str, dict[tuple[int, int], Board]] = {name: {} for name in SIGNALS}
        self._latest: dict[str, Board] = {}

    def begin(self, rank: int) -> None:
        self._up.add(rank)

    def end(self, rank: int) -> None:
        """With the last rank the numbers go too."""
        self._up.discard(rank)
        if not self._up:
            self._latest = {}
            self.noise_scale = None
            for boards in self._open.values():
                boards.clear()

    def take(self, rank: int, record: StepRecord) -> None:
        """Called for every record that carries a sample."""
        sample = record.sampled
        if sample is None:
            return
        for name in SIGNALS:
            if getattr(sample, name) is not None:
                self._enter(name, rank, record)

    def shown(self) -> Shown:
        """Costs a walk over what the ranks told: called once per scrape."""
        latest = self._latest
        histogram, zeros_ratio = _histogram(latest.get("histogram", {}))
        return Shown(
            _group_norms(latest.get("group_norms", {})),
            histogram,
            zeros_ratio,
            _update_ratio(latest.get("update_norm", {})),
            _expert_load(latest.get("expert_load", {})),
        )

    def _enter(self, name: str, rank: int, record: StepRecord) -> None:
        boards = self._open[name]
        key = (record.generation, record.step)
        board = boards.setdefault(key, {})
        board[rank] = record
        if board.keys() >= self._up:
            for older in [one for one in boards if one <= key]:
                del boards[older]
            self._publish(name, board)
        elif len(boards) > MOST_OPEN:
            given_up = boards.pop(min(boards))
            if not _is_sharded(given_up):  # a rank that does not sample this hides nothing
                self._publish(name, given_up)

    def _publish(self, name: str, board: Board) -> None:
        self._latest[name] = board
        if name == "local_grad_norm":
            self.noise_scale = self.noise_scale_of(board)


def imbalance(load: Iterable[float]) -> float | None:
    """Variance of an expert's load relative to a uniform one: 0 is even, experts - 1 is everything to one.

    The squared coefficient of variation, which Shazeer et al. (2017, section 4) hold down by a loss of their own.

    >>> imbalance([0.25, 0.25, 0.25, 0.25]), imbalance([1.0, 0.0, 0.0, 0.0])
    (0.0, 3.0)
    """
    shares = tuple(load)
    total = sum(shares)
    if not shares or not total > 0.0:
        return None
    return sum((share * len(shares) / total - 1.0) ** 2 for share in shares) / len(shares)


def is_finite(sample: Sample) -> bool:
    """Whether every number in it is."""
    single = (sample.update_norm, sample.weight_norm, sample.local_grad_norm)
    many = (
        *(sample.group_norms or {}).values(),
        *(one for load in (sample.expert_load or {}).values() for one in load),
    )
    return all(value is None or math.isfinite(value) for value in (*single, *many))


# ---------------------------------------------------------------- one signal of one step


def _is_sharded(board: Board) -> bool:
    return any(record.grad_norm_local is not None for record in board.values())


def _samples(board: Board) -> Iterator[Sample]:
    return (record.sampled for record in board.values() if record.sampled is not None)


def _group_norms(board: Board) -> Mapping[str, float]:
    found: dict[str, list[float]] = {}
    for sample in _samples(board):
        for group, norm in (sample.group_norms or {}).items():
            if group in found or len(found) < MOST_GROUPS:
                found.setdefault(group, []).append(norm)
    combine: Callable[[list[float]], float] = (lambda norms: math.hypot(*norms)) if _is_sharded(board) else max
    combined = {group: combine(norms) for group, norms in found.items() if all(map(math.isfinite, norms))}
    return {group: norm for group, norm in combined.items() if math.isfinite(norm)}


def _histogram(board: Board) -> tuple[tuple[int, ...] | None, float | None]:
    told = [sample for sample in _samples(board) if len(sample.histogram or ()) == len(HISTOGRAM_EDGES) + 1]
    if not told:
        return None, None
    counts = tuple(map(sum, zip(*(sample.histogram or () for sample in told), strict=True)))
    zeros = [sample.zeros for sample in told if sample.zeros is not None]
    values = sum(counts) + sum(zeros)
    return counts, sum(zeros) / values if len(zeros) == len(told) and values > 0 else None


def _update_ratio(board: Board) -> float | None:
    """Squares add up under sharding; where the ranks hold the same, their number cancels out."""
    told = [(sample.update_norm, sample.weight_norm) for sample in _samples(board)]
    update = math.hypot(*(changed for changed, weight in told if changed is not None and weight is not None))
    weight = math.hypot(*(weight for changed, weight in told if changed is not None and weight is not None))
    return update / weight if 0.0 < weight < math.inf and math.isfinite(update) else None


def _expert_load(board: Board) -> Mapping[str, tuple[float, ...]]:
    """The mean over the ranks, each of which sees its own tokens."""
    found: dict[str, list[list[float]]] = {}
    for sample in _samples(board):
        for router, load in (sample.expert_load or {}).items():
            if router in found or len(found) < MOST_ROUTERS:
                found.setdefault(router, []).append(load)
    means: dict[str, tuple[float, ...]] = {}
    for router, loads in found.items():
        same = [load for load in loads if len(load) == len(loads[0])]
        mean = tuple(sum(shares) / len(same) for shares in zip(*same, strict=True))
        if mean and all(map(math.isfinite, mean)):
            means[router] = mean
    return means
