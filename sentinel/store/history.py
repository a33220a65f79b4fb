"""Read the run database: for the command line, the postmortem and the HTTP interface, also while a run is going."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from sqlalchemy import ColumnElement, Connection, Select, Table, func, select, tuple_

from sentinel.errors import NoSuchRunError
from sentinel.store import engine as engines
from sentinel.store import schema, timeline
from sentinel.store.intake import read_step
from sentinel.store.norms import with_global_norms
from sentinel.store.tables import (
    attempts,
    checkpoints,
    decisions,
    events,
    findings,
    gaps,
    generations,
    incidents,
    ranks,
    runs,
    steps,
    system_samples,
)
from sentinel.store.values import from_text, put_back
from sentinel.vocabulary import UpdateResult

Row = dict[str, Any]

_PAGE_ROWS = 2000  # each page is a transaction of its own: a reader that stalls does not keep the log from shrinking
_PROVENANCE = ("argv", "git", "packages", "config", "settings")


class Spent(NamedTuple):
    """Where the seconds of a run's steps went (the slowest rank of each step counts)."""

    useful_seconds: float  # live steps whose update was applied
    lost_seconds: (
        float  # history, and live steps without an update; steps in whose place a turn was taken are neither
    )


class History:
    """A read-only view. Every call sees what was committed before it. Usable as a context manager."""

    def __init__(self, url: str) -> None:
        """Raises NoSuchRunError when there is no database yet, SchemaTooOldError, SchemaTooNewError, PermanentError,
        TemporaryError.
        """
        self._url = url
        path = engines.sqlite_file(url)
        if path is not None and not path.exists():
            raise NoSuchRunError(f"no run is recorded in {path}; attach one, or name its home with --home")
        self._engine = engines.reader(url)
        with engines.plain_errors(url), self._engine.connect() as connection:
            if not schema.check_readable(connection, url):
                raise NoSuchRunError(f"no run is recorded in {engines.shown(url)} yet")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self._engine.dispose()

    @property
    def place(self) -> str:
        """Where the database is, as a person may see it."""
        return engines.shown(self._url)

    # ------------------------------------------------------------ which run

    def resolve(self, run: str) -> str:
        """The run_id of `latest`, an id, a name (its latest run) or a unique prefix. Raises NoSuchRunError."""
        known = [(row["run_id"], row["name"]) for row in self._latest_first()]
        if not known:
            raise NoSuchRunError(f"no run is recorded in {self.place} yet")
        if run == "latest":
            return str(known[0][0])
        for run_id, _ in known:
            if run_id == run:
                return run
        for run_id, name in known:
            if name and name == run:
                return str(run_id)
        matching = [run_id for run_id, _ in known if run and run_id.startswith(run)]
        if len(matching) == 1:
            return str(matching[0])
        shown = ", ".join(f"{run_id} ({name})" if name else run_id for run_id, name in known[:10])
        if matching:
            raise NoSuchRunError(f"{run!r} is the beginning of {len(matching)} runs: {', '.join(matching[:10])}")
        raise NoSuchRunError(f"no run has the id, prefix or name {run!r}; there are: {shown}")

    def runs(self) -> list[Row]:
        """All runs, the one that started last (any attempt) first, each with its counts."""
        return [self._with_counts(row) for row in self._latest_first()]

    def run(self, run_id: str) -> Row:
        """One run, with counts and the provenance of its latest attempt. Raises NoSuchRunError."""
        found = self._rows(select(runs).where(runs.c.run_id == run_id))
        if not found:
            raise NoSuchRunError(f"no run has the id {run_id!r}")
        latest = self.attempts(run_id)[-1]
        provenance = {name: latest[name] for name in (*_PROVENANCE, "cwd", "start_step")}
        devices = sorted({device for rank in self.ranks(run_id) for device in rank["devices"] or ()})
        return {**self._with_counts(found[0]), **provenance, "devices": devices}

    # ------------------------------------------------------------ what is known of it

    def attempts(self, run_id: str) -> list[Row]:
        found = self._of_run(attempts, run_id, attempts.c.attempt)
        return [_decoded(row, _PROVENANCE) for row in found]

    def ranks(self, run_id: str) -> list[Row]:
        found = self._of_run(ranks, run_id, ranks.c.attempt, ranks.c.rank)
        return [_decoded(row, ("devices", "can")) for row in found]

    def generations(self, run_id: str) -> list[Row]:
        return self._of_run(generations, run_id, generations.c.attempt, generations.c.generation)

    def steps(self, run_id: str, live_only: bool = True) -> Iterator[Row]:
        """Step records in order of attempt, generation, step, rank; with the boolean `live`.

        `grad_norm` is always the global one: under sharding it is combined here from the ranks' parts.
        """
        world_sizes = {row["attempt"]: row["world_size"] for row in self.attempts(run_id)}
        for segment in timeline.segments(self.generations(run_id)):
            rows = self._steps_of(run_id, segment, live_only=live_only)
            for row in with_global_norms(rows, world_sizes):
                yield {**row, "live": segment.is_live(row["step"])}

    def machine_samples(self, run_id: str) -> Iterator[Row]:
        """What was measured of a whole machine, every ten seconds or so, in order of attempt, rank, time."""
        # A rank's own samples, one a second, name no processor.
        where = (system_samples.c.run_id == run_id, system_samples.c.sample.contains("cpu_utilization_ratio"))
        key = tuple_(*list(system_samples.primary_key)[1:])
        question = select(system_samples).where(*where).order_by(*key).limit(_PAGE_ROWS)
        page = self._rows(question)
        while page:
            yield from (_decoded(row, ("sample",)) for row in page)
            last = page[-1]
            page = self._rows(question.where(key > (last["attempt"], last["rank"], last["time"])))

    def findings(self, run_id: str) -> list[Row]:
        found = [_decoded(row, ("evidence", "ranks")) for row in self._of_run(findings, run_id, findings.c.number)]
        for row in found:
            put_back(row)
        return found

    def incidents(self, run_id: str) -> list[Row]:
        found = self._of_run(incidents, run_id, incidents.c.opened_at, incidents.c.id)
        return [_decoded(row, ("evidence", "ranks")) for row in found]

    def actions(self, run_id: str) -> list[Row]:
        """Every decision with what became of it; `incident_id` is empty for those a person asked for."""
        return self._of_run(decisions, run_id, decisions.c.time, decisions.c.id)

    def checkpoints(self, run_id: str) -> list[Row]:
        """The latest note about every snapshot of every rank."""
        return self._of_run(checkpoints, run_id, *list(checkpoints.primary_key)[1:])

    def events(self, run_id: str) -> list[Row]:
        """Reflexes, phases, troubles, replaced rows."""
        return [_decoded(row, ("body",)) for row in self._of_run(events, run_id, events.c.number)]

    def conservation(self, run_id: str) -> list[Row]:
        """Per rank, over all attempts: produced = stored + dropped + in_flight."""
        with engines.plain_errors(self._url), self._engine.connect() as connection, connection.begin():
            books = connection.execute(_books(run_id)).mappings().all()
            reasons = _losses(connection, run_id)
        # A server's sums are decimals.
        found = [{name: int(value) for name, value in row.items()} for row in books]
        for row in found:
            row["in_flight"] = row["produced"] - row["stored"] - row["dropped"]
        return [{**row, "dropped_by_reason": reasons[row["rank"]]} for row in found]

    def spent(self, run_id: str) -> Spent:
        """Sums over the seconds of all steps."""
        useful = lost = 0.0
        for segment in timeline.segments(self.generations(run_id)):
            for result, live, seconds in self._seconds_of(run_id, segment):
                if live and result == UpdateResult.APPLIED.value:
                    useful += seconds
                elif result != UpdateResult.TURN.value:
                    lost += seconds
        return Spent(useful, lost)

    # ------------------------------------------------------------ below

    def _latest_first(self) -> list[Row]:
        started = (
            select(func.max(attempts.c.started_at))
            .where(attempts.c.run_id == runs.c.run_id)
            .correlate(runs)
            .scalar_subquery()
        )
        return self._rows(select(runs).order_by(started.desc(), runs.c.run_id))

    def _with_counts(self, run: Row) -> Row:
        found = timeline.segments(self.generations(run["run_id"]))
        attempt_count = len({segment.attempt for segment in found})
        last = self._last_step(run["run_id"], found)
        return {**run, "attempts": attempt_count, "generations": len(found), "steps": last}

    def _last_step(self, run_id: str, found: Sequence[timeline.Segment]) -> int:
        """Of the live generation: from its rows, from the end that its ranks reported, else where it started."""
        attempt, generation, _ = found[-1]
        of_segment = (steps.c.run_id == run_id, steps.c.attempt == attempt, steps.c.generation == generation)
        of_generation = (
            generations.c.run_id == run_id,
            generations.c.attempt == attempt,
            generations.c.generation == generation,
        )
        candidates = (
            select(func.max(steps.c.step)).where(*of_segment),
            select(func.max(ranks.c.end_step)).where(ranks.c.run_id == run_id, ranks.c.attempt == attempt),
            select(generations.c.target_step).where(*of_generation),
        )
        return max(
            (next(iter(row.values())) or 0 for question in candidates for row in self._rows(question)), default=0
        )

    def _steps_of(self, run_id: str, segment: timeline.Segment, *, live_only: bool) -> Iterator[Row]:
        question = (
            select(steps)
            .where(
                steps.c.run_id == run_id,
                steps.c.attempt == segment.attempt,
                steps.c.generation == segment.generation,
            )
            .order_by(steps.c.step, steps.c.rank)
            .limit(_PAGE_ROWS)
        )
        if live_only and segment.live_until is not None:
            question = question.where(steps.c.step <= segment.live_until)
        page = self._rows(question)
        while page:
            yield from map(read_step, page)
            after = (page[-1]["step"], page[-1]["rank"])
            page = self._rows(question.where(tuple_(steps.c.step, steps.c.rank) > after))

    def _seconds_of(self, run_id: str, segment: timeline.Segment) -> list[tuple[str, bool, float]]:
        live: ColumnElement[bool] = steps.c.step <= (2**62 if segment.live_until is None else segment.live_until)
        each = (
            select(
                func.min(steps.c.result).label("result"),
                live.label("live"),
                func.max(steps.c.step_seconds).label("s"),
            )
            .where(
                steps.c.run_id == run_id,
                steps.c.attempt == segment.attempt,
                steps.c.generation == segment.generation,
            )
            .group_by(steps.c.step)
            .subquery()
        )
        question = select(each.c.result, each.c.live, func.sum(each.c.s).label("s")).group_by(
            each.c.result, each.c.live
        )
        return [(row["result"], bool(row["live"]), row["s"] or 0.0) for row in self._rows(question)]

    def _of_run(self, table: Table, run_id: str, *order: ColumnElement[Any]) -> list[Row]:
        return self._rows(select(table).where(table.c.run_id == run_id).order_by(*order))

    def _rows(self, question: Select[Any]) -> list[Row]:
        with engines.plain_errors(self._url), self._engine.connect() as connection, connection.begin():
            return [dict(row) for row in connection.execute(question).mappings()]


def _decoded(row: Row, names: Sequence[str]) -> Row:
    return {**row, **{name: from_text(row[name]) for name in names}}


def _books(run_id: str) -> Select[Any]:
    sums = [func.sum(ranks.c[name]).label(name) for name in ("produced", "stored", "dropped")]
    return select(ranks.c.rank, *sums).where(ranks.c.run_id == run_id).group_by(ranks.c.rank).order_by(ranks.c.rank)


def _losses(connection: Connection, run_id: str) -> dict[int, dict[str, int]]:
    count = func.sum(gaps.c.last_seq - gaps.c.first_seq + 1).label("count")
    question = (
        select(gaps.c.rank, gaps.c.reason, count)
        .where(gaps.c.run_id == run_id)
        .group_by(gaps.c.rank, gaps.c.reason)
        .order_by(gaps.c.rank, gaps.c.reason)
    )
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for rank, reason, dropped in connection.execute(question):
        found[rank][reason] = int(dropped)
    return found
