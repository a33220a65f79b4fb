"""A loop that attaches first and loads its checkpoint afterwards is never rolled back to before that load."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.jobs import Home, must_balance
from tests.end_to_end.scripts.late_load import LOADED_AFTER, POISON


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path) as opened:
        yield opened


def test_neither_the_policy_nor_a_person_goes_back_before_the_load(home: Home) -> None:
    job = home.start("late_load")
    loaded = job.said("loaded")
    loaded_at = loaded["step"]
    assert loaded_at == LOADED_AFTER
    refusal = home.ask("rollback", to=LOADED_AFTER - 10)
    job.tell("go on")
    assert refusal is not None
    assert (refusal.ok, refusal.reason) == (False, "no_snapshot")
    end = job.finish()
    found = home.ended()
    spike = next(incident for incident in found["incidents"] if incident["onset_step"] > POISON.start - 2)
    assert spike["kind"] == "loss_spike"
    rollbacks = [action for action in spike["actions"] if action["action"] == "rollback"]
    assert rollbacks, "the policy never wanted to go back, so this proves nothing"
    applied = [action for action in rollbacks if action["outcome"] == "applied"]
    assert applied
    assert all(action["target_step"] >= loaded_at for action in applied)
    assert end["finite"]
    assert len(end["distances"]) == len(applied)
    assert max(end["distances"]) < 0.1 * loaded["distance_before"]
    of_before = [one for one in found["checkpoints"] if one["step"] < loaded_at]
    assert of_before
    assert {one["quality"] for one in of_before} == {"BAD"}
    assert {one["kept"] for one in of_before} == {False}
    must_balance(found, dropped=0)
