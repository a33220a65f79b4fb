"""Alerts of a real daemon arrive: at least once, under one id, in order, whatever receiver and daemon go through."""

import base64
import json
import math
import re
import subprocess
import sys
import time
import urllib.request

import pytest
from standardwebhooks.webhooks import Webhook as Verifier

from sentinel.store import outbox
from sentinel.store.history import History
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.notify.receiver import Receiver, refusing_url
from tests.waiting import until

SECRET = "whsec_" + base64.b64encode(b"hush hush hush hush").decode()
ATTEMPT_SECONDS = 1.0


def notifying(home, url, *arguments, **more):
    variables = {
        "SENTINEL_NOTIFY__WEBHOOK__URL": url,
        "SENTINEL_NOTIFY__WEBHOOK__SECRET": SECRET,
        "SENTINEL_NOTIFY__ATTEMPT_SECONDS": str(ATTEMPT_SECONDS),
        **more,
    }
    return DaemonProcess(home, *arguments, **variables)


def one_incident(daemon, run_id="r1"):
    """A rank that meets a NaN loss and ends: an incident opens and ends."""
    with WireClient(daemon.places.socket, run_id) as client:
        client.start()
        client.steps(1, 3)
        client.step(4, loss=math.nan)
        client.all_stored()
        client.end(4)
        client.all_stored()


def alerts_of(daemon):
    return outbox.listed(daemon.database, None)


def states(daemon):
    return [row["state"] for row in alerts_of(daemon)]


def scraped(daemon, name):
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    found = re.findall(rf"^{name}{{(.*)}} ([0-9.e+]+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_firing_and_resolved_arrive_signed_and_in_order(tmp_path):
    with Receiver() as receiver, notifying(tmp_path / "home", receiver.url + "/hook") as daemon:
        before = scraped(daemon, "sentinel_alerts_total")
        assert before['channel="webhook",outcome="sent"'] == 0.0
        one_incident(daemon)
        until(lambda: states(daemon) == ["sent", "sent"])
        assert receiver.conditions() == ["firing", "resolved"]
        assert len(set(receiver.ids)) == 2
        for one in receiver.received:
            assert one.path == "/hook"
            assert Verifier(SECRET).verify(one.body, one.headers) == one.json
        with History(daemon.database) as history:
            (incident,) = history.incidents("r1")
        assert {one.json["data"]["incident_id"] for one in receiver.received} == {incident["id"]}
        until(lambda: scraped(daemon, "sentinel_alerts_total")['channel="webhook",outcome="sent"'] == 2.0)
        assert scraped(daemon, "sentinel_alerts_due")['channel="webhook"'] == 0.0


@pytest.mark.parametrize("behaviour", ["500", "429", "hang", "drip", "close", "redirect"])
def test_a_receiver_in_trouble_gets_the_same_id_again_and_no_other_before(tmp_path, behaviour):
    with (
        Receiver() as target,
        Receiver(behaviour, redirect_to=target.url) as receiver,
        notifying(tmp_path / "home", receiver.url) as daemon,
    ):
        one_incident(daemon)
        until(lambda: states(daemon) == ["sent", "sent"], 15)
        first, second = receiver.received[:2]
        assert first.behaviour == behaviour
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert second.began - first.began < ATTEMPT_SECONDS + 4.0
        assert receiver.conditions() == ["firing", "resolved"]
        assert target.received == []
        assert scraped(daemon, "sentinel_alerts_total")['channel="webhook",outcome="retried"'] == 1.0
        assert [row["tries"] for row in alerts_of(daemon)] == [2, 1]


def test_a_huge_answer_is_an_answer(tmp_path):
    with Receiver("huge") as receiver, notifying(tmp_path / "home", receiver.url) as daemon:
        one_incident(daemon)
        until(lambda: states(daemon) == ["sent", "sent"])
        assert [one.behaviour for one in receiver.received] == ["huge", "ok"]


def test_what_is_refused_for_good_is_given_up_and_its_end_never_sent(tmp_path):
    with Receiver("400") as receiver, notifying(tmp_path / "home", receiver.url) as daemon:
        one_incident(daemon)
        until(lambda: states(daemon) == ["failed", "failed"])
        assert len(receiver.received) == 1
        reasons = [row["reason"] for row in alerts_of(daemon)]
        assert reasons == ["status 400", "the channel never got to know of this incident"]
        assert scraped(daemon, "sentinel_alerts_total")['channel="webhook",outcome="failed"'] == 2.0


def test_an_alert_that_nobody_took_for_too_long_is_given_up(tmp_path):
    with notifying(tmp_path / "home", refusing_url(), SENTINEL_NOTIFY__GIVE_UP_SECONDS="0.5") as daemon:
        one_incident(daemon)
        until(lambda: states(daemon)[:1] == ["failed"])
        assert alerts_of(daemon)[0]["reason"] == "not delivered within 0.5 s"


def test_a_daemon_killed_before_it_could_send_has_its_alerts_sent_by_the_next(tmp_path):
    with (
        Receiver("hang") as receiver,
        notifying(tmp_path / "home", receiver.url, SENTINEL_NOTIFY__ATTEMPT_SECONDS="60") as daemon,
    ):
        one_incident(daemon)
        until(lambda: receiver.received)  # it hangs in the first attempt
        until(lambda: [row["tries"] for row in alerts_of(daemon)] == [1, 0])
        daemon.kill()
        assert states(daemon) == ["due", "due"]
        daemon.start()
        until(lambda: states(daemon) == ["sent", "sent"])
        assert [one.behaviour for one in receiver.received] == ["hang", "ok", "ok"]
        assert receiver.conditions() == ["firing", "resolved"]
        assert len(set(receiver.ids)) == 2


def test_what_was_filed_while_no_channel_answered_is_sent_after_a_restart(tmp_path):
    refused = refusing_url()
    with notifying(tmp_path / "home", refused) as daemon:
        one_incident(daemon)
        until(lambda: alerts_of(daemon) and alerts_of(daemon)[0]["reason"] == "no connection")
        daemon.kill()
        with Receiver() as receiver:
            daemon.environ["SENTINEL_NOTIFY__WEBHOOK__URL"] = receiver.url
            daemon.start()
            until(lambda: states(daemon) == ["sent", "sent"])
            assert receiver.conditions() == ["firing", "resolved"]


def test_an_auto_started_daemon_stays_for_alerts_that_are_due_and_leaves_after_them(tmp_path):
    short = {"SENTINEL_DAEMON__LEAVE_SECONDS": "0.5"}
    with Receiver("500", "500") as receiver, notifying(tmp_path / "home", receiver.url, "--auto", **short) as daemon:
        one_incident(daemon)
        assert daemon.wait(20) == 0
        assert receiver.conditions() == ["firing", "resolved"]
        assert states(daemon) == ["sent", "sent"]


def test_it_does_not_stay_for_ever(tmp_path):
    short = {"SENTINEL_DAEMON__LEAVE_SECONDS": "0.5", "SENTINEL_NOTIFY__STAY_SECONDS": "2"}
    with notifying(tmp_path / "home", refusing_url(), "--auto", **short) as daemon:
        began = time.monotonic()
        one_incident(daemon)
        assert daemon.wait(15) == 0
        assert time.monotonic() - began >= 2.0
        assert states(daemon) == ["due", "due"]


def test_secrets_are_in_no_log_database_metric_or_page(tmp_path):
    hushed = ["hush-path", "hush-user", "hush-token", SECRET, SECRET.removeprefix("whsec_"), "hush-slack"]
    with Receiver("500", "400", "close", "redirect") as receiver:
        host = receiver.url.removeprefix("http://")
        variables = {
            "SENTINEL_NOTIFY__ALERTMANAGER__URL": receiver.url,
            "SENTINEL_NOTIFY__ALERTMANAGER__TOKEN": "hush-token",
            "SENTINEL_NOTIFY__SLACK__URL": f"{receiver.url}/hush-slack",
        }
        with notifying(tmp_path / "home", f"http://hush-user:x@{host}/hush-path", **variables) as daemon:
            one_incident(daemon)
            until(lambda: "due" not in states(daemon), 20)
            sent = "".join(str((one.path, one.headers)) for one in receiver.received)
            assert all(word in sent for word in ("hush-path", "hush-token", "hush-slack")), "nothing secret was sent"
            pages = [urllib.request.urlopen(daemon.url + path, timeout=5).read() for path in ("/", "/metrics")]
            daemon.terminate()
        files = [path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()]
        for text in [*pages, *files, daemon.log.read_bytes()]:
            assert [word for word in hushed if word.encode() in text] == []
        assert "status 500" in daemon.log_text(), "no attempt failed"
        assert b"status 400" in b"".join(files)


# ---------------------------------------------------------------- the command


def alerts_command(daemon, *words):
    done = subprocess.run(
        [sys.executable, "-m", "sentinel.cli", "alerts", *words],
        env=daemon.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_lists_the_outbox(tmp_path):
    with Receiver() as receiver, notifying(tmp_path / "home", receiver.url) as daemon:
        assert alerts_command(daemon, "list") == (0, "No alerts.\n", "")
        one_incident(daemon)
        until(lambda: states(daemon) == ["sent", "sent"])
        code, out, _ = alerts_command(daemon, "list", "r1", "--json")
        assert code == 0
        assert [(one["condition"], one["state"], one["tries"]) for one in json.loads(out)] == [
            ("firing", "sent", 1),
            ("resolved", "sent", 1),
        ]
        assert "nonfinite_loss" in alerts_command(daemon, "list")[1]
        assert alerts_command(daemon, "list", "other")[0] == 4


@pytest.mark.parametrize(("behaviour", "code"), [("ok", 0), ("400", 1)])
def test_the_command_tests_a_channel(tmp_path, behaviour, code):
    with Receiver(behaviour) as receiver:
        never_started = notifying(tmp_path / "home", receiver.url)
        ended, out, _ = alerts_command(never_started, "test", "webhook", "--json")
        assert ended == code
        told = json.loads(out)
        assert (told["ok"], told["id"]) == (code == 0, receiver.ids[0])
        assert Verifier(SECRET).verify(receiver.received[0].body, receiver.received[0].headers)


def test_a_channel_that_is_off_or_unknown_is_wrong_usage(tmp_path):
    never_started = notifying(tmp_path / "home", "http://127.0.0.1:1")
    code, _, error = alerts_command(never_started, "test", "slack")
    assert (code, "notify.slack.url" in error) == (2, True)
    code, _, error = alerts_command(never_started, "test", "pager")
    assert (code, "webhook, alertmanager, slack" in error) == (2, True)
