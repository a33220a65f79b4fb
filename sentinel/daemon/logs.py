"""Log one JSON object per line to stderr, which whoever starts the daemon may lead into a file."""

import contextlib
import io
import logging
import os
import stat
import sys
from typing import TextIO

import structlog

LOG_BYTES = 10 * 2**20  # a log file that is larger when the daemon starts begins anew


def configure() -> None:
    """Called once, by the command."""
    _begin_anew(sys.stderr.fileno())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(_Forgiving(sys.stderr)),
        cache_logger_on_first_use=False,
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)


class _Forgiving(io.StringIO):
    """A log that cannot be written (disk full, reader gone) is no reason to stop watching a run."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
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
