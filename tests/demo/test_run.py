"""The demo's loop on a tiny model: the faults strike, sentinel answers, a real daemon keeps the record."""

import json
import math

import pytest
import torch

from sentinel.demo import training
from sentinel.demo.plan import Faults, Plan, Shape
from sentinel.demo.scenario import Variant
from tests.waiting import until

PLAN = Plan(
    steps=200,
    batch=4,
    shape=Shape(width=32, layers=1, heads=2, context=32),
    corpus_characters=200_000,
    peak_lr=1e-2,
    validation_batches=4,
)
BOTH = Faults(nan_gradient=True, poisoned_window=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The model is too small to share; on a busy machine, waiting for a second thread takes most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text():
    return training.load_text(PLAN)


def test_the_nan_alone_ruins_an_unprotected_run(text):
    result = training.train(text, PLAN, Faults(nan_gradient=True), _unwatched, protected=False)
    assert result.faults_fired == 1
    assert math.isnan(result.validation_loss)


def test_the_same_run_twice_ends_with_the_same_loss(text):
    first, second = (training.train(text, PLAN, Faults(), _unwatched, protected=False) for _ in range(2))
    assert first.validation_loss == second.validation_loss
    assert (first.attempts, first.faults_fired) == (PLAN.steps, 0)


def test_with_sentinel_both_faults_are_met_repaired_and_recorded(text, tmp_path, monkeypatch):
    from sentinel import places
    from sentinel.demo.verdict import balances
    from sentinel.postmortem.report import report
    from sentinel.store.history import History
    from sentinel.store.location import url_of

    home = tmp_path / "home"
    monkeypatch.setenv("SENTINEL_HOME", str(home))
    clean = training.train(text, PLAN, Faults(), _unwatched, protected=False)
    saved = training.train(text, PLAN, BOTH, _unwatched, protected=True)
    assert saved.faults_fired >= 3
    assert saved.steps == PLAN.steps < saved.attempts
    assert saved.validation_loss < 1.1 * clean.validation_loss

    def finished():
        with History(url_of(places.find({}, home))) as history:
            found = report(history, saved.run_id)
        return found if found["run"]["status"] == "completed" and all(map(balances, found["conservation"])) else None

    found = until(finished, 20.0, "the daemon wrote the run's end")
    kinds = {incident["kind"] for incident in found["incidents"]}
    assert kinds == {"nonfinite_gradient", "loss_spike"}
    applied = [
        action["action"]
        for incident in found["incidents"]
        for action in incident["actions"]
        if action["outcome"] == "applied"
    ]
    assert applied[0] == "skip_update"
    assert "rollback" in applied


def test_the_command_prints_one_strict_json_object_and_fails_with_its_checks(tmp_path, monkeypatch, capsys):
    from sentinel.cli import main
    from sentinel.demo import scenario

    def played(plan, home, watch):
        with scenario._home(home):
            text = training.load_text(PLAN)
            saved = training.train(text, PLAN, BOTH, _unwatched, protected=True)
        worse = saved._replace(validation_loss=math.nan)
        return {**dict.fromkeys(Variant, worse), Variant.CLEAN: saved}

    monkeypatch.setattr(scenario, "play", played)
    assert main(["demo", "--out", str(tmp_path), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    failed = [check["promise"] for check in shown["checks"] if not check["kept"]]
    assert ["within 2 %" in promise for promise in failed] == [True]
    assert shown["ok"] is False
    assert [run["name"] for run in shown["runs"]] == [str(variant) for variant in Variant]
    assert shown["postmortem"]["run"]["status"] == "completed"
    assert (tmp_path / "home" / "sentinel.db").exists()


def _unwatched(step: int, loss: float) -> None:
    """Nobody looks at the progress."""
