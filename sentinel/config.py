"""Every setting, once: one documented class per concern, read from `sentinel.toml` and the environment.

The classes are plain frozen dataclasses, so that both sides share them: the training process validates with msgspec
(`load_client`), the daemon with pydantic-settings (`sentinel.daemon.settings`). Precedence, strongest first: an
argument, the environment (`SENTINEL_<SECTION>__<KEY>=value`), the file, the default.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from sentinel.alert_settings import NotifySettings
from sentinel.checks import at_least as _at_least
from sentinel.checks import not_negative as _not_negative
from sentinel.checks import one_of as _one_of
from sentinel.checks import positive as _positive
from sentinel.checks import ratio as _ratio
from sentinel.checks import shown
from sentinel.detect_settings import DetectSettings
from sentinel.errors import SettingsError
from sentinel.vocabulary import Action, Mode

DEFAULT_ALLOWED = ("skip_update", "rollback", "retry", "resize", "restart", "pause", "stop")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """[loss] How the loss of a step is had when the loop does not report it."""

    capture: bool = True  # take the scalar roots of `backward`; false: only what `run.report(loss=...)` says


@dataclass(frozen=True, slots=True)
class ReflexSettings:
    """[reflex] What the loop decides by itself before an update."""

    nonfinite_gradient: bool = True  # skip the update when a gradient is NaN or infinite
    guard: str = "deferred"  # on CUDA: "deferred" reads the device one step later, "sync" at once

    def __post_init__(self) -> None:
        _one_of("reflex.guard", self.guard, ("deferred", "sync"))


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """[snapshot] The RAM ring that rollbacks return to."""

    enabled: bool = True  # false: no snapshots, so no rollbacks
    every_steps: int = 0  # distance between snapshots; 0: chosen so that cost_ratio holds
    min_steps: int = 10  # the smallest distance that the automatic choice takes
    cost_ratio: float = 0.01  # share of step time that snapshots may take
    memory_ratio: float = 0.25  # share of the available memory (divided by the local world size) for the ring
    slots: int = 8  # most snapshots held at once
    good_after_steps: int = 50  # W: clean steps after which a snapshot becomes GOOD

    def __post_init__(self) -> None:
        _at_least("snapshot.every_steps", self.every_steps, 0)
        _at_least("snapshot.min_steps", self.min_steps, 1)
        _at_least("snapshot.slots", self.slots, 2, "set snapshot.enabled = false to have none")
        _at_least("snapshot.good_after_steps", self.good_after_steps, 1)
        _ratio("snapshot.cost_ratio", self.cost_ratio)
        _ratio("snapshot.memory_ratio", self.memory_ratio)


@dataclass(frozen=True, slots=True)
class DataSettings:
    """[data] The data cursor of `run.batches`."""

    tape_bytes: int = 256 * 2**20  # memory for the tape: index lists, or batches where there is no index sampler

    def __post_init__(self) -> None:
        _at_least("data.tape_bytes", self.tape_bytes, 0)


# What is sampled, by the name that sampling.signals and the records use.
SAMPLED = ("group_norms", "histogram", "update_ratio", "fingerprint", "local_grad_norm", "expert_load")


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """[sampling] The signals that are too dear for every step."""

    enabled: bool = True  # false: none of them is taken
    signals: tuple[str, ...] | str = "all"  # names of those that are, or "all"
    every_steps: int = 50  # taken at steps that this divides; a dear one at every second, fourth ... of them
    cost_ratio: float = 0.005  # share of the step time that all of them together may take
    histogram_elements: int = 2**20  # gradients of so many values are counted one by one, larger ones by a stride
    update_elements: int = 2**20  # so many weights are copied to see what an update changes; a stride beyond

    def __post_init__(self) -> None:
        _at_least("sampling.every_steps", self.every_steps, 1, "set sampling.enabled = false to sample nothing")
        _ratio("sampling.cost_ratio", self.cost_ratio)
        _at_least("sampling.histogram_elements", self.histogram_elements, 1024)
        _at_least("sampling.update_elements", self.update_elements, 1024)
        if isinstance(self.signals, str):
            _one_of("sampling.signals", self.signals, ("all",))
            return
        for name in self.signals:
            _one_of("sampling.signals", name, SAMPLED)

    def names(self) -> tuple[str, ...]:
        """What is to be taken, in the order of `SAMPLED`."""
        if not self.enabled:
            return ()
        return tuple(name for name in SAMPLED if self.signals == "all" or name in self.signals)


@dataclass(frozen=True, slots=True)
class ThroughputSettings:
    """[throughput] What the loop computes, for the signals flops and mfu_ratio."""

    flops_per_token: float = 0.0  # operations of forward and backward, about 6 per parameter; 0: not known
    flops_per_sample: float = 0.0  # the same for a sample, where tokens are not reported; 0: not known
    peak_flops_per_second: float = 0.0  # of one device; 0: that of a known GPU in bfloat16, else no mfu_ratio

    def __post_init__(self) -> None:
        for item in fields(self):
            _not_negative(f"throughput.{item.name}", getattr(self, item.name))


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """[outbox] The client's bounded queue to the daemon."""

    records: int = 8192  # most messages waiting or unacknowledged; the oldest telemetry is dropped beyond
    retry_seconds: float = 0.5  # first pause between attempts to reach the daemon; doubles up to 5 s

    def __post_init__(self) -> None:
        _at_least("outbox.records", self.records, 64)
        _positive("outbox.retry_seconds", self.retry_seconds)


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """[daemon] The sidecar process."""

    autostart: bool = True  # `attach` starts one where none answers
    leave_seconds: float = 5.0  # an auto-started daemon leaves this long after its last run ended
    drain_seconds: float = 5.0  # most time to finish accepted work after SIGTERM

    def __post_init__(self) -> None:
        _positive("daemon.leave_seconds", self.leave_seconds)
        _positive("daemon.drain_seconds", self.drain_seconds)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """[http] Metrics, health and the read-only API."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 9477  # the first port tried
    ports: int = 20  # how many ports from there on are tried
    names: tuple[str, ...] = ()  # host names of this daemon besides localhost and the machine's own

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"http.port is {self.port}; it must be between 0 and 65535")
        _at_least("http.ports", self.ports, 1)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """[store] The run database."""

    url: str = field(default="", repr=False)  # SQLAlchemy URL; empty: SQLite in the home
    batch_seconds: float = 0.05  # telemetry is written at least this often
    url_file: str = ""  # a file that holds the URL, for one with a password; instead of url

    def __post_init__(self) -> None:
        if self.url and self.url_file:
            raise SettingsError("store.url and store.url_file are both set; leave one of them empty")
        _positive("store.batch_seconds", self.batch_seconds)


@dataclass(frozen=True, slots=True)
class RespondSettings:
    """[respond] What may be done about an incident, and how often."""

    allow: tuple[str, ...] | str = DEFAULT_ALLOWED  # names of actions, or "all"
    budget: int = 3  # actions per kind within window_steps; then a pause for a person
    window_steps: int = 2000  # the window in which the budget counts
    cooldown_steps: int = 5  # steps after an action in which the same kind causes no other

    def __post_init__(self) -> None:
        _at_least("respond.budget", self.budget, 1, "set respond.allow = [] to forbid actions")
        _at_least("respond.window_steps", self.window_steps, 1)
        _at_least("respond.cooldown_steps", self.cooldown_steps, 0)
        if isinstance(self.allow, str):
            _one_of("respond.allow", self.allow, ("all",))
            return
        for name in self.allow:
            _one_of("respond.allow", name, tuple(Action))

    def allows(self, action: Action) -> bool:
        return self.allow == "all" or action in self.allow

    def names(self) -> tuple[str, ...]:
        """The allowed actions, in the vocabulary's order."""
        return tuple(action.value for action in Action if action is not Action.NONE and self.allows(action))


@dataclass(frozen=True, slots=True)
class RollbackSettings:
    """[rollback] How far back, and what happens to the data."""

    enabled: bool = True  # false: incidents never cause a rollback
    data: str = "auto"  # "skip" or "replay" the data since the target; "auto": by kind of incident
    margin_steps: int = 10  # snapshots this close before the onset are SUSPECT; data this close is skipped too

    def __post_init__(self) -> None:
        _one_of("rollback.data", self.data, ("auto", "skip", "replay"))
        _at_least("rollback.margin_steps", self.margin_steps, 0)


@dataclass(frozen=True, slots=True)
class PauseSettings:
    """[pause] Waiting for a person."""

    limit_seconds: float = 1800.0  # then the run stops

    def __post_init__(self) -> None:
        _positive("pause.limit_seconds", self.limit_seconds)


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole of `sentinel.toml`."""

    mode: Mode = Mode.PROTECT  # "protect" acts, "observe" only watches, "off" does nothing
    loss: LossSettings = field(default_factory=LossSettings)
    reflex: ReflexSettings = field(default_factory=ReflexSettings)
    snapshot: SnapshotSettings = field(default_factory=SnapshotSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    throughput: ThroughputSettings = field(default_factory=ThroughputSettings)
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    daemon: DaemonSettings = field(default_factory=DaemonSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    detect: DetectSettings = field(default_factory=DetectSettings)
    respond: RespondSettings = field(default_factory=RespondSettings)
    rollback: RollbackSettings = field(default_factory=RollbackSettings)
    pause: PauseSettings = field(default_factory=PauseSettings)
    notify: NotifySettings = field(default_factory=NotifySettings)


# What a run brings along for its own pipeline (RunStart.settings); the rest is the daemon's.
RUN_SECTIONS = ("detect", "respond", "rollback", "pause")

# Variables that are not settings of a section.
PLAIN_VARIABLES = ("SENTINEL_HOME", "SENTINEL_MODE", "SENTINEL_RUN_ID", "SENTINEL_SETTINGS")


def load_client(
    source: str | os.PathLike[str] | Mapping[str, Any] | None,
    environ: Mapping[str, str],
    arguments: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings for a training process: a file's path, a mapping, or None for SENTINEL_SETTINGS and defaults.

    `arguments` is the tree of what the caller said in code; it wins over the environment.

    Raises SettingsError for a file that cannot be read, an unknown key (naming the nearest) or a wrong value.
    """
    if source is None and environ.get("SENTINEL_SETTINGS"):
        source = environ["SENTINEL_SETTINGS"]
    tree = dict(source) if isinstance(source, Mapping) else read_file(source)
    return build(merge(merge(tree, from_environment(environ)), arguments or {}))


def read_file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The tree of a TOML file; empty for None. Raises SettingsError."""
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {str(path)!r} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {str(path)!r} is not valid TOML: {error}") from None


def build(tree: Mapping[str, Any]) -> Settings:
    """Validate a tree. Raises SettingsError naming the key, the value and the remedy."""
    check_keys(tree, Settings, "")
    try:
        return msgspec.convert(dict(tree), Settings, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SettingsError):
            raise error.__cause__ from None
        raise SettingsError(_plain_words(str(error), tree)) from None


def run_sections(settings: Settings) -> dict[str, Any]:
    """What the run sends along, as plain data."""
    return {name: msgspec.to_builtins(getattr(settings, name)) for name in RUN_SECTIONS}


def check_keys(tree: Mapping[str, Any], of: type, prefix: str) -> None:
    """Raise SettingsError for the first key that `of` does not have, naming the nearest one."""
    known = {item.name: item for item in fields(of)}
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5) or _elsewhere(str(key))
            hint = f"; did you mean {prefix + near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
            raise SettingsError(f"unknown setting {prefix + str(key)!r}{hint}")
        section = known[key].type
        listed = next((one for one in get_args(section) if isinstance(one, type) and is_dataclass(one)), None)
        if listed is not None:
            _check_tables(value, listed, prefix + str(key))
        if not (isinstance(section, type) and is_dataclass(section)):
            continue
        if not isinstance(value, Mapping):
            name = f"{prefix}{key}"
            raise SettingsError(f"{name} is {shown(name, value)}; it must be a section ([{name}])")
        check_keys(value, section, f"{prefix}{key}.")


def _check_tables(value: Any, of: type, name: str) -> None:
    if not (isinstance(value, list | tuple) and all(isinstance(table, Mapping) for table in value)):
        raise SettingsError(f"{name} is {shown(name, value)}; it must be a list of tables ([[{name}]])")
    for table in value:
        check_keys(table, of, f"{name}.")


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The tree that `SENTINEL_<SECTION>__<KEY>` variables describe; values are TOML, else plain text."""
    tree: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith("SENTINEL_") or "__" not in name:
            continue
        *path, last = name.removeprefix("SENTINEL_").lower().split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = _value_of(text)
    return tree


def merge(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees, section by section; `strong` wins."""
    merged = dict(weak)
    for key, value in strong.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _elsewhere(key: str) -> list[str]:
    return difflib.get_close_matches(key, [item.name for item in fields(Settings)], n=1, cutoff=0.6)


def _plain_words(message: str, tree: Mapping[str, Any]) -> str:
    # msgspec says: Expected `int`, got `str` - at `$.snapshot.slots`
    expected, _, place = message.partition(" - at `$")
    if not place:
        return message
    path = place.rstrip("`").lstrip(".")
    node: Any = tree
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    wanted = expected.partition(", got")[0].replace("Expected ", "").replace("`", "")
    if expected.startswith("Invalid enum"):
        wanted = "one of protect, observe, off"
    return f"{path} is {shown(path, node)}; it must be {wanted}"
