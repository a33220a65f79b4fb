"""The nouns: immutable, complete, and numbered in one way."""

import typing

import msgspec
import pytest

from sentinel import records
from sentinel.records import Gap, Numbered, StepRecord
from sentinel.vocabulary import Delivery, DropReason, UpdateResult

WIRE = [*typing.get_args(records.FromRank), *typing.get_args(records.FromDaemon)]


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in WIRE]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", WIRE, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_arrays_of_their_own(kind) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.array_like
    assert kind.__doc__ != kind.__mro__[1].__doc__ or kind in {records.ControlReply, records.Welcome}


@pytest.mark.parametrize("kind", typing.get_args(Numbered), ids=lambda kind: kind.__name__)
def test_numbered_messages_begin_with_their_number_and_have_a_class_of_delivery(kind) -> None:
    assert kind.__struct_fields__[0] == "seq"
    assert kind.delivery in Delivery
    assert "delivery" not in kind.__struct_fields__


def test_what_decides_about_a_run_is_critical_and_only_steps_may_be_lost() -> None:
    classes = {kind.__name__: kind.delivery for kind in typing.get_args(Numbered)}
    assert {name for name, delivery in classes.items() if delivery is Delivery.TELEMETRY} == {"StepRecord"}
    critical = {name for name, delivery in classes.items() if delivery is Delivery.CRITICAL}
    assert {"RunStart", "RunEnd", "Ack", "Reflex"} <= critical


def test_absent_is_none_and_never_zero() -> None:
    step = StepRecord(1, 0, 1, 1.0, UpdateResult.APPLIED)
    counted = {"seq", "generation", "step", "time", "result", "applied", "skipped"}
    assert {getattr(step, name) for name in step.__struct_fields__ if name not in counted} == {None}


def test_a_gap_counts_both_its_ends() -> None:
    assert Gap(3, 3, DropReason.OUTBOX_FULL).count == 1
    assert Gap(3, 7, DropReason.OUTBOX_FULL).count == 5


def test_a_record_cannot_be_changed() -> None:
    step = StepRecord(1, 0, 1, 1.0, UpdateResult.APPLIED)
    with pytest.raises(AttributeError):
        step.loss = 1.0
    assert msgspec.structs.replace(step, loss=1.0).loss == 1.0
