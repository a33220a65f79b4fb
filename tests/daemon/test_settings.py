"""The daemon reads the same file as the training process, and refuses the same mistakes."""

import pytest

from sentinel.config import Settings
from sentinel.daemon.settings import for_run, load, weaker
from sentinel.errors import SettingsError
from sentinel.vocabulary import Mode


def test_without_a_file_the_defaults_hold():
    assert load(None, {}) == Settings()


def test_the_environment_beats_the_file_and_the_file_beats_the_default(tmp_path):
    path = tmp_path / "sentinel.toml"
    path.write_text("[http]\nport = 1000\nports = 3\n[respond]\nallow = ['rollback']\n")
    found = load(path, {"SENTINEL_HTTP__PORT": "2000", "SENTINEL_DETECT__LOSS_SPIKE__Z": "5"})
    assert (found.http.port, found.http.ports, found.respond.allow) == (2000, 3, ("rollback",))
    assert found.detect.loss_spike.z == 5.0
    assert load(None, {"SENTINEL_SETTINGS": str(path)}).http.port == 1000


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SENTINEL_HTTP__PRT": "1"}, "did you mean 'http.port'"),
        ({"SENTINEL_HTTP__PORT": '"many"'}, "http.port is 'many'"),
        ({"SENTINEL_RESPOND__BUDGET": "0"}, "respond.budget is 0; it must be at least 1"),
        ({"SENTINEL_MODE": "attack"}, "SENTINEL_MODE is 'attack'; it must be one of"),
        ({"SENTINEL_SETTINGS": "/no/such/file"}, "'/no/such/file' cannot be read"),
    ],
)
def test_a_mistake_names_the_key_the_value_and_the_remedy(variables, said):
    with pytest.raises(SettingsError, match=said):
        load(None, variables)


def test_the_mode_variable_only_goes_down():
    assert load(None, {"SENTINEL_MODE": "observe"}).mode is Mode.OBSERVE
    assert weaker(Mode.OBSERVE, Mode.PROTECT) is Mode.OBSERVE
    assert weaker(Mode.OFF, Mode.OBSERVE) is Mode.OFF


def test_a_run_s_own_sections_win_and_no_others():
    own = load(None, {"SENTINEL_RESPOND__BUDGET": "7", "SENTINEL_RESPOND__COOLDOWN_STEPS": "9"})
    found = for_run(own, {"respond": {"budget": 2}, "http": {"port": 1}})
    assert (found.respond.budget, found.respond.cooldown_steps) == (2, 9)
    with pytest.raises(SettingsError, match=r"respond\.budget is 0"):
        for_run(own, {"respond": {"budget": 0}})
