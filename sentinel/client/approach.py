"""Find a way to a daemon: connect, back off, have one started, complain once when there is none."""

from collections.abc import Callable

from sentinel.client.connection import Connection
from sentinel.client.launch import Launcher
from sentinel.config import Settings
from sentinel.errors import SettingsError
from sentinel.places import Places

MAX_RETRY_SECONDS = 5.0
STARTING_RETRY_SECONDS = 0.1  # while a daemon that we started comes up, and while the run is ending
ABSENT_SECONDS = 10.0  # without a daemon before a rank that waits for another rank's daemon complains


class Approach:
    """Used by the link's thread alone. Times are of one monotonic clock."""

    def __init__(
        self, places: Places, settings: Settings, launcher: Launcher | None, trouble: Callable[[str], None]
    ) -> None:
        self._places = places
        self._first_pause_seconds = settings.outbox.retry_seconds
        self._launcher = launcher
        # Without a launcher of its own a rank waits for the daemon that local rank 0 may start.
        self._may_appear = settings.daemon.autostart
        self._trouble = trouble
        self._failures = 0
        self._hurrying = False
        self._absent_since: float | None = None
        self._ever = False
        self.next_try = 0.0

    def due(self, now: float) -> bool:
        return now >= self.next_try

    def connect(self, now: float) -> Connection | None:
        """A connection that is not greeted yet; None where nobody listens (and one may have been started)."""
        if self._absent_since is None:
            self._absent_since = now
        try:
            return Connection(self._places.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            if self._launcher is not None:
                self._launcher.start(now)
            self._complain_if_absent(now)
            self.failed(now)
        except BlockingIOError:
            self.failed(now)  # a stopped daemon
        except (OSError, SettingsError) as error:
            self._trouble(f"no daemon can be reached: {error} (training goes on unprotected)")
            self.failed(now)
        return None

    def succeeded(self) -> None:
        """A daemon greeted."""
        self._failures = 0
        self._absent_since = None
        self._ever = True

    def failed(self, now: float) -> None:
        """Pause before the next try, twice as long each time."""
        pause_seconds = min(MAX_RETRY_SECONDS, self._first_pause_seconds * 2 ** min(self._failures, 10))
        if self._hurrying or (self._launcher is not None and self._launcher.starting(now)):
            pause_seconds = STARTING_RETRY_SECONDS
        else:
            self._failures += 1
        self.next_try = now + pause_seconds

    def hurry(self) -> None:
        """The run is ending: no time for long pauses."""
        if not self._hurrying:
            self._hurrying = True
            self.next_try = 0.0

    def hopeful(self, now: float) -> bool:
        """Whether trying on may still find a daemon."""
        if self._launcher is not None:
            return self._ever or not (self._launcher.hopeless or self._launcher.failing)
        return self._ever or (self._may_appear and not self._is_absent(now))

    def look(self, now: float) -> None:
        """Reap a daemon of ours that ended."""
        if self._launcher is not None:
            self._launcher.look(now)

    def abandon(self) -> None:
        """Leave a daemon of ours to itself."""
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.forget()

    def _is_absent(self, now: float) -> bool:
        return self._absent_since is not None and now - self._absent_since >= ABSENT_SECONDS

    def _complain_if_absent(self, now: float) -> None:
        if self._launcher is not None or (self._may_appear and not self._is_absent(now)):
            return
        self._trouble(
            f"no daemon answers on {self._places.socket}; start one with `sentinel daemon` "
            "or set daemon.autostart = true (training goes on unprotected)"
        )
