"""The daemon's composition root: make the parts, join them, serve until told to leave, drain."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from sentinel.config import Settings
from sentinel.daemon import recovery
from sentinel.daemon.alerting import Alerting
from sentinel.daemon.control import Control
from sentinel.daemon.core import Core
from sentinel.daemon.departures import Departures
from sentinel.daemon.dispatcher import Dispatcher
from sentinel.daemon.http import Http, Seen
from sentinel.daemon.judging import Judging
from sentinel.daemon.lifetime import NOBODY_SECONDS, Lifetime
from sentinel.daemon.lock import Lock
from sentinel.daemon.metrics import Metrics
from sentinel.daemon.node import Node
from sentinel.daemon.pipeline import Pipeline
from sentinel.daemon.rank import Fleet
from sentinel.daemon.receiver import Receiver
from sentinel.daemon.session import Sessions
from sentinel.daemon.writer import Writer
from sentinel.errors import PermanentError, TemporaryError
from sentinel.places import Places, make_private
from sentinel.records import Origin
from sentinel.store.database import Store
from sentinel.store.engine import shown, sqlite_file
from sentinel.store.location import is_elsewhere, owner_of, url_of
from sentinel.vocabulary import Reason

TICK_SECONDS = 0.5
ABORT_SECONDS = 2.0  # for turns under way when we leave
_log = structlog.get_logger()


class Ready(NamedTuple):
    """Where the daemon listens."""

    url: str  # "" without HTTP
    socket: str


def serve(
    places: Places,
    settings: Settings,
    *,
    auto: bool,
    ready: Callable[[Ready], None],
    nobody_seconds: float = NOBODY_SECONDS,
) -> None:
    """Run until SIGTERM, SIGINT or, with `auto`, until no run is left. Calls `ready` once it listens.

    Raises DaemonRunningError, SettingsError, SchemaTooNewError, PermanentError; leaves nothing behind then.
    """
    make_private(places.runtime)
    _make_home(places)
    lock = Lock(places.lock)
    try:
        asyncio.run(_Daemon(places, settings, auto, nobody_seconds).run(ready))
    finally:
        lock.release()


class _Daemon:
    """All parts of one daemon, and the order in which they start and end."""

    def __init__(self, places: Places, settings: Settings, auto: bool, nobody_seconds: float) -> None:
        self._places = places
        self._settings = settings
        self._url = url = url_of(places, settings.store)
        self._owner = owner_of(places, url)
        if is_elsewhere(places, settings.store):
            _log.warning("the home is on a network file system; the database lies on this node", database=url)
        self._database_file = sqlite_file(url)
        self._fleet = Fleet()
        self._metrics = Metrics()
        self._writer = Writer(self._open_store, settings.store.batch_seconds, self._stored)
        core = Core(self._fleet, self._writer, self._metrics)
        self._alerting = Alerting(core, settings.notify)
        self._dispatcher = Dispatcher(core)
        self._pipeline = Pipeline(core, self._dispatcher, Judging(core, self._dispatcher, settings))
        self._departures = Departures(core, self._dispatcher, self._pipeline, places)
        self._node = Node(self._fleet, self._writer, self._metrics, places.home)
        self._sessions = Sessions(
            core, self._pipeline, self._departures, self._node, database_url=url, mode=settings.mode
        )
        control = Control(core, self._dispatcher, url)
        self._receiver = Receiver(places.socket, self._sessions.serve, control.answer, self._metrics.reject)
        seen = Seen(self._fleet, self._metrics, self._dispatcher, url, lambda: self._writer.trouble)
        self._http = Http(settings.http, seen)
        self._lifetime = Lifetime(
            self._fleet,
            settings.daemon.leave_seconds,
            auto=auto,
            nobody_seconds=nobody_seconds,
            unfinished=lambda: self._alerting.busy,
            stay_seconds=settings.notify.stay_seconds,
        )
        self._metrics.queued = lambda: self._writer.queued
        self._metrics.lag_seconds = lambda: self._writer.lag_seconds
        self._metrics.record_kept = lambda: not self._writer.trouble
        self._leave = asyncio.Event()

    async def run(self, ready: Callable[[Ready], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_stray)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave.set)
        await self._writer.start()
        probes: list[asyncio.Task[None]] = []
        try:
            await self._take_over_in_time()
            await self._http.start()
            self._sessions.http_url = self._http.url
            await self._receiver.start()
            self._announce()
            probes = [loop.create_task(part) for part in (self._node.run(), self._alerting.run(), self._tick())]
            ready(Ready(self._http.url, str(self._places.socket)))
            _log.info("ready", url=self._http.url, socket=str(self._places.socket), pid=os.getpid())
            await self._leave.wait()
        finally:
            await self._drain(probes)

    def _open_store(self) -> Store:
        store = Store.open(self._url, self._owner)
        store.on_incident = self._alerting.announce
        return store

    async def _take_over_in_time(self) -> None:
        try:
            await self._take_over()
        except TimeoutError:
            raise TemporaryError(
                f"the database does not take writes: {self._writer.trouble or shown(self._url)}"
            ) from None

    async def _take_over(self) -> None:
        """Go on where an earlier daemon of this home stopped."""
        await self._sessions.resume(await self._writer.after(lambda store: store.running()))
        await self._departures.take_in_spools()
        for left in await asyncio.to_thread(recovery.unsettled, self._url, self._owner):
            if not (left.committed and left.run_id in self._fleet.runs):
                await self._abort(left.decision_id)
        await self._writer.flushed()
        for run in await asyncio.to_thread(recovery.unclosed, self._url):
            await self._close_books(run)
        self._fleet.ever = bool(self._fleet.runs)

    async def _abort(self, decision_id: str) -> None:
        await self._writer.after(lambda store: recovery.settle(store, decision_id, Reason.NO_WORD))

    async def _close_books(self, run: recovery.Unclosed) -> None:
        await self._writer.after(lambda store: recovery.close_books(store, *run))
        self._metrics.run_ended(run.status)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._pipeline.note_heard()
            self._pipeline.combining.overdue()
            if self._database_file is not None and not self._database_file.exists():
                _log.error("the database was removed, so this daemon leaves", database=str(self._database_file))
                self._leave.set()
            if self._lifetime.is_over(time.monotonic()):
                _log.info("the last run has ended, so this daemon leaves")
                self._leave.set()

    async def _drain(self, probes: list[asyncio.Task[None]]) -> None:
        """Accept no more, write what was accepted, acknowledge it, leave."""
        self._receiver.stop()
        self._withdraw()
        for probe in probes:
            probe.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dispatcher.close(), ABORT_SECONDS)
        self._pipeline.note_heard()
        if not await self._writer.close(self._settings.daemon.drain_seconds):
            _log.error("not everything could be written in time; clients keep it", queued=self._writer.queued)
        await asyncio.sleep(0)  # the writer's last words to the loop become acknowledgements
        await self._receiver.close()
        await self._sessions.close()
        self._node.close()
        await self._http.close()
        _log.info("left", pid=os.getpid())

    def _stored(self, highest: dict[Origin, int]) -> None:
        self._sessions.stored(highest)

    def _announce(self) -> None:
        """Tell Prometheus where to scrape (file_sd). Whole or not at all: a rename."""
        if not self._http.address:
            return
        groups = [{"targets": [self._http.address], "labels": {"job": "sentinel"}}]
        draft = self._places.targets.with_suffix(".draft")
        try:
            draft.write_text(json.dumps(groups) + "\n", encoding="utf-8")
            draft.replace(self._places.targets)
        except OSError as error:
            _log.warning("targets.json cannot be written", error=str(error))

    def _withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._places.targets.unlink(missing_ok=True)


def _make_home(places: Places) -> None:
    try:
        places.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        places.spools.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PermanentError(
            f"the home {places.home} cannot be written ({error.strerror}); set SENTINEL_HOME to a folder of yours"
        ) from None


def _log_stray(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    del loop
    _log.error("stray failure", text=context.get("message"), exc_info=context.get("exception"))
