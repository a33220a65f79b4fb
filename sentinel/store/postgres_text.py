"""Send text to PostgreSQL, which holds every character but NUL."""

from psycopg.adapt import Buffer
from psycopg.types.string import StrDumperUnknown


class NoNulDumper(StrDumperUnknown):
    """A NUL becomes U+FFFD, the mark for what cannot be shown; refusing it would lose the rest of the batch."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace("\x00", "\ufffd"))
