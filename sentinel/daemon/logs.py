"""Log one JSON object per line to stderr, which whoever starts the daemon may lead into a file."""

import contextlib
import io
import logging
import os
import stat
import sys
from pathlib import Path
from typing import TextIO

import structlog

LOG_BYTES = 10 * 2**20  # a log file that is larger begins anew; looked at whenever so much more was written


def configure() -> None:
    """Called once, by the command."""
    stream = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the process's life
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(_Bounded(stream)),
        cache_logger_on_first_use=False,
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)


class _Bounded(io.StringIO):
    """A log that grows too large begins anew; one that cannot be written is no reason to stop watching a run."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._written = LOG_BYTES  # look at the file's size at the first line

    def write(self, text: str) -> int:
        self._written += len(text)
        with contextlib.suppress(OSError):
            if self._written > LOG_BYTES:
                self._written = 0
                _begin_anew(self._stream.fileno())
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _begin_anew(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size > LOG_BYTES:
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
