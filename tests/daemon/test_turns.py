"""One decision on its way through a rank: prepare, the word, the outcome; and all the ways in which it ends early."""

import math
import time

import pytest

from sentinel import wire
from sentinel.records import Command, ControlReply, ControlRequest, Heartbeat, Mark, Word
from sentinel.store.history import History
from sentinel.vocabulary import Action, Mode, Quality, Reason
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until

NAN = float("nan")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with DaemonProcess(tmp_path_factory.mktemp("turns") / "home") as running:
        yield running


class Asked:
    """A control request under way: sent, and its reply not yet read."""

    def __init__(self, daemon: DaemonProcess, run: str, verb: str, **arguments):
        self._client = WireClient(daemon.places.socket)
        self._client.dial()
        self._client.put(ControlRequest(wire.VERSION, verb, run, arguments))

    def reply(self, seconds: float = 10.0) -> ControlReply:
        reply = self._client.expect(ControlReply, seconds)
        self._client.close()
        return reply


def running(daemon: DaemonProcess, run_id: str, steps: int = 5, **start) -> WireClient:
    client = WireClient(daemon.places.socket, run_id)
    client.connect()
    client.start(**start)
    client.snapshot(0)
    client.steps(1, steps)
    client.all_stored()
    return client


def poison(client: WireClient, first: int) -> None:
    """A NaN loss that has reached the weights: certain, and worth a rollback."""
    for step in range(first, first + 4):
        client.step(step, loss=NAN, grad_norm=NAN)


def actions(daemon: DaemonProcess, run_id: str) -> list[dict]:
    with History(daemon.database) as history:
        return history.actions(run_id)


def acted(daemon: DaemonProcess, run_id: str) -> dict:
    """The one decision that is more than `none`, once it is no longer pending."""
    return until(
        lambda: next(
            (row for row in actions(daemon, run_id) if row["action"] != "none" and row["outcome"] != "pending"), None
        )
    )


def test_a_poisoned_run_is_rolled_back_and_everything_about_it_is_written_down(daemon):
    client = running(daemon, "poisoned", steps=20)
    poison(client, 21)
    command, word = client.obey([(0, Quality.GOOD, "d")])
    assert command.action is Action.ROLLBACK
    assert command.apply_at > 21
    assert word.target_step == 0
    row = acted(daemon, "poisoned")
    assert (row["outcome"], row["target_step"], row["skipped_batches"]) == ("applied", 0, 3)
    assert row["applied_step"] == command.apply_at
    client.all_stored()
    with History(daemon.database) as history:
        found = history.generations("poisoned")
        assert [(each["generation"], each["target_step"]) for each in found] == [(0, 0), (1, 0)]
        (incident,) = history.incidents("poisoned")
    assert incident["kind"] == "nonfinite_loss"
    assert incident["onset_step"] == 21
    client.steps(1, 45)
    client.end(45)
    client.all_stored()
    with History(daemon.database) as history:
        until(lambda: history.incidents("poisoned")[0]["status"] == "resolved")
        until(lambda: history.run("poisoned")["status"] == "completed")
    client.close()


def test_the_ring_is_told_which_snapshots_are_suspect(daemon):
    client = running(daemon, "marked", steps=20)
    poison(client, 21)
    assert client.expect(Mark).since_step <= 21
    client.close()


def test_a_command_is_in_the_database_before_the_rank_sees_it(daemon):
    client = running(daemon, "before", steps=20)
    poison(client, 21)
    client.expect(Command)
    assert any(row["action"] == "rollback" and row["outcome"] == "pending" for row in actions(daemon, "before"))
    client.close()


def test_a_command_follows_the_record_that_caused_it_at_once(daemon):
    client = running(daemon, "quick", steps=20)
    began = time.monotonic()
    client.step(21, loss=NAN, grad_norm=NAN)
    client.expect(Command)
    # About a millisecond and the commit (8 to 12 ms in all on the slow disk it was measured on), never a batch.
    assert time.monotonic() - began < 0.25
    client.close()


def test_a_rank_that_refuses_for_good_ends_the_turn(daemon):
    client = running(daemon, "refuses")
    asked = Asked(daemon, "refuses", "pause")
    command = client.expect(Command)
    client.ack(command, "refused", Reason.LOOP_CANNOT, text="no boundary")
    reply = asked.reply()
    assert (reply.ok, reply.reason, reply.body["outcome"]) == (False, "loop_cannot", "refused")
    word = client.expect(Word, command_id=command.id)
    assert not word.commit
    assert acted(daemon, "refuses")["outcome_reason"] == "loop_cannot"
    client.close()


def test_a_rank_that_is_too_far_is_asked_again_with_more_room(daemon):
    client = running(daemon, "too-far")
    asked = Asked(daemon, "too-far", "pause")
    first = client.expect(Command)
    client.ack(first, "refused", Reason.TOO_LATE)
    assert not client.expect(Word, command_id=first.id).commit
    second = client.expect(Command)
    assert second.sequence > first.sequence
    client.ack(second, "prepared")
    assert client.expect(Word, command_id=second.id).commit
    client.ack(second, "applied", step=second.apply_at)
    assert asked.reply().ok
    client.close()


def test_three_tries_and_no_more(daemon):
    client = running(daemon, "busy")
    asked = Asked(daemon, "busy", "pause")
    for _ in range(3):
        client.ack(client.expect(Command), "refused", Reason.WRONG_PHASE)
    reply = asked.reply()
    assert (reply.reason, reply.body["outcome"]) == ("wrong_phase", "aborted")
    assert not [message for message in client.inbox if isinstance(message, Command)]
    client.close()


def test_a_rank_that_does_not_answer_gets_an_abort_and_the_turn_ends(daemon):
    client = running(daemon, "silent")
    asked = Asked(daemon, "silent", "pause")
    for _ in range(2):
        client.ack(client.expect(Command), "refused", Reason.BUSY)
    unanswered = client.expect(Command)
    assert not client.expect(Word, command_id=unanswered.id).commit
    assert asked.reply(15).reason == "expired"
    client.close()


def test_no_word_in_time_is_tried_again(daemon):
    client = running(daemon, "no-word")
    asked = Asked(daemon, "no-word", "pause")
    first = client.expect(Command)
    client.ack(first, "prepared")
    assert client.expect(Word, command_id=first.id).commit
    client.ack(first, "aborted", Reason.NO_WORD)
    client.obey()
    assert asked.reply().ok
    client.close()


def test_a_rollback_to_a_step_that_is_not_held_is_refused(daemon):
    client = running(daemon, "not-held")
    asked = Asked(daemon, "not-held", "rollback", to=3)
    client.ack(client.expect(Command), "prepared", candidates=[(0, Quality.GOOD, "d")])
    reply = asked.reply()
    assert (reply.ok, reply.reason) == (False, "no_snapshot")
    assert "step 3" in reply.body["text"]
    client.close()


def test_a_person_may_roll_back_to_a_named_step_and_replay(daemon):
    client = running(daemon, "named")
    asked = Asked(daemon, "named", "rollback", to=4)
    command, word = client.obey([(4, Quality.PENDING, "d"), (0, Quality.GOOD, "d")])
    assert (command.data, word.target_step) == ("replay", 4)
    reply = asked.reply()
    assert reply.ok
    assert reply.body["target_step"] == 4
    assert acted(daemon, "named")["reason"] == "requested"
    client.close()


def test_pause_holds_until_resume_releases_it(daemon):
    client = running(daemon, "paused")
    pausing = Asked(daemon, "paused", "pause")
    command, _ = client.obey()
    assert pausing.reply().ok
    assert Asked(daemon, "paused", "status").reply().body["status"] == "paused"
    assert Asked(daemon, "paused", "rollback").reply().reason == "busy"
    resuming = Asked(daemon, "paused", "resume")
    word = client.expect(Word, command_id=command.id)
    assert (word.commit, word.reason) == (False, Reason.REQUESTED)
    client.ack(command, "released", Reason.REQUESTED)
    assert resuming.reply().ok
    assert Asked(daemon, "paused", "status").reply().body["status"] == "running"
    client.close()


def test_one_command_at_a_time(daemon):
    client = running(daemon, "one")
    first = Asked(daemon, "one", "pause")
    command = client.expect(Command)
    assert Asked(daemon, "one", "stop").reply().reason == "in_flight"
    client.ack(command, "prepared")
    client.expect(Word, command_id=command.id)
    client.ack(command, "applied", step=command.apply_at)
    assert first.reply().ok
    client.close()


def test_a_run_that_is_only_observed_is_never_commanded(daemon):
    client = running(daemon, "observed", steps=20, mode=Mode.OBSERVE)
    poison(client, 21)
    client.all_stored()
    assert Asked(daemon, "observed", "pause").reply().reason == "observe_mode"
    assert until(lambda: actions(daemon, "observed"))[0]["action"] == "none"
    assert not [message for message in client.inbox if isinstance(message, Command)]
    client.close()


def test_a_world_that_is_not_complete_is_never_commanded(daemon):
    client = WireClient(daemon.places.socket, "half", world_size=2)
    client.connect()
    assert client.welcome is not None
    assert not client.welcome.may_act
    client.start()
    client.all_stored()
    assert Asked(daemon, "half", "pause").reply().reason == "ranks_missing"
    with WireClient(daemon.places.socket, "half", rank=1, world_size=2) as other:
        other.start()
        other.all_stored()
        assert Asked(daemon, "half", "pause").reply().reason == "several_ranks"
    client.close()


def test_checkpoint_is_refused_because_there_is_no_disk_tier(daemon):
    client = running(daemon, "no-disk")
    assert Asked(daemon, "no-disk", "checkpoint").reply().reason == "no_disk_tier"
    client.close()


def test_a_run_that_ended_is_told_apart_from_one_that_never_was(daemon):
    client = running(daemon, "over")
    client.end(5)
    client.all_stored()
    client.close()
    until(lambda: Asked(daemon, "over", "pause").reply().reason == "run_ended")
    assert Asked(daemon, "over", "status").reply().body["status"] == "completed"
    assert Asked(daemon, "no-such", "pause").reply().reason == "no_such_run"


def test_the_end_of_the_run_ends_its_turn(daemon):
    client = running(daemon, "ends")
    asked = Asked(daemon, "ends", "pause")
    client.expect(Command)
    client.end(5)
    reply = asked.reply()
    assert (reply.body["outcome"], reply.reason) == ("aborted", "run_ended")
    client.close()


def test_a_heartbeat_tells_how_far_the_loop_is(daemon):
    client = running(daemon, "far")
    client.beat(step=500)
    until(lambda: Asked(daemon, "far", "status").reply().body["steps"] == 500)
    asked = Asked(daemon, "far", "pause")
    command, _ = client.obey()
    assert command.apply_at > 500
    assert asked.reply().ok
    client.close()


def test_a_turn_that_a_killed_daemon_left_open_ends_as_the_rank_says(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        client = running(daemon, "left-open", steps=20)
        poison(client, 21)
        command = client.expect(Command)
        client.ack(command, "prepared", candidates=[(0, Quality.GOOD, "d")])
        word = client.expect(Word, command_id=command.id)
        assert word.commit
        daemon.kill()
        client.close()
        client.generation = 1
        client.ack(command, "applied", generation=1, step=0, target_step=0, skipped_batches=3)
        daemon.start()
        client.connect()
        assert acted(daemon, "left-open")["outcome"] == "applied"
        with History(daemon.database) as history:
            until(lambda: [row["target_step"] for row in history.generations("left-open")] == [0, 0])
        client.close()


def test_detectors_know_the_run_s_level_again_after_the_daemon_was_killed(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        client = running(daemon, "level", steps=0)
        for step in range(1, 201):
            client.step(step, loss=2.0 + 0.01 * math.sin(step))
        client.all_stored()
        daemon.kill()
        daemon.start()
        client.connect()
        for step in range(201, 212):  # below the rail of a detector that knows nothing yet
            client.step(step, loss=3.0)
        client.obey([(0, Quality.GOOD, "d")])
        with History(daemon.database) as history:
            assert history.incidents("level")[0]["kind"] == "loss_spike"
        client.close()


def test_a_command_without_a_word_is_aborted_by_the_next_daemon(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        client = running(daemon, "no-verdict")
        Asked(daemon, "no-verdict", "pause")
        command = client.expect(Command)
        daemon.kill()
        client.close()
        daemon.start()
        row = acted(daemon, "no-verdict")
        assert (row["outcome"], row["outcome_reason"]) == ("aborted", "no_word")
        client.ack(command, "prepared")
        client.connect()
        assert not client.expect(Word, command_id=command.id).commit
        client.close()


def test_a_heartbeat_is_no_message_that_needs_an_answer():
    assert "seq" not in Heartbeat.__struct_fields__
