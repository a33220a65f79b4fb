"""Hold what the ranks of a run sampled until all have told the same step, and then show it.

Ranks may sample at different cadences, but all share the steps of the coarsest. A signal of a step is complete when
every rank that is up has told it. How they are combined: `detect/combining.py`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from sentinel.daemon.noise_scale import RunNoiseScale
from sentinel.detect import combining
from sentinel.records import StepRecord
from sentinel.sample import Sample

# Steps of a signal that wait for ranks. Ranks in step are at most one apart, but their records come in batches.
MOST_OPEN, LEAST_OPEN = 16, 4
MOST_HELD = 512  # records in them: with many ranks fewer steps wait

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

    def __init__(self, world_size: Callable[[], int] = int) -> None:
        """`world_size`: ranks of the whole run, also those of other nodes; 0 while it is not known."""
        self._world_size = world_size
        self.noise_scale: float | None = None
        self.noise_scale_of: Callable[[Mapping[int, StepRecord]], float | None] = RunNoiseScale()
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
        norms = self._latest.get("group_norms", {})
        values = _samples(self._latest.get("histogram", {}))
        return Shown(
            combining.group_norms(_samples(norms), self._told_with(norms)),
            combining.histogram(values),
            combining.zeros_ratio(values),
            combining.update_ratio(_samples(self._latest.get("update_norm", {}))),
            combining.expert_load(_samples(self._latest.get("expert_load", {}))),
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
        elif len(boards) > max(LEAST_OPEN, min(MOST_OPEN, MOST_HELD // len(self._up or {rank}))):
            self._publish(name, boards.pop(min(boards)))  # a rank that does not sample this hides nothing

    def _publish(self, name: str, board: Board) -> None:
        """What needs every rank of the run waits for a step that all of them told."""
        some_missing = len(board) < self._world_size() or not board.keys() >= self._up
        sharded = combining.are_shards(_samples(board), self._told_with(board))
        if some_missing and (sharded or name == "local_grad_norm"):
            return
        self._latest[name] = board
        if name == "local_grad_norm":
            self.noise_scale = self.noise_scale_of(board)

    def _told_with(self, board: Board) -> combining.Told:
        return combining.Told(
            max(self._world_size(), len(self._up)),
            any(record.grad_norm_local is not None for record in board.values()),
            next((record.grad_norm for record in board.values() if record.grad_norm is not None), None),
        )


def _samples(board: Board) -> list[Sample]:
    return [record.sampled for record in board.values() if record.sampled is not None]
