"""Send an alert to a Slack channel, through an incoming webhook.

Slack knows no ids, so an alert whose answer was lost is seen twice; its id stands in the last line.
"""

from typing import Any

from sentinel.notify.alert import Alert, shown_ranks
from sentinel.notify.channel import Request, json_body
from sentinel.vocabulary import AlertChannel, AlertCondition, Severity

MOST_CHARACTERS = 2900  # Slack refuses a text block of more than 3000
_SIGNS = {Severity.INFO: ":information_source:", Severity.WARNING: ":warning:", Severity.CRITICAL: ":rotating_light:"}


class Slack:
    """Channel `slack`."""

    name = AlertChannel.SLACK

    def __init__(self, url: str) -> None:
        self._url = url

    def request(self, alert: Alert, now: float) -> Request:
        del now  # Slack stamps messages itself
        return Request(self._url, {"content-type": "application/json"}, json_body(_message(alert)))


def _message(alert: Alert) -> dict[str, Any]:
    over = alert.condition is AlertCondition.RESOLVED
    sign = ":white_check_mark:" if over else _SIGNS[alert.severity]
    title = f"{sign} *{alert.condition}: {alert.kind}* ({alert.severity}) in run `{_plain(alert.run_id)}`"
    told = "\n".join(_plain(text) for text in (alert.summary, alert.cause if over else "") if text)
    where = f"rank {shown_ranks(alert.ranks)}, steps {alert.first_step} to {alert.last_step}"
    return {
        "text": f"{alert.condition}: {alert.kind} ({alert.severity}): {_plain(alert.summary)}"[:MOST_CHARACTERS],
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": f"{title}\n{told}"[:MOST_CHARACTERS]}},
            {
                "type": "context",
                "elements": [{"type": "mrkdwn", "text": f"{where} | {_plain(alert.id)}"[:MOST_CHARACTERS]}],
            },
        ],
    }


def _plain(text: str) -> str:
    """As Slack asks: these three signs begin its own markup, such as mentions of everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
