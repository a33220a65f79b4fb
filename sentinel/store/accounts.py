"""Keep the books of every rank: produced = stored + dropped + in flight, exactly, however often things are sent."""

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select, update

from sentinel.records import Gap, Origin
from sentinel.store.tables import ranks, steps
from sentinel.vocabulary import DropReason

_OF_RANK = [ranks.c.stored_seq, ranks.c.stored, ranks.c.produced, ranks.c.dropped]


@dataclass(slots=True)
class Account:
    """What one rank has produced, what is stored of it, and what is known to be lost."""

    stored_seq: int  # everything up to here is stored or recorded as a gap
    stored: int
    produced: int
    dropped: int
    generation: int = -1  # the newest step row: nothing after it can clash with a stored one
    step: int = -1

    def admit(self, seq: int) -> tuple[bool, Gap | None]:
        """Whether the message `seq` is new, and the hole before it that nobody explained."""
        if seq <= self.stored_seq:
            return False, None
        hole = self._hole_before(seq)
        self.stored += 1
        self.stored_seq = seq
        self.produced = max(self.produced, seq)
        return True, hole

    def lose(self, gap: Gap) -> list[Gap]:
        """The parts of a gap that are news, an unexplained hole before it included."""
        first = max(gap.first_seq, self.stored_seq + 1)
        if gap.last_seq < first:
            return []
        hole = self._hole_before(first)
        news = Gap(first_seq=first, last_seq=gap.last_seq, reason=gap.reason)
        self.dropped += news.count
        self.stored_seq = gap.last_seq
        self.produced = max(self.produced, gap.last_seq)
        return [news] if hole is None else [hole, news]

    def advance(self, generation: int, step: int) -> bool:
        """Whether a step comes after all stored ones, so that its key must be free."""
        if (generation, step) <= (self.generation, self.step):
            return False
        self.generation, self.step = generation, step
        return True

    def _hole_before(self, seq: int) -> Gap | None:
        if seq <= self.stored_seq + 1:
            return None
        hole = Gap(first_seq=self.stored_seq + 1, last_seq=seq - 1, reason=DropReason.UNEXPLAINED)
        self.dropped += hole.count
        return hole


class Accounts:
    """The books that were opened so far. They mirror the database; after a failed transaction they are forgotten."""

    def __init__(self) -> None:
        self._open: dict[Origin, Account] = {}
        self._changed: set[Origin] = set()

    def of(self, connection: Connection, origin: Origin) -> Account | None:
        """The books of a rank, None if it never registered."""
        found = self._open.get(origin)
        if found is None:
            found = _load(connection, origin)
            if found is not None:
                self._open[origin] = found
        return found

    def changed(self, origin: Origin) -> None:
        self._changed.add(origin)

    def forget(self) -> None:
        self._open.clear()
        self._changed.clear()

    def write(self, connection: Connection) -> None:
        """Bring the table up to what changed."""
        if not self._changed:
            return
        statement = update(ranks).where(
            ranks.c.run_id == bindparam("of_run"),
            ranks.c.attempt == bindparam("of_attempt"),
            ranks.c.rank == bindparam("of_rank"),
        )
        rows = []
        for origin in sorted(self._changed):
            account = self._open[origin]
            row = {name: getattr(account, name) for name in ("stored_seq", "stored", "produced", "dropped")}
            rows.append({"of_run": origin.run_id, "of_attempt": origin.attempt, "of_rank": origin.rank, **row})
        connection.execute(statement, rows)
        self._changed.clear()


def _load(connection: Connection, origin: Origin) -> Account | None:
    run_id, attempt, rank = origin
    row = connection.execute(
        select(*_OF_RANK).where(ranks.c.run_id == run_id, ranks.c.attempt == attempt, ranks.c.rank == rank)
    ).one_or_none()
    if row is None:
        return None
    newest = connection.execute(
        select(steps.c.generation, steps.c.step)
        .where(steps.c.run_id == run_id, steps.c.attempt == attempt, steps.c.rank == rank)
        .order_by(steps.c.generation.desc(), steps.c.step.desc())
        .limit(1)
    ).one_or_none()
    return Account(*row, *(newest or ()))
