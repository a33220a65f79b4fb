"""Misuse raises at once and says what to do; trouble of the environment is said once and training goes on."""

import argparse
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel import places
from sentinel.client import interception
from sentinel.errors import MisuseError
from sentinel.records import Reflex, RunStart, StepRecord
from sentinel.testing import FakeDaemon
from tests.client.training import loader, make


def train(setup: Any, run: Any, steps: int) -> None:
    for inputs, targets in run.batches(loader()):
        if run.step >= steps and steps:
            break
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        setup.optimizer.step()


def test_no_parameter_in_common_is_refused(home: places.Places) -> None:
    with pytest.raises(MisuseError, match=r"no parameter in common.*build the optimizer"):
        sentinel.attach(make().model, make().optimizer)


def test_one_optimizer_in_two_runs_is_refused(home: places.Places) -> None:
    one, shared = nn.Linear(2, 2), nn.Linear(2, 2)
    two = nn.Sequential(shared, nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    run = sentinel.attach(one, optimizer)
    with pytest.raises(MisuseError, match=f"belongs to run {run.run_id}"):
        sentinel.attach(two, optimizer)
    run.detach()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"settings": {"respond": {"budgt": 1}}}, "did you mean 'respond.budget'"),
        ({"settings": {"snapshot": {"slots": "eight"}}}, "snapshot.slots is 'eight'; it must be int"),
        ({"settings": {"rollback": {"data": "skp"}}}, "did you mean 'skip'"),
        ({"settings": "nowhere.toml"}, "'nowhere.toml' cannot be read"),
        ({"settings": 3}, "pass the path"),
        ({"mode": "protct"}, "protect, observe, off"),
        ({"guard": "later"}, "reflex.guard"),
        ({"run_id": "a/b"}, "run_id is 'a/b'"),
        ({"step": -1}, "step is -1"),
        ({"scheduler": 3}, "scheduler is a int; it must have state_dict"),
        ({"state": [1]}, "state is a list"),
        ({"state": {"loop": 1}}, "state['loop'] is a int; it must have state_dict"),
        ({"ema": [1]}, "ema is a list; it must have state_dict"),
        ({"scaler": 3}, "scaler is a int; it must be a torch.amp.GradScaler"),
        ({"config": argparse.Namespace(lr=1)}, "config is a Namespace; pass a dict, of a namespace vars"),
        ({"name": 3}, "name is 3; pass a text"),
        ({"checkpoint_dir": 3}, "checkpoint_dir is 3; pass a path"),
        ({"run_id": 3}, "run_id is 3"),
        ({"step": True}, "step is True"),
        ({"step": 1.5}, "step is 1.5"),
        ({"mode": None}, "mode is None"),
        ({"guard": 3}, "reflex.guard is 3; it must be str"),
    ],
)
def test_wrong_arguments_and_settings_raise_and_say_what_to_do(
    home: places.Places, arguments: dict[str, Any], text: str
) -> None:
    setup = make()
    earlier = sentinel.attach(setup.model, setup.optimizer)
    threads, observers = threading.active_count(), interception.observers()
    with pytest.raises(MisuseError, match=re.escape(text)):
        sentinel.attach(setup.model, setup.optimizer, **arguments)
    assert not earlier.detached  # nothing was touched before everything was found right
    assert len(setup.optimizer._optimizer_step_pre_hooks) == 1
    assert (threading.active_count(), interception.observers()) == (threads, observers)
    earlier.detach()


def test_an_optimizer_named_twice_is_refused(home: places.Places) -> None:
    setup = make()
    with pytest.raises(MisuseError, match="names one twice"):
        sentinel.attach(setup.model, [setup.optimizer, setup.optimizer])


class Hookless(torch.optim.SGD):
    def register_step_post_hook(self, hook: Any) -> Any:
        raise NotImplementedError("no hooks here")


def test_an_attach_that_fails_half_way_leaves_nothing_behind(home: places.Places) -> None:
    setup = make(lambda parameters: Hookless(parameters, lr=0.1))
    engine, threads = torch.autograd._engine_run_backward, threading.active_count()
    with pytest.raises(NotImplementedError, match="no hooks here"):
        sentinel.attach(setup.model, setup.optimizer)
    assert threading.active_count() == threads
    assert not setup.optimizer._optimizer_step_pre_hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in setup.model.parameters())
    assert not interception.observers()
    assert torch.autograd._engine_run_backward is engine
    assert not any(name.startswith("_sentinel") for name in vars(setup.optimizer))


def test_what_is_no_model_or_optimizer_is_refused(home: places.Places) -> None:
    with pytest.raises(MisuseError, match=r"pass a torch\.nn\.Module"):
        sentinel.attach(object(), make().optimizer)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match=r"pass a torch\.optim\.Optimizer"):
        sentinel.attach(make().model, object())
    with pytest.raises(MisuseError, match="empty list"):
        sentinel.attach(make().model, [])


def test_a_bare_iterator_is_refused_where_it_is_handed_over(home: places.Places) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    with pytest.raises(MisuseError, match="bare iterator"):
        run.batches(iter(loader()))
    run.detach()


def test_a_wrapped_optimizer_is_hooked_where_its_step_really_runs(daemon: FakeDaemon) -> None:
    setup = make()

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    run = sentinel.attach(setup.model, Wrapper(Wrapper(setup.optimizer)))  # type: ignore[arg-type]
    train(setup, run, 3)
    run.detach()
    assert len(daemon.of(StepRecord)) == 3


def test_the_same_model_attached_again_detaches_the_older_run(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = make()
    first = sentinel.attach(setup.model, setup.optimizer)
    second = sentinel.attach(setup.model, setup.optimizer)
    assert first.detached
    assert f"attached to run {first.run_id} already" in capsys.readouterr().err
    train(setup, second, 3)
    second.detach()
    assert [record.step for record in daemon.of(StepRecord)] == [1, 2, 3]


def test_two_models_of_one_class_are_two_runs(daemon: FakeDaemon) -> None:
    one, two = make(), make()
    runs = [sentinel.attach(setup.model, setup.optimizer, run_id="twins") for setup in (one, two)]
    assert [run.run_id for run in runs] == ["twins", "twins.2"]
    for setup, run in zip((one, two), runs, strict=True):
        train(setup, run, 3)
    for run in runs:
        run.detach()
    assert sorted(record.step for record in daemon.of(StepRecord)) == [1, 1, 2, 2, 3, 3]


def test_the_first_message_tells_what_identifies_the_run(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer, name="trial", config={"lr": 0.1, "odd": object()}, step=7)
    start = daemon.wait_for(lambda: daemon.of(RunStart))[0]
    run.detach()
    assert (start.seq, start.name, start.step, start.pid) == (1, "trial", 7, os.getpid())
    assert start.config["lr"] == 0.1
    assert start.packages["torch"] == torch.__version__
    assert run.step == 7


@pytest.mark.parametrize(
    ("argument", "variable", "wanted"),
    [
        ("protect", "observe", "observe"),
        ("observe", "protect", "observe"),
        ("protect", "off", "off"),
        ("off", "protect", "off"),
        ("protect", "protect", "protect"),
    ],
)
def test_the_environment_only_lowers_the_mode(
    home: places.Places, monkeypatch: pytest.MonkeyPatch, argument: str, variable: str, wanted: str
) -> None:
    monkeypatch.setenv("SENTINEL_MODE", variable)
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer, mode=argument)
    assert run.mode == wanted
    run.detach()


def test_mode_off_is_a_no_op_that_loops_still_can_use(home: places.Places) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer, mode="off")
    assert not setup.optimizer._optimizer_step_pre_hooks
    with run.phase("eval"):
        run.report(loss=1.0)
    assert len(list(run.batches([1, 2]))) == 2
    run.detach()


def test_rank_zero_alone_in_a_job_of_two_only_observes(home: places.Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    setup = make()
    with FakeDaemon(home.socket, may_act=False) as daemon:
        run = sentinel.attach(setup.model, setup.optimizer)
        inputs, targets = next(iter(loader()))
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        setup.model[0].weight.grad.fill_(float("nan"))
        setup.optimizer.step()
        run.detach()
        assert len(daemon.of(StepRecord)) == 1
        assert not daemon.of(Reflex)
    assert torch.isnan(setup.model[0].weight).all()


@pytest.mark.parametrize("trouble", ["unwritable", "file", "long"])
def test_trouble_with_the_home_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trouble: str
) -> None:
    home = tmp_path / "home"
    if trouble == "file":
        home.write_text("in the way")
    if trouble == "unwritable":
        home = Path("/proc/sentinel-home")
    if trouble == "long":
        home = tmp_path / ("x" * 100) / ("y" * 100)
    monkeypatch.setenv("SENTINEL_HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SENTINEL_DAEMON__AUTOSTART", "false")
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    train(setup, run, 5)
    run.detach()
    assert run.step == 5
    told = [line for line in capsys.readouterr().err.splitlines() if "no daemon" in line or "spool" in line]
    assert len(told) >= 1
    assert len(told) == len(set(told))
