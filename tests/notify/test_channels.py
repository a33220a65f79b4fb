"""What each channel sends: signed, strict, escaped, and the same on every attempt."""

import base64
import json
import time

import pytest
from standardwebhooks.webhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError

from sentinel.alert_settings import NotifySettings, RouteSettings, SlackSettings, WebhookSettings
from sentinel.errors import SettingsError
from sentinel.notify import alert as alerts
from sentinel.notify import catalogue
from sentinel.notify.alertmanager import OPEN_SECONDS, Alertmanager
from sentinel.notify.routes import channels_for
from sentinel.notify.slack import MOST_CHARACTERS, Slack
from sentinel.notify.webhook import Webhook
from sentinel.store.strict_json import strict
from sentinel.vocabulary import AlertChannel, AlertCondition, IncidentStatus, Kind, Severity
from tests.store.building import START, incident

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef").decode()
OPEN = {"status": IncidentStatus.OPEN, "resolved_at": None, "cause": ""}
NOW = START + 8


def alert_of(condition=AlertCondition.FIRING, channel=AlertChannel.WEBHOOK, earlier=(), **changes):
    seen = incident(**({**OPEN, **changes} if condition is AlertCondition.FIRING else changes))
    return alerts.of_incident(seen, condition, channel, evidence=strict(seen.evidence), earlier=earlier)


def body_of(request):
    return json.loads(request.body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


# ---------------------------------------------------------------- webhook


def test_the_signature_of_a_webhook_is_verified_by_the_standard_library_of_receivers():
    request = Webhook("http://localhost/", SECRET).request(alert_of(), time.time())
    message = Verifier(SECRET).verify(request.body, dict(request.headers))
    assert message["type"] == "incident.firing"
    assert message["data"]["kind"] == "loss_spike"
    with pytest.raises(WebhookVerificationError):
        Verifier(SECRET).verify(request.body.replace(b"loss_spike", b"loss_spite"), dict(request.headers))


def test_two_attempts_differ_in_their_time_only():
    channel = Webhook("http://localhost/", SECRET)
    first, second = (channel.request(alert_of(), NOW + later) for later in (0, 60))
    assert first.body == second.body
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.headers["webhook-timestamp"] != second.headers["webhook-timestamp"]


def test_an_id_holds_no_full_stop_because_the_signature_is_over_parts_joined_with_them():
    assert "." not in alert_of(incident_id="a.b").id


def test_evidence_that_is_not_finite_stays_strict_json():
    message = body_of(Webhook("http://localhost/").request(alert_of(), NOW))
    assert message["data"]["evidence"]["losses"] == [2.0, None]
    assert message["data"]["evidence"]["nonfinite"] == {"z": "inf", "losses[1]": "nan"}


def test_without_a_secret_there_is_no_signature():
    assert "webhook-signature" not in Webhook("http://localhost/").request(alert_of(), NOW).headers


# ---------------------------------------------------------------- Alertmanager


def test_a_firing_alert_stays_until_its_incident_ends():
    (entry,) = body_of(Alertmanager("http://localhost:9093/").request(alert_of(), NOW))
    assert entry["labels"] == {
        "alertname": "loss_spike",
        "run_id": "run-a1",
        "severity": "critical",
        "rank": "0",
        "incident_id": "i1",
    }
    assert entry["startsAt"] == alerts.rfc3339(START + 7)
    assert entry["endsAt"] == alerts.rfc3339(NOW + OPEN_SECONDS)


def test_the_end_of_an_incident_ends_the_same_labels():
    channel = Alertmanager("http://localhost:9093", "token")
    (firing,) = body_of(channel.request(alert_of(), NOW))
    request = channel.request(alert_of(AlertCondition.RESOLVED), NOW)
    (resolved,) = body_of(request)
    assert resolved["labels"] == firing["labels"]
    assert resolved["endsAt"] == alerts.rfc3339(START + 30.25)
    assert request.url == "http://localhost:9093/api/v2/alerts"
    assert request.headers["authorization"] == "Bearer token"


def test_what_was_announced_under_other_labels_ends_too():
    milder = alerts.Face(Kind.NONFINITE_GRADIENT, Severity.WARNING, (0,))
    channel = Alertmanager("http://localhost:9093")
    old, new = body_of(channel.request(alert_of(earlier=(milder,)), NOW))
    assert (old["labels"]["alertname"], old["endsAt"]) == ("nonfinite_gradient", alerts.rfc3339(NOW))
    assert (new["labels"]["severity"], new["endsAt"]) == ("critical", alerts.rfc3339(NOW + OPEN_SECONDS))


def test_an_end_before_the_beginning_is_no_reason_to_be_refused():
    (entry,) = body_of(
        Alertmanager("http://localhost:9093").request(alert_of(AlertCondition.RESOLVED, resolved_at=START), NOW)
    )
    assert entry["startsAt"] == entry["endsAt"]


# ---------------------------------------------------------------- Slack


def test_text_of_a_run_cannot_call_everybody_in_slack():
    message = json.dumps(body_of(Slack("http://localhost/x").request(alert_of(summary="<!channel> & more"), NOW)))
    assert "<!channel>" not in message
    assert "&lt;!channel&gt; &amp; more" in message


def test_a_long_summary_still_fits_a_block_of_slack():
    message = body_of(Slack("http://localhost/x").request(alert_of(summary="x" * 10_000), NOW))
    assert len(message["blocks"][0]["text"]["text"]) == MOST_CHARACTERS
    assert len(message["text"]) == MOST_CHARACTERS


# ---------------------------------------------------------------- routes

ALL = frozenset(AlertChannel)


@pytest.mark.parametrize(
    ("severity", "reached"),
    [(Severity.INFO, []), (Severity.WARNING, list(AlertChannel)), (Severity.CRITICAL, list(AlertChannel))],
)
def test_without_routes_every_channel_hears_of_what_is_at_least_a_warning(severity, reached):
    assert channels_for(NotifySettings(), ALL, incident(severity=severity)) == reached


def test_routes_choose_by_severity_and_kind():
    settings = NotifySettings(
        route=(
            RouteSettings("slack", severity=("critical",)),
            RouteSettings("webhook", severity=("info", "warning"), kinds=("straggler", "loss_spike")),
        )
    )
    assert channels_for(settings, ALL, incident()) == [AlertChannel.SLACK]
    assert channels_for(settings, ALL, incident(severity=Severity.INFO)) == [AlertChannel.WEBHOOK]
    assert channels_for(settings, ALL, incident(Kind.OOM, severity=Severity.INFO)) == []
    assert channels_for(settings, frozenset({AlertChannel.WEBHOOK}), incident()) == []


# ---------------------------------------------------------------- secrets in files


def test_addresses_and_secrets_can_stand_in_files(tmp_path):
    (tmp_path / "url").write_text("http://localhost:1/hook\n")
    (tmp_path / "secret").write_text(SECRET + "\n")
    settings = NotifySettings(
        webhook=WebhookSettings(url_file=str(tmp_path / "url"), secret_file=str(tmp_path / "secret"))
    )
    request = catalogue.build(settings)[AlertChannel.WEBHOOK].request(alert_of(), time.time())
    assert request.url == "http://localhost:1/hook"
    Verifier(SECRET).verify(request.body, dict(request.headers))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "http://localhost/a b",
        "hunter2",
        "http://",
        "http://localhost/\nhttp://localhost/2",
        "http://localhost:99999/x",
    ],
)
def test_a_file_that_holds_no_address_is_an_error_that_does_not_repeat_it(tmp_path, content):
    (tmp_path / "url").write_text(content)
    with pytest.raises(SettingsError, match=r"notify\.slack\.url_file") as caught:
        catalogue.build(NotifySettings(slack=SlackSettings(url_file=str(tmp_path / "url"))))
    assert not content or content not in str(caught.value)


def test_a_missing_file_and_a_secret_that_is_no_base64_are_errors(tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        catalogue.build(NotifySettings(slack=SlackSettings(url_file=str(tmp_path / "none"))))
    with pytest.raises(SettingsError, match="whsec_") as caught:
        catalogue.build(NotifySettings(webhook=WebhookSettings(url="http://localhost/", secret="whsec_a")))
    assert "whsec_a" not in str(caught.value)


def test_printing_settings_shows_no_secret():
    shown = repr(NotifySettings(webhook=WebhookSettings(url="http://localhost/hush", secret="hush")))
    assert "hush" not in shown
