"""A raw loop that only attached is watched and saved, whatever it is made of."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from sentinel.postmortem.report import Report
from sentinel.store.strict_json import dumps
from tests.end_to_end.jobs import Home, must_balance, must_be_whole
from tests.end_to_end.scripts.raw_loops import LOOPS, NAN_AT, POISON

LOOPS_WITH_SCALER = ("scaler", "scaler_fused")
LOOPS_WITHOUT = tuple(name for name in LOOPS if name not in LOOPS_WITH_SCALER)
SIGNALS = ("loss", "grad_norm", "lr", "step_seconds", "host_memory_bytes")
# A turn takes the place of an update; of one that GradScaler left out it calls no hook, so nobody sees the gradients.
UNKNOWN = {"turn": set(SIGNALS), "overflow": {"grad_norm"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("raw-loops")) as opened:
        yield opened


@pytest.fixture(scope="module")
def truths(home: Home) -> dict[str, Any]:
    """All loops in one process, one run after another; what each really did."""
    job = home.start("raw_loops", *LOOPS)
    job.finish(180)
    assert not [line for line in job.told if "error" in line], job.told
    return {name: job.said(name) for name in LOOPS}


@pytest.fixture(scope="module")
def reports(home: Home, truths: dict[str, Any]) -> dict[str, Report]:
    return {name: home.ended(name) for name in truths}


@pytest.mark.parametrize("name", LOOPS)
def test_both_faults_fired_and_the_run_ends_as_good_as_it_was(truths, name: str) -> None:
    truth = truths[name]
    assert 0 < truth["nan_step"] <= NAN_AT + 1
    assert truth["poison_step"] > truth["nan_step"]
    assert truth["finite"]
    assert truth["loss_at_end"] < 1.5 * truth["loss_before"]


@pytest.mark.parametrize("name", LOOPS)
def test_every_signal_of_every_step_is_in_the_database(home: Home, truths, name: str) -> None:
    rows = home.steps(name)
    must_be_whole(rows)
    assert max(row["step"] for row in rows) > POISON.start - 30
    for row in rows:
        absent = {signal for signal in SIGNALS if row[signal] is None}
        assert absent <= UNKNOWN.get(row["result"], set()), (row["step"], absent)
    healthy = [row for row in rows if row["result"] == "applied"]
    assert all(math.isfinite(row[signal]) and row[signal] > 0 for row in healthy for signal in SIGNALS)


@pytest.mark.parametrize("name", LOOPS)
def test_the_metrics_show_the_run_while_it_goes(truths, name: str) -> None:
    shown = {}
    for line in truths[name]["metrics"].splitlines():
        labels, _, value = line.rpartition(" ")
        if f'run_id="{name}"' in labels:
            shown[labels.partition("{")[0]] = float(value)
    assert 0 < shown["sentinel_loss"] < 10
    assert shown["sentinel_grad_norm"] > 0
    assert shown["sentinel_learning_rate"] > 0
    assert shown["sentinel_host_memory_bytes"] > 2**20
    assert shown["sentinel_step_seconds_count"] > POISON.start - 30
    assert shown["sentinel_rank_up"] == 1


@pytest.mark.parametrize("name", LOOPS_WITHOUT)
def test_a_nan_gradient_is_skipped_before_it_reaches_the_weights(home: Home, truths, reports, name: str) -> None:
    step = truths[name]["nan_step"]
    incident = next(found for found in reports[name]["incidents"] if found["kind"] == "nonfinite_gradient")
    assert (incident["first_step"], incident["onset_step"], incident["status"]) == (step, step, "resolved")
    assert {action["action"] for action in incident["actions"]} == {"skip_update"}
    assert {action["outcome"] for action in incident["actions"]} == {"applied"}
    assert incident["evidence"]["reached_weights"] is False
    assert incident["evidence"]["consecutive"] == 1
    row = next(row for row in home.steps(name) if row["step"] == step and row["generation"] == 0)
    assert row["result"] == "reflex"
    assert math.isnan(row["grad_norm"])


@pytest.mark.parametrize("name", LOOPS_WITH_SCALER)
def test_a_nan_that_the_grad_scaler_skips_is_no_incident(home: Home, truths, reports, name: str) -> None:
    step = truths[name]["nan_step"]
    row = next(row for row in home.steps(name) if row["step"] == step and row["generation"] == 0)
    assert row["result"] == "overflow"
    assert row["loss_scale"] == 1024.0  # as it was when the step was skipped
    kinds = {incident["kind"] for incident in reports[name]["incidents"]}
    assert kinds == {"loss_spike"}


@pytest.mark.parametrize("name", LOOPS)
def test_the_poisoned_window_is_rolled_back_and_the_postmortem_tells_it(truths, reports, name: str) -> None:
    truth, found = truths[name], reports[name]
    assert found["run"]["status"] == "completed"
    assert found["run"]["steps"] == truth["steps"]
    incident = next(one for one in found["incidents"] if one["kind"] == "loss_spike")
    assert abs(incident["onset_step"] - truth["poison_step"]) <= 1
    assert 0 <= incident["first_step"] - truth["poison_step"] <= 3
    assert incident["status"] == "resolved", incident
    first = next(action for action in incident["actions"] if action["action"] == "rollback")
    assert (first["outcome"], first["reason"]) == ("applied", "confirmed")
    assert first["target_step"] < truth["poison_step"] <= first["applied_step"]
    assert first["skipped_batches"] > 0
    assert found["run"]["generations"] >= 2


@pytest.mark.parametrize("name", LOOPS)
def test_conservation_is_exact(reports, name: str) -> None:
    must_balance(reports[name], dropped=0)


def test_the_command_line_says_the_same(home: Home, reports) -> None:
    told = home.cli("postmortem", "plain", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == json.loads(dumps(reports["plain"]))
    rows = home.cli("export", "plain", "--format", "jsonl")
    assert rows.returncode == 0, rows.stderr
    written = [json.loads(line) for line in rows.stdout.splitlines()]
    assert len(written) == len(home.steps("plain"))
    (broken,) = [row for row in written if "nonfinite" in row]
    assert (broken["grad_norm"], broken["nonfinite"]) == (None, "nan")
