"""Send an alert to any receiver of Standard Webhooks (https://www.standardwebhooks.com), signed if there is a secret.

The request carries `webhook-id` (the alert's, the same on every attempt), `webhook-timestamp` (of the attempt) and
`webhook-signature` (HMAC-SHA256 of id, timestamp and body).
"""

import binascii
from datetime import UTC, datetime

import msgspec
from standardwebhooks.webhooks import Webhook as Signer

from sentinel.errors import SettingsError
from sentinel.notify.alert import Alert, rfc3339
from sentinel.notify.channel import Request, json_body
from sentinel.vocabulary import AlertChannel

_TIMES = ("opened_at", "resolved_at")


class Webhook:
    """Channel `webhook`. Raises SettingsError for a secret that is not base64."""

    name = AlertChannel.WEBHOOK

    def __init__(self, url: str, secret: str = "") -> None:
        self._url = url
        self._signer = _signer(secret) if secret else None

    def request(self, alert: Alert, now: float) -> Request:
        body = json_body(_message(alert))
        headers = {
            "content-type": "application/json",
            "webhook-id": alert.id,
            "webhook-timestamp": str(int(now)),
        }
        if self._signer is not None:
            moment = datetime.fromtimestamp(int(now), UTC)
            headers["webhook-signature"] = self._signer.sign(alert.id, moment, body.decode())
        return Request(self._url, headers, body)


def _message(alert: Alert) -> dict[str, object]:
    data = msgspec.to_builtins(alert)
    del data["earlier"]
    data.update({name: None if data[name] is None else rfc3339(data[name]) for name in _TIMES})
    moment = alert.opened_at if alert.resolved_at is None else alert.resolved_at
    return {"type": f"incident.{alert.condition}", "timestamp": rfc3339(moment), "data": data}


def _signer(secret: str) -> Signer:
    try:
        return Signer(secret)
    except (binascii.Error, ValueError, RuntimeError):
        raise SettingsError(
            'notify.webhook.secret cannot be used; it must be "whsec_" and the base64 of random bytes'
        ) from None
