"""What every adapter must do: show and save exactly what a raw loop would, and end as the framework ends."""

import copy
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel.errors import MisuseError
from sentinel.records import PhaseNote, RunEnd, RunStart, SnapshotNote, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, Quality, UpdateResult
from tests.client.training import equal, weights
from tests.hooks.frameworks import Framework, Training
from tests.hooks.lesson import DataGoneError, Lesson, make, raw_loop

SERIES = ("loss", "grad_norm", "lr", "clip_max_norm")


def records(daemon: FakeDaemon) -> list[StepRecord]:
    """What the run sent, once it has ended."""
    daemon.wait_for(lambda: daemon.of(RunEnd))
    return daemon.of(StepRecord)


def taught(framework: Framework, lesson: Lesson, folder: Path, **options: Any) -> tuple[Any, Any]:
    """(callback, parts) after the framework has taught the lesson."""
    parts, callback = make(lesson), framework.callback(**options)
    framework.train(Training(lesson, parts, folder, callback))
    return callback, parts


def must_equal(seen: list[StepRecord], wanted: list[StepRecord]) -> None:
    assert [record.step for record in seen] == [record.step for record in wanted]
    assert [record.result for record in seen] == [record.result for record in wanted]
    for name in SERIES:
        for mine, theirs in zip(seen, wanted, strict=True):
            value, truth = getattr(mine, name), getattr(theirs, name)
            same = value is None if truth is None else value == pytest.approx(truth, rel=1e-5, nan_ok=True)
            assert same, (name, mine.step, value, truth)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_series_equal_the_raw_loops_for_the_same_maths(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path, accumulation: int, clip: float | None
) -> None:
    lesson = Lesson(accumulation=accumulation, clip=clip, nan_at=frozenset({9}))
    parts = make(lesson)
    raw_loop(lesson, parts)
    wanted = records(daemon)
    assert parts.model.nan_fired == 1
    assert len(wanted) == lesson.updates
    assert all(clip is None or record.grad_norm_source == "clip" for record in wanted)
    daemon.messages.clear()

    _, its_parts = taught(framework, lesson, tmp_path)
    seen = records(daemon)
    assert its_parts.model.nan_fired == 1
    must_equal(seen, wanted)
    assert equal(weights(its_parts.model), weights(parts.model))
    assert all(record.step_seconds is None or record.step_seconds > 0 for record in seen)
    known = [record.samples for record in seen if record.samples is not None]
    assert set(known) == {lesson.rows * accumulation}
    assert len(known) >= lesson.updates - 1
    assert daemon.errors == []


def test_a_nan_gradient_is_skipped_before_it_reaches_the_weights(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path
) -> None:
    lesson = Lesson(nan_at=frozenset({4}))
    callback, parts = taught(framework, lesson, tmp_path)
    assert parts.model.nan_fired == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in parts.model.state_dict().values())
    (skipped,) = [record for record in records(daemon) if record.result is UpdateResult.REFLEX]
    assert skipped.step == 5
    assert math.isnan(skipped.grad_norm)
    assert math.isfinite(skipped.loss)
    assert callback.run is None


def test_a_nan_loss_is_recorded_as_it_was_whatever_the_framework_shows_in_its_log(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path
) -> None:
    lesson = Lesson(nan_loss_at=6, clip=0.5)
    _, parts = taught(framework, lesson, tmp_path)
    assert parts.model.nan_fired == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in parts.model.state_dict().values())
    broken = [record for record in records(daemon) if not math.isfinite(record.loss)]
    assert [(record.step, record.result) for record in broken] == [(7, UpdateResult.REFLEX)]


def test_a_healthy_run_has_the_same_weights_with_and_without_us(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path
) -> None:
    lesson = Lesson(accumulation=2, clip=0.5)
    _, watched = taught(framework, lesson, tmp_path / "watched")
    assert len(records(daemon)) == lesson.updates
    _, alone = taught(framework, lesson, tmp_path / "alone", mode="off")
    assert len(daemon.of(StepRecord)) == lesson.updates
    assert equal(weights(watched.model), weights(alone.model))


def test_a_rollback_restores_weights_and_schedule_and_training_goes_on(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path
) -> None:
    lesson, acks, before = Lesson(updates=20), [], {}

    def at_update(number: int, run: Any) -> None:
        before[number] = weights(parts.model)
        if number == 12:
            daemon.wait_for(lambda: run._inbox.attempt)
            command = daemon.command(Action.ROLLBACK, apply_at=13, target_step=8, pending_ok=True)
            thread = threading.Thread(target=lambda: acks.append(daemon.turn(command)))
            thread.start()
            threads.append(thread)
            daemon.wait_for(lambda: run._inbox.turn)

    threads: list[threading.Thread] = []
    parts = make(lesson)
    callback = framework.callback(settings={"snapshot": {"every_steps": 4}})
    updates = framework.train(Training(lesson, parts, tmp_path, callback, at_update))
    threads[0].join()
    (ack,) = acks
    assert (ack.state, ack.target_step, ack.lr_aligned) == ("applied", 8, True)
    assert equal(before[14], before[9])  # update 13 gave way to the state after update 8
    seen = records(daemon)
    assert [(one.generation, one.step) for one in seen if one.generation == 1] == [(1, n) for n in range(9, 16)]
    lrs = {(one.generation, one.step): one.lr for one in seen}
    assert [lrs[1, step] for step in range(9, 13)] == [lrs[0, step] for step in range(9, 13)]
    assert updates == 20  # the framework's own count is not ours to rewind


def test_a_stop_ends_training_in_order(daemon: FakeDaemon, framework: Framework, tmp_path: Path) -> None:
    lesson, threads = Lesson(updates=20), []

    def at_update(number: int, run: Any) -> None:
        if number == 5:
            daemon.wait_for(lambda: run._inbox.attempt)
            command = daemon.command(Action.STOP, apply_at=6, reason="enough")
            threads.append(threading.Thread(target=lambda: daemon.turn(command)))
            threads[0].start()
            daemon.wait_for(lambda: run._inbox.turn)

    updates = framework.train(Training(lesson, make(lesson), tmp_path, framework.callback(), at_update))
    threads[0].join()
    assert updates == 6
    (end,) = daemon.wait_for(lambda: daemon.of(RunEnd))
    assert (end.status, end.error, end.step) == ("completed", "stopped: enough", 6)


def test_evaluation_is_a_phase(daemon: FakeDaemon, framework: Framework, tmp_path: Path) -> None:
    lesson, phases = Lesson(updates=12, evaluate_every=4), []
    parts = make(lesson)
    callback = framework.callback()
    forward = parts.model.forward

    def watched(**batch: Any) -> Any:
        phases.append((parts.model.training, callback.run._loop.phase))
        return forward(**batch)

    parts.model.forward = watched
    framework.train(Training(lesson, parts, tmp_path, callback))
    assert set(phases) >= {(True, "train"), (False, "eval")}
    assert (True, "eval") not in phases
    records(daemon)
    notes = [(note.phase, note.entered, note.step) for note in daemon.of(PhaseNote)]
    assert notes == [("eval", entered, step) for step in (4, 8, 12) for entered in (True, False)]


def test_training_that_raises_is_a_failed_run(daemon: FakeDaemon, framework: Framework, tmp_path: Path) -> None:
    lesson = Lesson(raises_at=6)
    callback = framework.callback()
    with pytest.raises(DataGoneError):
        framework.train(Training(lesson, make(lesson), tmp_path, callback))
    assert callback.run is None
    (end,) = daemon.wait_for(lambda: daemon.of(RunEnd))
    assert (end.status, end.step) == ("failed", 6)
    assert end.error == "DataGoneError: the fault of this batch"


def test_the_same_callback_can_train_again_after_an_error(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path
) -> None:
    callback = framework.callback()
    with pytest.raises(DataGoneError):
        framework.train(Training(Lesson(raises_at=2), make(Lesson()), tmp_path, callback))
    framework.train(Training(Lesson(), make(Lesson()), tmp_path, callback))
    ends = daemon.wait_for(lambda: daemon.of(RunEnd) if len(daemon.of(RunEnd)) == 2 else None)
    assert [end.status for end in ends] == ["failed", "completed"]


def test_the_run_is_named_and_described(daemon: FakeDaemon, framework: Framework, tmp_path: Path) -> None:
    taught(framework, Lesson(updates=2), tmp_path / "a", config={"dataset": "lesson"}, run_id="a-run")
    (start,) = daemon.wait_for(lambda: daemon.of(RunStart))
    expected = {
        "transformers": ("lesson", {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}),
        "lightning": ("Lecture", {"lr": 1e-2, "max_epochs": 1}),
    }
    name, config = expected[framework.name]
    assert start.name == name
    assert start.config.items() >= {**config, "dataset": "lesson"}.items()
    records(daemon)
    daemon.messages.clear()
    taught(framework, Lesson(updates=2), tmp_path / "b", name="mine")
    (start,) = daemon.wait_for(lambda: daemon.of(RunStart))
    assert start.name == "mine"


def test_a_resumed_run_goes_on_at_its_step_and_can_return_to_what_was_loaded(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path
) -> None:
    lesson = Lesson()
    first = make(lesson)
    framework.train(Training(lesson, first, tmp_path, framework.callback(), save_at=5))
    wanted = records(daemon)[5:]
    daemon.messages.clear()
    second = make(lesson)
    framework.train(
        Training(lesson, second, tmp_path, framework.callback(), resume=framework.checkpoint(tmp_path, 5))
    )
    seen = records(daemon)
    (start,) = daemon.of(RunStart)
    assert start.step == 5
    must_equal(seen, wanted)
    assert equal(weights(second.model), weights(first.model))
    notes = daemon.of(SnapshotNote)
    assert notes[0].step == 5
    assert Quality.BAD not in {note.quality for note in notes}


def test_copies_carry_the_options_and_no_run(daemon: FakeDaemon, framework: Framework, tmp_path: Path) -> None:
    copies: list[Any] = []

    def at_update(number: int, run: Any) -> None:
        if number == 2:
            assert callback.run is run is not None
            copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

    callback = framework.callback(name="copied")
    framework.train(Training(Lesson(updates=3), make(Lesson()), tmp_path, callback, at_update))
    assert len(copies) == 2
    for one in copies:
        assert one.run is None
        records(daemon)
        daemon.messages.clear()
        framework.train(Training(Lesson(updates=2), make(Lesson()), tmp_path, one))
        assert daemon.wait_for(lambda: daemon.of(RunStart))[0].name == "copied"


def test_an_unknown_option_is_refused_at_once(framework: Framework) -> None:
    with pytest.raises(MisuseError, match="unknown option 'modes'; did you mean 'mode'"):
        framework.callback(modes="observe")


def test_a_wrong_option_is_refused_when_training_begins(
    daemon: FakeDaemon, framework: Framework, tmp_path: Path
) -> None:
    with pytest.raises(MisuseError, match="mode is 'watch'"):
        taught(framework, Lesson(), tmp_path, mode="watch")
    assert daemon.of(StepRecord) == []
