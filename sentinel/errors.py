"""What may go wrong, by whose fault, and whether trying again can help."""


class SentinelError(Exception):
    """Every error that sentinel raises on purpose. Its text says what, with which value, and what to do."""


class MisuseError(SentinelError, ValueError):
    """Wrong arguments or settings. Raised by `attach` and by commands, at once; never later in the loop."""


class SettingsError(MisuseError):
    """A settings file, variable or argument that cannot be used; names the key and the remedy."""


class WireError(SentinelError):
    """Bytes that are not a frame of ours: oversized, malformed, too deep, or of another version."""


class TemporaryError(SentinelError):
    """An outward call failed and may succeed later. One place owns the back-off."""


class PermanentError(SentinelError):
    """An outward call failed and will fail again with the same input."""


class SchemaTooNewError(PermanentError):
    """The database was written by a newer sentinel; this one must not touch it."""


class SchemaTooOldError(PermanentError):
    """The database was written by an older sentinel and must be upgraded before it can be read."""


class NoSuchRunError(SentinelError):
    """No run has that id, prefix or name."""


class NoDaemonError(SentinelError):
    """No daemon answers on this home's socket."""


class DaemonRunningError(SentinelError):
    """Another daemon holds this home's lock."""


class RunStopped(SystemExit):
    """Raised at a step boundary of a loop without `run.batches` when the run is told to stop. Exit code 0."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return f"stopped by sentinel: {self.reason}"
