"""The outbox: numbered once, bounded, and every number arrives exactly once, as a message or in a gap."""

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.client import outbox as outbox_module
from sentinel.client.outbox import Outbox
from sentinel.records import Ack, Gap, PhaseNote, RunStart, StepRecord
from sentinel.vocabulary import Delivery, DropReason, Mode, Reason, UpdateResult


def telemetry(step: int = 1) -> StepRecord:
    return StepRecord(seq=0, generation=0, step=step, time=1.0, result=UpdateResult.APPLIED, loss=1.5)


def lasting() -> PhaseNote:
    return PhaseNote(seq=0, time=1.0, step=1, phase="eval", entered=True)


def critical() -> Ack:
    return Ack(seq=0, time=1.0, command_id="c", state="prepared", reason=Reason.OK)


def run_start() -> RunStart:
    return RunStart(
        seq=0,
        time=1.0,
        step=0,
        name="n",
        mode=Mode.PROTECT,
        world_size=1,
        local_rank=0,
        pid=1,
        process_start=1.0,
        host="h",
        argv=[],
        cwd="/",
        git={},
        packages={},
        config={},
        settings={},
        devices=[],
    )


def numbers(messages) -> list[int]:
    found: list[int] = []
    for message in messages:
        found += range(message.first_seq, message.last_seq + 1) if isinstance(message, Gap) else [message.seq]
    return found


def test_numbers_grow_by_one_across_message_types() -> None:
    outbox = Outbox(64)
    assert [outbox.push(m) for m in (run_start(), telemetry(), lasting(), critical())] == [1, 2, 3, 4]
    assert outbox.last_seq == 4
    assert [m.seq for m in outbox.take(10)] == [1, 2, 3, 4]
    assert outbox.take(10) == []


def test_messages_stay_until_acknowledged() -> None:
    outbox = Outbox(64)
    for _ in range(5):
        outbox.push(telemetry())
    outbox.take(5)
    outbox.acknowledge(3)
    assert len(outbox) == 2
    assert not outbox.settled
    outbox.acknowledge(5)
    assert outbox.settled


def test_an_acknowledgement_of_what_was_not_sent_frees_nothing() -> None:
    outbox = Outbox(64)
    for _ in range(5):
        outbox.push(telemetry())
    outbox.take(2)
    outbox.acknowledge(99)
    assert numbers(outbox.take(10)) == [3, 4, 5]


def test_a_full_outbox_drops_the_oldest_telemetry_and_announces_it() -> None:
    outbox = Outbox(64)
    outbox.push(critical())
    outbox.push(lasting())
    for step in range(100):
        outbox.push(telemetry(step))
    assert len(outbox) == 64
    assert outbox.dropped == {"outbox_full": 38}
    first, second, gap, *rest = outbox.take(32)
    assert (first.seq, second.seq) == (1, 2)
    assert gap == Gap(3, 40, DropReason.OUTBOX_FULL)
    assert rest[0].seq == 41


def test_lasting_messages_go_only_when_no_telemetry_is_left_and_critical_ones_stay() -> None:
    outbox = Outbox(64)
    outbox.push(run_start())
    for _ in range(60):
        outbox.push(telemetry())
    for _ in range(70):
        outbox.push(lasting())
    for _ in range(100):
        outbox.push(critical())
    assert outbox.dropped == {"outbox_full": 130}
    assert len(outbox) == 101
    assert len(outbox.critical_after(0)) == 101


def test_even_critical_messages_have_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_CRITICAL", 100)
    outbox = Outbox(64)
    outbox.push(run_start())
    for _ in range(150):
        outbox.push(critical())
    assert len(outbox) == 101
    assert outbox.dropped == {"outbox_full": 50}
    assert isinstance(outbox.take(1)[0], RunStart)


def test_what_is_in_flight_is_never_dropped() -> None:
    outbox = Outbox(64)
    for _ in range(20):
        outbox.push(telemetry())
    sent = outbox.take(20)
    for _ in range(200):
        outbox.push(telemetry())
    outbox.rewind(0)
    assert outbox.take(20) == sent


def test_a_rewind_resends_what_is_not_stored() -> None:
    outbox = Outbox(64)
    for _ in range(10):
        outbox.push(telemetry())
    outbox.take(10)
    outbox.rewind(6)
    assert numbers(outbox.take(10)) == [7, 8, 9, 10]


def test_a_daemon_with_a_fresh_database_gets_the_run_start_again() -> None:
    outbox = Outbox(64)
    outbox.push(run_start())
    for _ in range(9):
        outbox.push(telemetry())
    outbox.take(10)
    outbox.acknowledge(10)
    outbox.push(telemetry())
    outbox.rewind(0)
    start, gap, last = outbox.take(10)
    assert isinstance(start, RunStart)
    assert start.seq == 1
    assert gap == Gap(2, 10, DropReason.UNEXPLAINED)
    assert last.seq == 11
    assert outbox.dropped == {}


def test_a_discarded_message_becomes_a_gap_for_good() -> None:
    outbox = Outbox(64)
    for _ in range(3):
        outbox.push(telemetry())
    outbox.take(3)
    gap = outbox.discard(2, DropReason.TOO_LARGE)
    assert gap == Gap(2, 2, DropReason.TOO_LARGE)
    outbox.rewind(0)
    assert outbox.take(3)[1] == gap
    outbox.discard(2, DropReason.TOO_LARGE)
    assert outbox.dropped == {"too_large": 1}


def test_only_urgent_messages_wake_the_sender() -> None:
    outbox, woken = Outbox(64), []
    outbox.wake = lambda: woken.append(1)
    outbox.push(telemetry())
    assert woken == []
    outbox.push(lasting())
    outbox.push(critical())
    assert woken == [1, 1]


def test_many_threads_never_share_a_number() -> None:
    outbox, seen = Outbox(10_000), []
    threads = [
        threading.Thread(target=lambda: seen.extend([outbox.push(telemetry()) for _ in range(1000)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 4001))


def test_pushing_from_inside_a_push_does_not_deadlock() -> None:
    outbox = Outbox(64)
    outbox.wake = lambda: outbox.push(telemetry()) and None
    with outbox._lock:
        outbox.push(critical())
    assert numbers(outbox.take(10)) == [1, 2]


@pytest.mark.parametrize("records", [64, 8192])
def test_memory_stays_bounded_through_a_long_outage(records: int) -> None:
    outbox = Outbox(records)
    outbox.push(run_start())
    for step in range(5 * records):
        outbox.push(telemetry(step))
    assert len(outbox) == records
    assert len(outbox._order) <= 4 * records
    assert sum(len(line) for line in outbox._waiting.values()) <= records


class Receiver:
    """What a daemon keeps: a prefix without holes, each number once."""

    def __init__(self) -> None:
        self.stored = 0
        self.seen: Counter[int] = Counter()
        self.in_gaps: set[int] = set()

    def store(self, messages: list) -> None:
        for message in messages:
            for number in numbers([message]):
                assert number == self.stored + 1, "a number was left out, repeated or out of order"
                self.stored = number
                self.seen[number] += 1
                if isinstance(message, Gap):
                    self.in_gaps.add(number)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"), st.sampled_from([telemetry, telemetry, telemetry, lasting, critical]), st.integers(1, 40)
        ),
        st.tuples(st.just("take"), st.none(), st.integers(1, 40)),
        st.tuples(st.just("store"), st.none(), st.integers(1, 40)),
        st.tuples(st.just("discard"), st.none(), st.integers(0, 10)),
        st.tuples(st.just("reconnect"), st.none(), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_each_number_arrives_exactly_once_whatever_happens(operations: list) -> None:
    outbox, receiver, on_the_way = Outbox(64), Receiver(), []
    outbox.push(run_start())
    pushed_critical = {1}

    def take(most: int) -> None:
        on_the_way.extend(outbox.take(most))

    def store(most: int) -> None:
        receiver.store(on_the_way[:most])
        del on_the_way[:most]
        outbox.acknowledge(receiver.stored)

    for what, make, count in operations:
        if what == "push":
            for _ in range(count):
                seq = outbox.push(make())
                if make is critical:
                    pushed_critical.add(seq)
        elif what == "take":
            take(count)
        elif what == "store":
            store(count)
        elif what == "discard" and count < len(on_the_way) and not isinstance(on_the_way[count], Gap):
            pushed_critical.discard(on_the_way[count].seq)
            on_the_way[count] = outbox.discard(on_the_way[count].seq, DropReason.TOO_LARGE)
        elif what == "reconnect":
            on_the_way.clear()
            outbox.rewind(receiver.stored)
        critical_kept = sum(1 for m in outbox._kept.values() if m.__class__ in (Ack, RunStart))
        assert len(outbox) <= 64 + critical_kept
    for _ in range(outbox.last_seq + 1):
        take(40)
        store(40)
    assert outbox.settled
    assert receiver.stored == outbox.last_seq
    assert set(receiver.seen.values()) == {1}
    assert len(receiver.in_gaps) == sum(outbox.dropped.values())
    assert not receiver.in_gaps & pushed_critical


def test_the_classes_of_delivery_are_what_this_file_thinks() -> None:
    made = {telemetry: Delivery.TELEMETRY, lasting: Delivery.LASTING, critical: Delivery.CRITICAL}
    assert {make().delivery for make in made} == set(Delivery)
