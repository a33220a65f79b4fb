"""The channels that the settings turn on, with their secrets read."""

from collections.abc import Callable
from pathlib import Path

from sentinel.alert_settings import NotifySettings, check_url
from sentinel.errors import SettingsError
from sentinel.notify.alertmanager import Alertmanager
from sentinel.notify.channel import Channel
from sentinel.notify.slack import Slack
from sentinel.notify.webhook import Webhook
from sentinel.vocabulary import AlertChannel

# A new channel: one file with its class, one function here, one section in sentinel/alert_settings.py.
DEFAULT_CHANNELS: tuple[Callable[[NotifySettings], Channel | None], ...]


def build(settings: NotifySettings) -> dict[AlertChannel, Channel]:
    """By name. Raises SettingsError for a file that cannot be read or a value that cannot be used."""
    found = [make(settings) for make in DEFAULT_CHANNELS]
    return {channel.name: channel for channel in found if channel is not None}


def _webhook(settings: NotifySettings) -> Channel | None:
    asked = settings.webhook
    url = _url("notify.webhook.url", asked.url, asked.url_file)
    return Webhook(url, _secret("notify.webhook.secret", asked.secret, asked.secret_file)) if url else None


def _alertmanager(settings: NotifySettings) -> Channel | None:
    asked = settings.alertmanager
    url = _url("notify.alertmanager.url", asked.url, asked.url_file)
    return Alertmanager(url, _secret("notify.alertmanager.token", asked.token, asked.token_file)) if url else None


def _slack(settings: NotifySettings) -> Channel | None:
    url = _url("notify.slack.url", settings.slack.url, settings.slack.url_file)
    return Slack(url) if url else None


DEFAULT_CHANNELS = (_webhook, _alertmanager, _slack)


def _url(name: str, value: str, file: str) -> str:
    url = _secret(name, value, file)
    if url:
        check_url(f"{name}_file" if file else name, url)
    return url


def _secret(name: str, value: str, file: str) -> str:
    """The value, else the first line of its file. The text of an error names the file, never what it holds."""
    if not file:
        return value
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise SettingsError(f"{name}_file is {file!r}, which cannot be read: {why}") from None
    if not text or not text.isascii() or not text.isprintable():
        raise SettingsError(f"{name}_file is {file!r}, which must hold one line of plain text")
    return text
