"""Settings: documented, checked at once, and an error says which key, which value and what to do."""

import ast
import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from sentinel import config
from sentinel.config import Settings, build, load_client
from sentinel.errors import MisuseError, SettingsError
from sentinel.vocabulary import Action, Mode

SOURCE = Path(inspect.getsourcefile(config))


def sections(of: type = Settings, prefix: str = ""):
    for item in fields(of):
        if isinstance(item.type, type) and is_dataclass(item.type):
            yield f"{prefix}{item.name}", item.type
            yield from sections(item.type, f"{prefix}{item.name}.")


def test_the_defaults_are_valid() -> None:
    assert build({}) == Settings()
    assert load_client(None, {}) == Settings()


@pytest.mark.parametrize(
    ("tree", "key", "nearest"),
    [
        ({"snapshots": {}}, "snapshots", "snapshot"),
        ({"snapshot": {"slot": 3}}, "snapshot.slot", "snapshot.slots"),
        ({"detect": {"loss_spike": {"zz": 3.0}}}, "detect.loss_spike.zz", "detect.loss_spike.z"),
        ({"mod": "observe"}, "mod", "mode"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(tree, key, nearest) -> None:
    with pytest.raises(SettingsError, match="unknown setting") as error:
        build(tree)
    assert f"{key!r}" in str(error.value)
    assert f"did you mean {nearest!r}" in str(error.value)


def test_an_unknown_key_that_resembles_nothing_lists_what_there_is() -> None:
    with pytest.raises(SettingsError, match=r"known here: .*limit_seconds"):
        build({"pause": {"qqqqqq": 1}})


def test_a_wrong_setting_is_a_misuse_error_too() -> None:
    with pytest.raises(MisuseError):
        build({"nonsense": 1})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"snapshot": {"slots": "many"}}, ["snapshot.slots", "'many'", "int"]),
        ({"snapshot": {"slots": 2.5}}, ["snapshot.slots", "2.5", "int"]),
        ({"snapshot": {"enabled": "yes"}}, ["snapshot.enabled", "'yes'", "bool"]),
        ({"snapshot": 3}, ["snapshot", "3", "[snapshot]"]),
        ({"mode": "protectt"}, ["mode", "'protectt'", "protect, observe, off"]),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_what_it_must_be(tree, words) -> None:
    with pytest.raises(SettingsError) as error:
        build(tree)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("snapshot.slots", 1),
        ("snapshot.every_steps", -1),
        ("snapshot.cost_ratio", 0.0),
        ("snapshot.cost_ratio", 1.5),
        ("snapshot.memory_ratio", float("nan")),
        ("snapshot.good_after_steps", 0),
        ("outbox.records", 63),
        ("outbox.retry_seconds", 0.0),
        ("daemon.leave_seconds", float("inf")),
        ("http.port", 65536),
        ("http.port", -1),
        ("http.ports", 0),
        ("respond.budget", 0),
        ("respond.cooldown_steps", -1),
        ("respond.allow", ["rolback"]),
        ("respond.allow", "some"),
        ("rollback.data", "both"),
        ("reflex.guard", "later"),
        ("pause.limit_seconds", -5.0),
        ("detect.loss_spike.window", 2),
        ("detect.loss_spike.z", -1.0),
        ("detect.nonfinite.consecutive", 0),
        ("data.tape_bytes", -1),
        ("throughput.flops_per_token", -1.0),
        ("throughput.peak_flops_per_second", float("inf")),
    ],
)
def test_a_value_out_of_range_is_named_with_its_range(path, value) -> None:
    *parts, last = path.split(".")
    tree: dict = {last: value}
    for part in reversed(parts):
        tree = {part: tree}
    with pytest.raises(SettingsError, match="must be") as error:
        build(tree)
    assert path in str(error.value)


def test_a_misspelt_action_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'rollback'"):
        build({"respond": {"allow": ["rolback"]}})


def test_zero_budget_says_how_to_forbid_actions() -> None:
    with pytest.raises(
        SettingsError, match=r"respond.budget is 0; it must be at least 1 \(or set respond.allow = \[\]"
    ):
        build({"respond": {"budget": 0}})


def test_allow_all_allows_every_action() -> None:
    everything = build({"respond": {"allow": "all"}}).respond
    assert all(everything.allows(action) for action in Action)
    assert not build({}).respond.allows(Action.SHRINK)
    assert not build({"respond": {"allow": []}}).respond.allows(Action.ROLLBACK)


def test_a_file_is_read_and_an_argument_may_be_a_mapping(tmp_path) -> None:
    path = tmp_path / "sentinel.toml"
    path.write_text('mode = "observe"\n[snapshot]\nslots = 3\n')
    assert load_client(path, {}).snapshot.slots == 3
    assert load_client(str(path), {}).mode is Mode.OBSERVE
    assert load_client({"snapshot": {"slots": 3}}, {}).snapshot.slots == 3
    assert load_client(None, {"SENTINEL_SETTINGS": str(path)}).snapshot.slots == 3


def test_an_argument_beats_the_variable_that_names_a_file(tmp_path) -> None:
    path = tmp_path / "sentinel.toml"
    path.write_text("[snapshot]\nslots = 3\n")
    assert load_client({}, {"SENTINEL_SETTINGS": str(path)}).snapshot.slots == Settings().snapshot.slots


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), ("a = = 1", "not valid TOML"), ("\ud800", "not valid TOML")]
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, words) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SettingsError, match=words) as error:
        load_client(path, {})
    assert "mine.toml" in str(error.value)


def test_the_environment_overrides_the_file(tmp_path) -> None:
    path = tmp_path / "sentinel.toml"
    path.write_text("[snapshot]\nslots = 3\nmin_steps = 7\n")
    environ = {
        "SENTINEL_SNAPSHOT__SLOTS": "5",
        "SENTINEL_DETECT__LOSS_SPIKE__Z": "7.5",
        "SENTINEL_DAEMON__AUTOSTART": "false",
        "SENTINEL_ROLLBACK__DATA": "replay",
        "SENTINEL_RESPOND__ALLOW": '["rollback"]',
        "UNRELATED__KEY": "1",
        "SENTINEL_HOME": "/somewhere",
    }
    found = load_client(path, environ)
    assert (found.snapshot.slots, found.snapshot.min_steps) == (5, 7)
    assert found.detect.loss_spike.z == 7.5
    assert found.daemon.autostart is False
    assert found.rollback.data == "replay"
    assert found.respond.allow == ("rollback",)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SENTINEL_SNAPSHOT__SLOT", "5", "did you mean 'snapshot.slots'"),
        ("SENTINEL_SNAPSHOT__SLOTS", "many", "snapshot.slots is 'many'"),
    ],
)
def test_a_wrong_variable_is_an_error_like_any_other(name, value, words) -> None:
    with pytest.raises(SettingsError, match=words):
        load_client(None, {name: value})


def test_merging_leaves_both_trees_as_they_were() -> None:
    weak, strong = {"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4}
    assert config.merge(weak, strong) == {"a": {"x": 1, "y": 3}, "b": 4}
    assert weak == {"a": {"x": 1, "y": 2}}
    assert strong == {"a": {"y": 3}, "b": 4}


def test_what_a_run_brings_along_builds_the_same_settings_again() -> None:
    mine = build({"detect": {"resolve_steps": 9}, "respond": {"allow": ["rollback"]}, "snapshot": {"slots": 4}})
    again = build(config.run_sections(mine))
    assert set(config.run_sections(mine)) == set(config.RUN_SECTIONS)
    assert (again.detect, again.respond, again.rollback, again.pause) == (
        mine.detect,
        mine.respond,
        mine.rollback,
        mine.pause,
    )
    assert again.snapshot == Settings().snapshot


def test_every_section_says_its_name_and_what_it_is_for() -> None:
    for name, section in sections():
        assert (section.__doc__ or "").startswith(f"[{name}] "), name


def test_every_setting_has_its_line() -> None:
    sources = [SOURCE, *SOURCE.parent.glob("*_settings.py")]
    count, undocumented = 0, []
    for source in sources:
        lines = source.read_text(encoding="utf-8").splitlines()
        classes = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)]
        count += len(classes)
        undocumented += [name for section in classes for name in _undocumented(section, lines)]
    assert len(sources) >= 3
    assert count >= 20
    assert undocumented == []


def _undocumented(section: ast.ClassDef, lines: list[str]) -> list[str]:
    found = []
    for node in section.body:
        if isinstance(node, ast.AnnAssign):
            line = lines[node.end_lineno - 1]
            if "  # " not in line and "default_factory" not in line:
                found.append(f"{section.name}.{node.target.id}")
    return found


def test_every_duration_size_and_share_has_its_unit_in_its_name() -> None:
    units = ("_seconds", "_steps", "_bytes", "_ratio", "_per_second", "_per_token", "_per_sample")
    for name, section in sections():
        for item in fields(section):
            if item.type is float:
                assert item.name.endswith((*units, "_ratio_fast")) or item.name in {"z", "z_fast", "drift"}, name
