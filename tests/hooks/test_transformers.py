"""What only the transformers Trainer has."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from sentinel.records import PhaseNote, RunEnd, StepRecord
from sentinel.testing import FakeDaemon
from sentinel_hooks.transformers import SentinelCallback
from tests.hooks.frameworks import Training
from tests.hooks.lesson import DataGoneError, Lesson, make
from tests.hooks.scripts import language
from tests.hooks.with_transformers import InOrder, Transformers, arguments_of


def test_a_language_model_with_all_defaults_tells_its_tokens(daemon: FakeDaemon, tmp_path: Path) -> None:
    rows = language.rows(12, nan_at=frozenset(), poison=frozenset())
    _, updates = language.train(rows, 2, tmp_path, lambda _number, _run: None)
    daemon.wait_for(lambda: daemon.of(RunEnd))
    seen = daemon.of(StepRecord)
    assert len(seen) == updates == 6
    assert {record.tokens for record in seen} == {2.0 * language.ROWS * language.LENGTH}
    assert {record.samples for record in seen[:-1]} == {2.0 * language.ROWS}
    assert seen[-1].samples is None  # the last batch of an epoch may be smaller: absent, not guessed
    assert all(record.grad_norm_source == "clip" and record.clip_max_norm == 1.0 for record in seen)


def test_the_trainers_own_loss_and_norm_are_the_same_numbers(daemon: FakeDaemon, tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []

    class Log(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            logged.append(logs)

    lesson = Lesson(accumulation=2, clip=0.5)
    train(lesson, tmp_path, Log())
    daemon.wait_for(lambda: daemon.of(RunEnd))
    seen, told = daemon.of(StepRecord), [one for one in logged if "grad_norm" in one]
    assert len(seen) == len(told) == lesson.updates
    for record, log in zip(seen, told, strict=True):
        assert record.loss == pytest.approx(float(log["loss"]), rel=1e-3)
        assert record.grad_norm == pytest.approx(float(log["grad_norm"]), rel=1e-5)
        assert record.lr == pytest.approx(float(log["learning_rate"]))


def test_an_evaluation_before_the_first_step_is_a_phase(daemon: FakeDaemon, tmp_path: Path) -> None:
    train(Lesson(updates=3), tmp_path, eval_on_start=True)
    daemon.wait_for(lambda: daemon.of(RunEnd))
    assert [(note.phase, note.entered, note.step) for note in daemon.of(PhaseNote)] == [
        ("eval", True, 0),
        ("eval", False, 0),
    ]
    assert all(record.step_seconds > 0 for record in daemon.of(StepRecord))


def test_an_evaluation_outside_of_training_is_left_alone(daemon: FakeDaemon, tmp_path: Path) -> None:
    trainer = train(Lesson(updates=2), tmp_path)
    daemon.wait_for(lambda: daemon.of(RunEnd))
    assert trainer.evaluate()["eval_loss"] > 0
    assert daemon.of(PhaseNote) == []


def test_a_trainer_of_ones_own_whose_train_calls_the_parents_tells_errors_too(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    class Mine(InOrder):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    with pytest.raises(DataGoneError):
        train(Lesson(raises_at=1), tmp_path, of=Mine)
    (end,) = daemon.wait_for(lambda: daemon.of(RunEnd))
    assert end.status == "failed"


def test_each_try_of_a_trainer_that_looks_for_its_batch_size_is_a_run(daemon: FakeDaemon, tmp_path: Path) -> None:
    class TooLarge(InOrder):
        tries = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.tries += 1
            if self.tries == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    train(Lesson(updates=4), tmp_path, of=TooLarge, auto_find_batch_size=True)
    ends = daemon.wait_for(lambda: daemon.of(RunEnd) if len(daemon.of(RunEnd)) == 2 else None)
    assert [end.status for end in ends] == ["failed", "completed"]
    assert "before it had ended" in ends[0].error


def test_the_class_alone_will_do_as_a_callback(daemon: FakeDaemon, tmp_path: Path) -> None:
    parts, lesson = make(Lesson()), Lesson()
    arguments = arguments_of(Training(lesson, parts, tmp_path, None))
    InOrder(model=parts.model, args=arguments, train_dataset=lesson.data(), callbacks=[SentinelCallback]).train()
    daemon.wait_for(lambda: daemon.of(RunEnd))
    assert len(daemon.of(StepRecord)) == lesson.updates


def test_train_is_replaced_once_however_many_callbacks_there_are() -> None:
    SentinelCallback()
    replaced = Trainer.train
    SentinelCallback()
    assert Trainer.train is replaced


def train(lesson: Lesson, folder: Path, *callbacks: Any, of: type[Trainer] = InOrder, **changed: Any) -> Trainer:
    parts, callback = make(lesson), Transformers().callback()
    arguments = arguments_of(Training(lesson, parts, folder, callback))
    for name, value in changed.items():
        setattr(arguments, name, value)
    data = lesson.data()
    trainer = of(
        model=parts.model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[: lesson.rows],
        optimizers=(parts.optimizer, parts.scheduler),
        callbacks=[callback, *callbacks],
    )
    trainer.train()
    return trainer
