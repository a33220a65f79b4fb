"""Decide how long to wait before the next attempt."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 300.0


def pause_seconds(tries: int) -> float:
    """How long to wait after so many attempts: 1 s, doubling up to 5 minutes.

    >>> [pause_seconds(tries) for tries in (1, 2, 3, 9, 10, 1000)]
    [1.0, 2.0, 4.0, 256.0, 300.0, 300.0]
    """
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(tries - 1, 30))
