"""A tiny Trainer run and a tiny Lightning run lose a NaN step and a poisoned window without harm."""

import math
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sentinel.postmortem.report import Report
from tests.end_to_end.jobs import Home, Job, must_balance, must_be_whole

NAMES = ("transformers", "lightning", "gpt2")
UPDATES, NAN_STEP = 300, 71


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("frameworks"), HF_HUB_OFFLINE="1") as opened:
        yield opened


@pytest.fixture(scope="module")
def truths(home: Home) -> dict[str, Any]:
    """All courses in one process, one run after another; what really happened in each."""
    folder = home.folder / "job"
    command = [sys.executable, "-m", "tests.hooks.scripts.frameworks_train", str(folder), *NAMES]
    job = Job(command, folder, home.environ)
    try:
        job.finish(240)
        assert not [line for line in job.told if "error" in line], job.told
        return {name: job.said(name) for name in NAMES}
    finally:
        job.end()


@pytest.fixture(scope="module")
def reports(home: Home, truths: dict[str, Any]) -> dict[str, Report]:
    return {name: home.ended(name) for name in truths}


@pytest.mark.parametrize("name", NAMES)
def test_both_faults_fired_and_the_run_ends_as_good_as_it_was(home: Home, truths, name: str) -> None:
    truth = truths[name]
    assert truth["nan_fired"] == 1
    assert truth["poison_step"] > NAN_STEP
    assert truth["framework_updates"] == UPDATES
    assert truth["finite"]
    losses = {(row["generation"], row["step"]): row["loss"] for row in home.steps(name)}
    before = [losses[0, step] for step in range(truth["poison_step"] - 20, truth["poison_step"])]
    window = [losses[0, truth["poison_step"] + number] for number in range(2)]
    end = [row["loss"] for row in home.steps(name) if row["live"]][-20:]
    assert min(window) > 1.5 * statistics.median(before)
    assert statistics.median(end) < 1.3 * statistics.median(before)


@pytest.mark.parametrize("name", NAMES)
def test_every_signal_of_every_update_is_in_the_database(home: Home, truths, name: str) -> None:
    rows = home.steps(name)
    must_be_whole(rows)
    assert len(rows) == UPDATES  # one record for each update of the framework, rolled back or not
    signals = {"loss", "grad_norm", "lr", "step_seconds", "samples", "clip_max_norm"}
    signals |= {"tokens"} if name == "gpt2" else set()
    healthy = [row for row in rows if row["result"] == "applied"][:-1]  # the epoch's last batch may be smaller
    assert len(healthy) > UPDATES - 10
    for row in healthy:
        assert all(row[signal] is not None and math.isfinite(row[signal]) for signal in signals), row


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_gradient_is_skipped_before_it_reaches_the_weights(home: Home, truths, reports, name: str) -> None:
    incident = next(found for found in reports[name]["incidents"] if found["kind"] == "nonfinite_gradient")
    assert (incident["first_step"], incident["status"]) == (NAN_STEP, "resolved")
    assert [(act["action"], act["outcome"]) for act in incident["actions"]] == [("skip_update", "applied")]
    assert incident["evidence"]["reached_weights"] is False
    row = next(row for row in home.steps(name) if (row["generation"], row["step"]) == (0, NAN_STEP))
    assert row["result"] == "reflex"
    assert math.isfinite(row["loss"])
    assert math.isnan(row["grad_norm"])


@pytest.mark.parametrize("name", NAMES)
def test_the_poisoned_window_is_rolled_back_and_the_postmortem_tells_it(truths, reports, name: str) -> None:
    truth, found = truths[name], reports[name]
    assert (found["run"]["status"], found["run"]["steps"]) == ("completed", truth["run_steps"])
    incident = next(one for one in found["incidents"] if one["kind"] == "loss_spike")
    assert abs(incident["onset_step"] - truth["poison_step"]) <= 1
    assert incident["status"] == "resolved", incident
    first = next(action for action in incident["actions"] if action["action"] == "rollback")
    assert (first["outcome"], first["reason"]) == ("applied", "confirmed")
    assert first["target_step"] < truth["poison_step"] <= first["applied_step"]
    assert truth["run_steps"] < truth["framework_updates"]


@pytest.mark.parametrize("name", NAMES)
def test_conservation_is_exact(reports, name: str) -> None:
    must_balance(reports[name], dropped=0)
