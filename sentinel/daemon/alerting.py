"""Send the alerts that are due, each channel by itself, until they arrive or their time is over."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import structlog
from sqlalchemy import Connection

from sentinel.alert_settings import NotifySettings
from sentinel.daemon.announcing import Announcer
from sentinel.daemon.core import Core
from sentinel.errors import TemporaryError
from sentinel.notify import alert as alerts
from sentinel.notify import catalogue
from sentinel.notify.channel import Channel, Delivery
from sentinel.notify.patience import LONGEST_PAUSE_SECONDS, pause_seconds
from sentinel.records import Incident
from sentinel.store import outbox
from sentinel.store.outbox import Claimed, Due
from sentinel.vocabulary import AlertCondition, AlertOutcome, AlertState

if TYPE_CHECKING:
    from sentinel.notify.sending import Sender

IDLE_SECONDS = 30.0  # between looks into an outbox that other daemons may share
TROUBLE_SECONDS = 2.0  # after the database refused
_NOT_ANNOUNCED = "the channel never got to know of this incident"
_log = structlog.get_logger()


class Alerting:
    """All channels of one daemon. `announce` belongs to the writer's thread, the rest to the event loop."""

    def __init__(self, core: Core, settings: NotifySettings) -> None:
        """Reads secrets. Raises SettingsError."""
        _, self._writer, self._metrics = core
        self._settings = settings
        self._channels = catalogue.build(settings)
        self._sender = _new_sender() if self._channels else None
        self._announcer = Announcer(settings, frozenset(self._channels), self._filed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = {name: asyncio.Event() for name in self._channels}

    def announce(self, connection: Connection, incident: Incident) -> None:
        """File alerts about this version of an incident, in the transaction of `connection`."""
        self._announcer.announce(connection, incident)

    @property
    def busy(self) -> bool:
        """Whether alerts are still due."""
        return any(self._metrics.alerts_due.values()) or any(event.is_set() for event in self._news.values())

    async def run(self) -> None:
        """Until cancelled."""
        if self._sender is None:
            return
        self._loop = asyncio.get_running_loop()
        for event in self._news.values():
            event.set()  # look at what an earlier daemon left
        async with self._sender as sender:
            await self._patiently(lambda connection: outbox.hurry(connection, time.time()))
            async with asyncio.TaskGroup() as group:
                for channel in self._channels.values():
                    group.create_task(self._serve(channel, sender))

    def _filed(self) -> None:
        # Said in the writer's thread before the commit; whatever we ask that thread for then comes after it.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for event in self._news.values():
            event.set()

    # ------------------------------------------------------------------ one channel

    async def _serve(self, channel: Channel, sender: "Sender") -> None:
        while True:
            pause = TROUBLE_SECONDS
            try:
                pause = await self._round(channel, sender)
            except TemporaryError:
                pass  # the writer has said so in the log already
            except Exception as error:  # noqa: BLE001 - one channel's trouble must not end the others
                # Not its text: it may quote what we wanted to send, and where.
                _log.error("alerts cannot be sent at the moment", channel=channel.name, error=type(error).__name__)
            if pause > 0:
                await _wait(self._news[channel.name], pause)

    async def _round(self, channel: Channel, sender: "Sender") -> float:
        """Send what is due now; then how long there is nothing to do."""
        self._news[channel.name].clear()
        waiting = await self._look(channel)
        now = time.time()
        heads = list(_heads(waiting))
        ready = [head for head in heads if self._is_ready(head, now)]
        for head in ready:
            await self._deliver(channel, head, sender)
        if ready:
            return 0.0
        return min((head.due_at - now for head in heads), default=IDLE_SECONDS)

    async def _look(self, channel: Channel) -> list[Due]:
        before = time.time() - self._settings.give_up_seconds
        reason = f"not delivered within {self._settings.give_up_seconds:g} s"

        def look(connection: Connection) -> tuple[int, list[Due]]:
            given_up = outbox.give_up_older(connection, channel.name, before, reason)
            return given_up, outbox.due(connection, channel.name)

        given_up, waiting = await self._writer.now(lambda store: store.run(look))
        self._metrics.alert(channel.name, AlertOutcome.FAILED, given_up)
        self._metrics.alerts_due[channel.name] = len(waiting)
        return waiting

    def _is_ready(self, head: Due, now: float) -> bool:
        # Further away than any pause of ours: the clock was set back.
        return not now < head.due_at <= now + self._settings.attempt_seconds + LONGEST_PAUSE_SECONDS

    async def _deliver(self, channel: Channel, head: Due, sender: "Sender") -> None:
        pause = pause_seconds(head.tries + 1)
        next_at = time.time() + self._settings.attempt_seconds + pause
        claimed = await self._writer.now(
            lambda store: store.run(lambda connection: outbox.claim(connection, head, next_at))
        )
        if claimed is None:
            return
        delivery = await self._attempt(channel, head, claimed, sender)
        ended = _ENDS[delivery.outcome]
        due_at = time.time() + max(pause, delivery.wait_seconds) if ended.state is AlertState.DUE else None
        self._metrics.alert(channel.name, delivery.outcome)
        log = getattr(_log, ended.log_level)
        log("alert", channel=channel.name, alert=head.id, outcome=delivery.outcome, reason=delivery.reason)
        await self._patiently(
            lambda connection: outbox.settle(connection, head.id, ended.state, delivery.reason, due_at)
        )

    async def _attempt(self, channel: Channel, head: Due, claimed: Claimed, sender: "Sender") -> Delivery:
        try:
            alert = alerts.decode(claimed.body)
            request = channel.request(alert, time.time())
        except Exception as error:  # noqa: BLE001 - an alert that cannot be rendered never can; others go on
            _log.error("an alert cannot be rendered", alert=head.id, error=type(error).__name__)
            return Delivery(AlertOutcome.FAILED, f"it cannot be rendered: {type(error).__name__}")
        if alert.condition is AlertCondition.RESOLVED and not claimed.delivered_before:
            return Delivery(AlertOutcome.FAILED, _NOT_ANNOUNCED)
        return await sender.attempt(request, self._settings.attempt_seconds)

    async def _patiently(self, job: Callable[[Connection], None]) -> None:
        """Have it written, however long the disk refuses."""
        while True:
            try:
                await self._writer.now(lambda store: store.run(job))
            except TemporaryError:
                await asyncio.sleep(TROUBLE_SECONDS)
            else:
                return


def _new_sender() -> "Sender":
    from sentinel.notify.sending import Sender  # imports that a daemon without channels does not need

    return Sender()


class _End(NamedTuple):
    """What an attempt's outcome makes of the alert."""

    state: AlertState
    log_level: str


_ENDS = {
    AlertOutcome.SENT: _End(AlertState.SENT, "info"),
    AlertOutcome.RETRIED: _End(AlertState.DUE, "warning"),
    AlertOutcome.FAILED: _End(AlertState.FAILED, "error"),
}


def _heads(waiting: list[Due]) -> Iterator[Due]:
    """The oldest of each incident: the others wait until it has arrived or was given up."""
    seen: set[str] = set()
    for one in waiting:
        if one.incident_id not in seen:
            seen.add(one.incident_id)
            yield one


async def _wait(news: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return
