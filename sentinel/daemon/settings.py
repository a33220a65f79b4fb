"""Read the daemon's settings: `sentinel.toml` and the environment, through pydantic-settings.

The classes are those of `sentinel.config`; the training process reads the same file with msgspec.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from sentinel import config
from sentinel.alert_settings import NotifySettings
from sentinel.checks import shown
from sentinel.detect_settings import DetectSettings
from sentinel.errors import SettingsError
from sentinel.vocabulary import Mode


class _FromFileAndEnvironment(BaseSettings):
    """`sentinel.config.Settings`, checked by pydantic."""

    model_config = SettingsConfigDict(extra="forbid")

    mode: Mode = Mode.PROTECT
    loss: config.LossSettings = Field(default_factory=config.LossSettings)
    reflex: config.ReflexSettings = Field(default_factory=config.ReflexSettings)
    snapshot: config.SnapshotSettings = Field(default_factory=config.SnapshotSettings)
    data: config.DataSettings = Field(default_factory=config.DataSettings)
    outbox: config.OutboxSettings = Field(default_factory=config.OutboxSettings)
    daemon: config.DaemonSettings = Field(default_factory=config.DaemonSettings)
    http: config.HttpSettings = Field(default_factory=config.HttpSettings)
    store: config.StoreSettings = Field(default_factory=config.StoreSettings)
    detect: DetectSettings = Field(default_factory=DetectSettings)
    respond: config.RespondSettings = Field(default_factory=config.RespondSettings)
    rollback: config.RollbackSettings = Field(default_factory=config.RollbackSettings)
    pause: config.PauseSettings = Field(default_factory=config.PauseSettings)
    sampling: config.SamplingSettings = Field(default_factory=config.SamplingSettings)
    throughput: config.ThroughputSettings = Field(default_factory=config.ThroughputSettings)
    notify: NotifySettings = Field(default_factory=NotifySettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` hands over: file and environment, read by the rules that the training process uses."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


def load(path: str | Path | None, environ: Mapping[str, str]) -> config.Settings:
    """The settings of a daemon. Raises SettingsError naming the key, the value and the remedy."""
    file = path or environ.get("SENTINEL_SETTINGS") or None
    tree = config.merge(config.read_file(file), config.from_environment(environ))
    config.check_keys(tree, config.Settings, "")
    try:
        read = _FromFileAndEnvironment(**tree)
    except ValidationError as error:
        raise SettingsError(_in_words(error)) from None
    settings = config.Settings(**{item.name: getattr(read, item.name) for item in fields(config.Settings)})
    return _lowered(settings, environ.get("SENTINEL_MODE"))


def for_run(own: config.Settings, asked: Mapping[str, Any]) -> config.Settings:
    """What a run asked for, over the daemon's own. Raises SettingsError for what cannot be used."""
    wanted = {name: asked[name] for name in config.RUN_SECTIONS if name in asked}
    return config.build(config.merge(config.run_sections(own), wanted))


def weaker(one: Mode, other: Mode) -> Mode:
    """The one with less power."""
    order = list(Mode)
    return max(one, other, key=order.index)


def _lowered(settings: config.Settings, text: str | None) -> config.Settings:
    if not text:
        return settings
    if text not in tuple(Mode):
        raise SettingsError(f"SENTINEL_MODE is {text!r}; it must be one of {', '.join(Mode)}")
    parts = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return config.Settings(**{**parts, "mode": weaker(settings.mode, Mode(text))})


def _in_words(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if "error" in first.get("ctx", {}):  # raised by the section's own check: it already says everything
        return str(first["ctx"]["error"])
    key = ".".join(str(part) for part in first["loc"])
    return f"{key} is {shown(key, first['input'])}; {first['msg'][:1].lower()}{first['msg'][1:]}"
