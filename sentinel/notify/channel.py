"""What a channel is: something that turns an alert into one HTTP request."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from sentinel.notify.alert import Alert
from sentinel.vocabulary import AlertChannel, AlertOutcome


class Request(NamedTuple):
    """One POST. URL and headers may hold secrets: no log, error or table may repeat them."""

    url: str
    headers: Mapping[str, str]
    body: bytes


class Delivery(NamedTuple):
    """How an attempt ended."""

    outcome: AlertOutcome  # RETRIED: another attempt may succeed; FAILED: it would end the same
    reason: str  # for people
    wait_seconds: float = 0.0  # the receiver asked for so much patience


class Channel(Protocol):
    """Knows an address and a format. Does no I/O after it was made."""

    name: AlertChannel

    def request(self, alert: Alert, now: float) -> Request:
        """The request that delivers `alert`; `now` is the wall clock, unix seconds."""
        ...


def json_body(value: Any) -> bytes:
    """Strict JSON, also of hostile text. Raises ValueError for a non-finite number."""
    return json.dumps(value, allow_nan=False).encode()
