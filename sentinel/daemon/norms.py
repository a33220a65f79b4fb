"""Give every record of a sharded run its global gradient norm before it is judged, and hold it back until then.

Each rank tells its part of the norm (`grad_norm_local`, source "local"); squares add up over the ranks. What comes
from a rank waits, in order, behind a record whose other parts are still to come. It goes on without the norm when
that cannot be had any more: a rank has gone on to a later step without telling (a dropped record, another
generation), is not connected, or lets the others wait too long. Runs that are not sharded pass straight through.
"""

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sentinel.daemon.metrics import Metrics
from sentinel.daemon.rank import Fleet, LiveRun, Rank
from sentinel.records import Observation, StepRecord
from sentinel.store.norms import PART, combined

MOST_HELD = 256  # observations of one rank
MOST_SECONDS = 1.0  # that the oldest of them waits

Released = list[tuple[Rank, Observation]]
Key = tuple[int, int, int]  # attempt, generation, step


class Combining:
    """All runs of the daemon: stands between the pipeline and those who judge. Lives in the event loop."""

    def __init__(self, fleet: Fleet, metrics: Metrics, judge: Callable[[Rank, Observation], object]) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._judge = judge
        self._runs: dict[str, Norms] = {}  # those that are sharded

    def observe(self, rank: Rank, seen: Observation) -> None:
        """In place of `judge`, which is called with this and with what is complete now."""
        norms = self._runs.get(rank.origin.run_id)
        if norms is None and not (isinstance(seen, StepRecord) and seen.grad_norm_source == PART):
            self._judge(rank, seen)
            return
        run = self._fleet.run_of(rank)
        if run is None:
            self._judge(rank, seen)
            return
        if norms is None:
            norms = self._runs[run.run_id] = Norms(functools.partial(self._show, run))
        self._pass_on(norms.take(run, rank, seen))

    def overdue(self) -> None:
        """Called about twice a second."""
        for norms in list(self._runs.values()):
            self._pass_on(norms.overdue())

    def end(self, rank: Rank) -> None:
        """The rank is over: what it has said is judged now."""
        norms = self._runs.get(rank.origin.run_id)
        if norms is not None:
            self._pass_on(norms.end(rank))

    def forget(self, run_id: str) -> None:
        """All its ranks are over."""
        self._runs.pop(run_id, None)

    def _pass_on(self, released: "Released") -> None:
        for rank, seen in released:
            self._judge(rank, seen)

    def _show(self, run: LiveRun, norm: float | None) -> None:
        for number in run.ranks:
            self._metrics.rank(run.run_id, number).global_norm(norm)


class _Held(NamedTuple):
    seen: Observation
    key: Key | None  # of a part that waits for the others; None: it only keeps its place in the row
    since: float  # time.monotonic()


class _Parts(NamedTuple):
    """What is known of one step."""

    world_size: int
    by_rank: dict[int, float]


class Norms:
    """Of one run. Lives in the event loop; O(1) per record and rank, bounded by what is held."""

    def __init__(self, show: Callable[[float | None], object]) -> None:
        """`show` is told each global norm, and None where one could not be had, for the numbers of all ranks."""
        self._show = show
        self._parts: dict[Key, _Parts] = {}  # of steps that miss somebody
        self._known: dict[Key, float | None] = {}  # of steps of which records are still held
        self._held: dict[Rank, deque[_Held]] = {}

    def take(self, run: LiveRun, rank: Rank, seen: Observation) -> Released:
        """What may be judged now, each in the order of its rank."""
        key = self._enter(run, rank, seen) if isinstance(seen, StepRecord) else None
        held = self._held.get(rank)
        if key is None and not held:
            return self._released() if self._known else [(rank, seen)]
        if held is None:
            held = self._held[rank] = deque()
        held.append(_Held(seen, key, time.monotonic()))
        if len(held) > MOST_HELD and held[0].key is not None:
            self._give_up(held[0].key)
        return self._released() if self._known else []

    def overdue(self) -> Released:
        """What has waited too long. Called about twice a second."""
        before = time.monotonic() - MOST_SECONDS
        for held in self._held.values():
            for one in held:
                if one.since > before:
                    break
                if one.key is not None:
                    self._give_up(one.key)
        return self._released() if self._known else []

    def end(self, rank: Rank) -> Released:
        """The rank says nothing more: what it holds goes on, and nobody waits for it."""
        for key in self._without(rank.origin.rank):
            self._give_up(key)
        for one in self._held.get(rank, ()):
            if one.key is not None:
                self._give_up(one.key)
        released = self._released()
        self._held.pop(rank, None)
        return released

    def _enter(self, run: LiveRun, rank: Rank, record: StepRecord) -> Key | None:
        """The key under which its part is known now; None for a record that tells no part."""
        number = rank.origin.rank
        key = (rank.origin.attempt, record.generation, record.step)
        for older in self._without(number):
            if older < key:
                self._give_up(older)
        if record.grad_norm_source != PART or record.grad_norm_local is None or key in self._known:
            return None
        parts = self._parts.get(key)
        if parts is None:
            if len(run.connected) < run.world_size:
                return None
            parts = self._parts[key] = _Parts(run.world_size, {})
        parts.by_rank[number] = record.grad_norm_local
        if len(parts.by_rank) >= parts.world_size:
            del self._parts[key]
            self._known[key] = combined(parts.by_rank.values())
            self._show(self._known[key])
        return key

    def _without(self, number: int) -> list[Key]:
        """Steps of which this rank has not told its part."""
        return [key for key, parts in self._parts.items() if number not in parts.by_rank]

    def _give_up(self, key: Key) -> None:
        if self._parts.pop(key, None) is not None:
            self._known[key] = None
            self._show(None)

    def _released(self) -> Released:
        """From the head of each rank's row, up to the first record that still waits."""
        found: Released = []
        for rank, held in self._held.items():
            while held and (held[0].key is None or held[0].key in self._known):
                found.append((rank, self._completed(held.popleft())))
        waiting = {one.key for held in self._held.values() for one in held}
        self._known = {key: norm for key, norm in self._known.items() if key in waiting}
        return found

    def _completed(self, one: _Held) -> Observation:
        norm = None if one.key is None else self._known[one.key]
        if norm is None or not isinstance(one.seen, StepRecord):
            return one.seen
        return msgspec.structs.replace(one.seen, grad_norm=norm)
