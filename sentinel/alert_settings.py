"""The settings of alerts: which channels there are, what goes where, and how long to try."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sentinel.checks import one_of, positive
from sentinel.errors import SettingsError
from sentinel.vocabulary import AlertChannel, Kind, Severity


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """[notify.webhook] Any receiver of Standard Webhooks."""

    url: str = field(default="", repr=False)  # where to POST; empty: this channel is off
    url_file: str = ""  # a file that holds the URL, instead of `url`
    secret: str = field(default="", repr=False)  # signs each request: "whsec_" and base64; empty: unsigned
    secret_file: str = ""  # a file that holds the secret, instead of `secret`

    def __post_init__(self) -> None:
        _only_one("notify.webhook", "url", self.url, self.url_file)
        _only_one("notify.webhook", "secret", self.secret, self.secret_file)


@dataclass(frozen=True, slots=True)
class AlertmanagerSettings:
    """[notify.alertmanager] A Prometheus Alertmanager, by its API version 2."""

    url: str = field(default="", repr=False)  # its root, such as http://localhost:9093; empty: this channel is off
    url_file: str = ""  # a file that holds the URL, instead of `url`
    token: str = field(default="", repr=False)  # sent as "Authorization: Bearer"; empty: no such header
    token_file: str = ""  # a file that holds the token, instead of `token`

    def __post_init__(self) -> None:
        _only_one("notify.alertmanager", "url", self.url, self.url_file)
        _only_one("notify.alertmanager", "token", self.token, self.token_file)


@dataclass(frozen=True, slots=True)
class SlackSettings:
    """[notify.slack] An incoming webhook of Slack, or of what understands the same."""

    url: str = field(default="", repr=False)  # the webhook's URL, which is its secret; empty: this channel is off
    url_file: str = ""  # a file that holds the URL, instead of `url`

    def __post_init__(self) -> None:
        _only_one("notify.slack", "url", self.url, self.url_file)


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """[[notify.route]] Which incidents a channel hears of."""

    channel: str  # "webhook", "alertmanager" or "slack"
    severity: tuple[str, ...] = (Severity.WARNING.value, Severity.CRITICAL.value)  # severities that pass
    kinds: tuple[str, ...] = ()  # kinds of incident that pass; none named: all

    def __post_init__(self) -> None:
        one_of("notify.route.channel", self.channel, tuple(AlertChannel))
        for name in self.severity:
            one_of("notify.route.severity", name, tuple(Severity))
        for name in self.kinds:
            one_of("notify.route.kinds", name, tuple(Kind))


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """[notify] Alerts that leave this machine; see docs/how-to-alerts.md."""

    webhook: WebhookSettings = field(default_factory=WebhookSettings)
    alertmanager: AlertmanagerSettings = field(default_factory=AlertmanagerSettings)
    slack: SlackSettings = field(default_factory=SlackSettings)
    route: tuple[RouteSettings, ...] = ()  # [[notify.route]] tables; none: from warning up to every channel
    attempt_seconds: float = 10.0  # total deadline of one attempt, from connecting to the last byte read
    give_up_seconds: float = 86400.0  # an alert that could not be delivered for so long is recorded as failed
    stay_seconds: float = 600.0  # an auto-started daemon with alerts still due stays at most so much longer

    def __post_init__(self) -> None:
        positive("notify.attempt_seconds", self.attempt_seconds)
        positive("notify.give_up_seconds", self.give_up_seconds)
        positive("notify.stay_seconds", self.stay_seconds)


def _only_one(section: str, name: str, value: str, file: str) -> None:
    if value and file:
        raise SettingsError(f"both {section}.{name} and {section}.{name}_file are set; keep the file")
    if name == "url" and value:
        check_url(f"{section}.url", value)


def check_url(name: str, url: str) -> None:
    """Raise SettingsError for what is no http(s) URL. The text never repeats it: such a URL may be a secret."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or any(sign.isspace() or not sign.isprintable() for sign in url):
        raise SettingsError(f"{name} is not a URL; it must look like https://host/path")
