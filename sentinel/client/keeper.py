"""Decide when critical messages must go to disk, and whether anybody keeps them."""

import contextlib
from collections.abc import Callable

from sentinel import wire
from sentinel.client.outbox import Outbox
from sentinel.client.spool import Spool
from sentinel.errors import SettingsError, WireError
from sentinel.places import Places
from sentinel.records import Hello

# A connected daemon acknowledges within milliseconds: then an fsync of ours would only delay the next command.
GRACE_SECONDS = 0.1
RETRY_SECONDS = 5.0  # after a failed write


class Keeper:
    """Spools what no daemon has acknowledged: at once without a connection, else after a grace."""

    def __init__(
        self, places: Places, hello: Callable[[], Hello], outbox: Outbox, trouble: Callable[[str], None]
    ) -> None:
        self._places = places
        self._hello = hello
        self._outbox = outbox
        self._trouble = trouble
        self._spool: Spool | None = None
        self._due: tuple[int, float] | None = None  # the newest critical message seen, and when the grace ends
        self._not_before = 0.0
        self.works = True  # False after a failed write, until one succeeds

    def keep(self, connected: bool, now: float) -> None:
        """Write what must be written by now. Never raises for the disk: that is told as trouble, and tried again."""
        newest = self._outbox.last_critical
        if newest <= self._written_seq:
            self._due = None
            return
        if connected and self._due is None:
            self._due = newest, now + GRACE_SECONDS
        if now < self._not_before or (connected and self._due is not None and now < self._due[1]):
            return
        self._due = None
        self._write(newest, now)

    def acknowledge(self, seq: int) -> None:
        """The daemon has everything up to `seq`."""
        if self._due is not None and seq >= self._due[0]:
            self._due = None
        if self._spool is not None:
            with contextlib.suppress(OSError):  # what is kept too long is told apart by its number
                self._spool.acknowledge(seq)

    def close(self, now: float) -> None:
        """Write what is still unacknowledged; the file stays only if there is such a thing."""
        self._not_before = 0.0
        self.keep(connected=False, now=now)
        if self._spool is not None:
            self._spool.close()

    def abandon(self) -> None:
        """In a forked child: close our copy of the file."""
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.abandon()

    @property
    def _written_seq(self) -> int:
        return self._spool.written_seq if self._spool is not None else 0

    def _write(self, newest: int, now: float) -> None:
        hello = self._hello()
        if self._spool is None:
            self._spool = Spool(self._places.spool(hello.run_id, hello.rank, hello.nonce))
        frames: list[tuple[int, bytes]] = []
        for message in self._outbox.critical_after(self._written_seq):
            with contextlib.suppress(WireError):  # it cannot be sent either; the link drops and counts it
                frames.append((message.seq, wire.encode(message)))
        try:
            self._spool.append(hello, frames)
        except (OSError, SettingsError) as error:
            self.works = False
            self._not_before = now + RETRY_SECONDS
            self._trouble(
                f"{self._spool.path} cannot be written ({error}); without it and without a daemon "
                "sentinel takes no action that it could not record"
            )
        else:
            self.works = True
            self._spool.written_seq = max(self._spool.written_seq, newest)
