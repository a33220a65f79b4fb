"""Settings of alerts are refused with the key and a remedy, and never repeat what could be a secret."""

import tomllib

import pytest

from sentinel import config
from sentinel.alert_settings import RouteSettings
from sentinel.daemon.settings import load
from sentinel.errors import SettingsError

FILE = """
[notify]
attempt_seconds = 5.0
[notify.slack]
url_file = "/run/secrets/slack"
[[notify.route]]
channel = "slack"
severity = ["critical"]
[[notify.route]]
channel = "webhook"
kinds = ["loss_spike", "straggler"]
"""


def by_the_daemon(tmp_path, text):
    path = tmp_path / "sentinel.toml"
    path.write_text(text)
    return load(path, {})


def by_the_training_process(tmp_path, text):
    return config.build(tomllib.loads(text))


@pytest.fixture(params=[by_the_daemon, by_the_training_process])
def read(request, tmp_path):
    return lambda text: request.param(tmp_path, text).notify


def test_routes_are_a_list_of_tables(read):
    found = read(FILE)
    assert found.route == (
        RouteSettings("slack", severity=("critical",)),
        RouteSettings("webhook", kinds=("loss_spike", "straggler")),
    )
    assert (found.attempt_seconds, found.slack.url_file) == (5.0, "/run/secrets/slack")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[notify.route]]\nchannel = 'slack'\nseverty = ['info']", r"did you mean 'notify\.route\.severity'"),
        ("[[notify.route]]\nchannel = 'slak'", "did you mean 'slack'"),
        ("[[notify.route]]\nchannel = 'slack'\nkinds = ['loss_spiky']", "did you mean 'loss_spike'"),
        ("[[notify.route]]\nchannel = 'slack'\nseverity = ['fatal']", "must be one of info, warning, critical"),
        ("[notify.route]\nchannel = 'slack'", r"must be a list of tables \(\[\[notify\.route\]\]\)"),
        ("[notify.webhok]\nurl = 'http://localhost'", r"did you mean 'notify\.webhook'"),
        ("[notify]\nattempt_seconds = 0.0", r"notify\.attempt_seconds is 0\.0; it must be a positive number"),
        (
            "[notify.slack]\nurl = 'http://localhost/x'\nurl_file = 'y'",
            r"both notify\.slack\.url and notify\.slack\.url_file",
        ),
    ],
)
def test_a_mistake_names_the_key_and_the_remedy(read, text, said):
    with pytest.raises(SettingsError, match=said):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        "[notify]\nslack = 'https://localhost/hush'",
        "[notify]\nroute = 'https://localhost/hush'",
        "[notify.slack]\nurl = 'localhost/hush'",
        "[notify.slack]\nurl = ['https://localhost/hush']",
        "[notify.webhook]\nsecret = ['hush']",
        "[notify.webhook]\nurl = 'https://localhost/hush'\nurl_file = 'y'",
        "[store]\nurl = ['postgresql://a:hush@localhost/']",
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(read, text):
    with pytest.raises(SettingsError) as caught:
        read(text)
    assert "hush" not in str(caught.value)
