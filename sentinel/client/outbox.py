"""Hold what the loop has to say until the daemon has it: a bounded queue of numbered messages.

`push` is called by the loop, everything else by the link's thread. A message gets the next number when it is pushed
and stays until it is acknowledged. When the queue is full, messages that were not handed out yet make room, oldest
telemetry first, then the oldest lasting ones; critical ones stay. What made room is counted, and its numbers are
announced as a `Gap`, so that the receiver meets every number exactly once.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from threading import RLock

import msgspec

from sentinel.records import Gap, Numbered, RunStart
from sentinel.vocabulary import Delivery, DropReason

# Critical messages have a bound of their own, far above any real outage: memory is finite, and the loop comes first.
MAX_CRITICAL = 65536


class Outbox:
    """Numbered messages, kept until acknowledged. `records` bounds them all; only critical ones may exceed it."""

    def __init__(self, records: int) -> None:
        # Re-entrant, because a signal handler may push while the loop is inside `push`.
        self._lock = RLock()
        self._records = records
        self._window = max(1, records // 2)  # most messages in flight: handed out, not acknowledged
        self._kept: dict[int, Numbered | Gap] = {}
        self._order: list[int] = []  # numbers kept, ascending; beyond `_handed_out` it may name some that left
        self._waiting: dict[Delivery, deque[int]] = {
            delivery: deque() for delivery in Delivery
        }  # these may make room
        self._critical: deque[int] = deque()  # not acknowledged, in flight or waiting
        self._start: tuple[int, RunStart] | None = None  # kept for life: a daemon with a new database needs it
        self._last_seq = 0
        self._handed_out = 0  # the highest number given to the link
        self._acknowledged = 0  # the highest number ever acknowledged
        self._dropped: dict[str, int] = {}
        self.wake: Callable[[], None] = _nobody_waits  # called after an urgent push; must not block or raise

    def push(self, message: Numbered) -> int:
        """Number a message and keep it; returns the number. Any thread; no I/O for telemetry; never raises."""
        delivery = message.delivery
        with self._lock:
            seq = self._last_seq + 1
            self._last_seq = seq
            self._kept[seq] = message
            self._order.append(seq)
            if delivery is Delivery.CRITICAL:
                self._critical.append(seq)
            if self._start is None and isinstance(message, RunStart):
                self._start = (seq, message)
            else:
                self._waiting[delivery].append(seq)
            if len(self._kept) > self._records:
                self._make_room()
        if delivery is not Delivery.TELEMETRY:
            self.wake()
        return seq

    @property
    def last_seq(self) -> int:
        """The highest number given so far; 0 before the first push."""
        return self._last_seq

    @property
    def dropped(self) -> dict[str, int]:
        """How many messages were dropped, by DropReason; exactly those that are announced as gaps."""
        with self._lock:
            return dict(self._dropped)

    @property
    def settled(self) -> bool:
        """Whether everything pushed so far is acknowledged."""
        return not self._kept and self._acknowledged >= self._last_seq == self._handed_out

    @property
    def last_critical(self) -> int:
        """The number of the newest critical message that is not acknowledged; 0 if there is none."""
        with self._lock:
            return self._critical[-1] if self._critical else 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, most: int) -> list[Numbered | Gap]:
        """The next messages in order, at most `most`, with their numbers set and holes as gaps. Empty: nothing to do.

        Also empty while half the queue is in flight: what waits here can still make room, what is on its way cannot.
        """
        with self._lock:
            first = bisect_right(self._order, self._handed_out)
            room = min(most, self._window - first)  # the order begins with what is in flight
            if room <= 0 or self._handed_out >= self._last_seq:
                return []
            taken, behind = self._next_kept(first, room)
            self._order[first:behind] = [seq for seq, _ in taken]
            for seq, message in taken:
                self._no_longer_waits(seq, message)
            at_end = first + len(taken) == len(self._order)
            begin, self._handed_out = self._handed_out + 1, self._last_seq if at_end else taken[-1][0]
            end, known = self._handed_out, self._acknowledged
        return _in_a_row(taken, begin, end, known)

    def acknowledge(self, seq: int) -> int:
        """Everything up to `seq` is safe: forget it. Returns what that frees: no more than was handed out."""
        with self._lock:
            seq = min(seq, self._handed_out)
            safe = bisect_right(self._order, seq)
            for number in self._order[:safe]:
                self._kept.pop(number, None)
            del self._order[:safe]
            while self._critical and self._critical[0] <= seq:
                self._critical.popleft()
            self._acknowledged = max(self._acknowledged, seq)
        return seq

    def rewind(self, stored_seq: int) -> None:
        """A new connection: the daemon has everything up to `stored_seq`; hand out the rest from there.

        A daemon that has less than was once acknowledged lost its database: it gets the RunStart again, and the
        numbers that are not kept here any more as a gap.
        """
        with self._lock:
            stored_seq = min(stored_seq, self._last_seq)
            self._handed_out = max(self._handed_out, stored_seq)
            self.acknowledge(stored_seq)
            self._handed_out = stored_seq
            if self._start is not None and stored_seq < self._start[0] and self._start[0] not in self._kept:
                seq, self._kept[seq] = self._start
                self._order.insert(0, seq)
                self._critical.appendleft(seq)
            self._order = [seq for seq in self._order if seq in self._kept]
            self._all_wait()

    def discard(self, seq: int, reason: DropReason) -> Gap:
        """A message that was handed out cannot be sent: count it; the gap returned takes its place."""
        gap = Gap(seq, seq, reason)
        with self._lock:
            if self._start is not None and self._start[0] == seq:
                self._start = None
            if seq in self._kept and not isinstance(self._kept[seq], Gap):
                self._kept[seq] = gap
                self._count(reason)
        return gap

    def critical_after(self, seq: int) -> list[Numbered]:
        """Critical messages above `seq` that are not acknowledged, with their numbers set, oldest first."""
        found: list[Numbered] = []
        with self._lock:
            for number in reversed(self._critical):
                if number <= seq:
                    break
                message = self._kept.get(number)
                if message is not None and not isinstance(message, Gap):
                    found.append(msgspec.structs.replace(message, seq=number))
        return found[::-1]

    def _next_kept(self, index: int, most: int) -> tuple[list[tuple[int, Numbered | Gap]], int]:
        """Up to `most` messages from this place of the order on, and the place behind them."""
        found: list[tuple[int, Numbered | Gap]] = []
        while index < len(self._order) and len(found) < most:
            message = self._kept.get(self._order[index])
            if message is not None:
                found.append((self._order[index], message))
            index += 1
        return found, index

    def _no_longer_waits(self, seq: int, message: Numbered | Gap) -> None:
        line = self._waiting[_class_of(message)]
        if line and line[0] == seq:
            line.popleft()

    def _all_wait(self) -> None:
        for line in self._waiting.values():
            line.clear()
        for seq in self._order:
            if self._start is None or seq != self._start[0]:
                self._waiting[_class_of(self._kept[seq])].append(seq)

    def _make_room(self) -> None:
        if not self._drop_oldest(self._waiting[Delivery.TELEMETRY]):
            self._drop_oldest(self._waiting[Delivery.LASTING])
        if len(self._waiting[Delivery.CRITICAL]) > MAX_CRITICAL:
            self._drop_oldest(self._waiting[Delivery.CRITICAL])
        if len(self._order) > 2 * len(self._kept) + self._records:
            self._order = [seq for seq in self._order if seq in self._kept]

    def _drop_oldest(self, line: deque[int]) -> bool:
        if not line:
            return False
        if not isinstance(self._kept.pop(line.popleft()), Gap):
            self._count(DropReason.OUTBOX_FULL)
        return True

    def _count(self, reason: DropReason) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + 1


def _in_a_row(taken: list[tuple[int, Numbered | Gap]], begin: int, end: int, known: int) -> list[Numbered | Gap]:
    """The numbers from `begin` to `end` without a hole: the messages, and gaps for what is between them."""
    row: list[Numbered | Gap] = []
    for seq, message in taken:
        row += _hole(begin, seq - 1, known)
        row.append(_numbered(seq, message))
        begin = seq + 1
    return row + _hole(begin, end, known)


def _hole(first: int, last: int, known: int) -> list[Numbered | Gap]:
    # What was acknowledged once (up to `known`) was not dropped: only a daemon that lost it is told of it again.
    parts = (
        Gap(first, min(last, known), DropReason.UNEXPLAINED),
        Gap(max(first, known + 1), last, DropReason.OUTBOX_FULL),
    )
    return [gap for gap in parts if gap.count > 0]


def _numbered(seq: int, message: Numbered | Gap) -> Numbered | Gap:
    return message if isinstance(message, Gap) else msgspec.structs.replace(message, seq=seq)


def _class_of(message: Numbered | Gap) -> Delivery:
    return Delivery.TELEMETRY if isinstance(message, Gap) else message.delivery


def _nobody_waits() -> None:
    """Before a link has started there is no thread to wake."""
