"""The wire: what goes in comes out, and nothing but a WireError comes out of anything else."""

import math
import struct
import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel import records, wire
from sentinel.errors import WireError
from sentinel.records import ControlReply, ControlRequest, Heartbeat, Reflex, Stored, Trouble
from sentinel.vocabulary import Action, Kind, Outcome

FROM_RANK = typing.get_args(records.FromRank)
FROM_DAEMON = typing.get_args(records.FromDaemon)

SIXTY_FOUR_BITS = st.integers(-(2**63), 2**63 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | SIXTY_FOUR_BITS | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: depth(value) < wire.MAX_DEPTH - 1)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth(item) for item in value), default=0)
    return 0


def values_of(kind) -> st.SearchStrategy:
    """Any value of a field's type, the odd numbers included."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    simple = {
        int: SIXTY_FOUR_BITS,
        float: st.floats(),
        str: st.text(max_size=20),
        bool: st.booleans(),
        typing.Any: PLAIN,
    }
    if kind in simple:
        return simple[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return messages(kind)
    return st.none() if kind is type(None) else st.sampled_from(kind)


def messages(kind: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})


def body_of(frame: bytes) -> bytes:
    (found,) = wire.FrameReader().feed(frame)
    return found


def same(one: object, other: object) -> bool:
    """Equal, with NaN equal to NaN."""
    return repr(msgspec.to_builtins(one)) == repr(msgspec.to_builtins(other))


@pytest.mark.parametrize("kind", FROM_RANK, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_message_of_a_rank_survives_the_wire(kind, data) -> None:
    message = data.draw(messages(kind))
    assert same(wire.decode_from_rank(body_of(wire.encode(message))), message)


@pytest.mark.parametrize("kind", FROM_DAEMON, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_message_of_the_daemon_survives_the_wire(kind, data) -> None:
    message = data.draw(messages(kind))
    assert same(wire.decode_from_daemon(body_of(wire.encode(message))), message)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_nonfinite_and_absent_stay_apart(value) -> None:
    step = records.StepRecord(1, 0, 1, 1.0, "applied", loss=value)
    assert repr(wire.decode_from_rank(body_of(wire.encode(step))).loss) == repr(value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_wire_error(data) -> None:
    assert isinstance(outcome(wire.decode_from_rank, data), (WireError, *FROM_RANK))
    assert isinstance(outcome(wire.decode_from_daemon, data), (WireError, *FROM_DAEMON))


def outcome(decode, body: bytes):
    try:
        return decode(body)
    except WireError as error:
        return error


@settings(max_examples=200, deadline=None)
@given(data=st.data(), place=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_flipped_byte_raises_nothing_but_a_wire_error(data, place, byte) -> None:
    body = bytearray(body_of(wire.encode(data.draw(st.one_of(messages(Reflex), messages(records.Ack))))))
    body[place % len(body)] = byte
    assert isinstance(outcome(wire.decode_from_rank, bytes(body)), (WireError, *FROM_RANK))


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode({"type": "stored", "seq": 1}),
        msgspec.msgpack.encode(["nobody", 1]),
        msgspec.msgpack.encode(["step", "one"]),
        msgspec.msgpack.encode(["heartbeat"]),
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
    ids=["map", "unknown tag", "wrong type", "too short", "empty", "array of four billion", "bottomless nest"],
)
def test_what_is_not_a_message_is_refused(body) -> None:
    with pytest.raises(WireError):
        wire.decode_from_rank(body)


def test_a_message_of_the_wrong_direction_is_refused() -> None:
    with pytest.raises(WireError):
        wire.decode_from_rank(body_of(wire.encode(Stored(1))))


def test_a_newer_senders_extra_fields_are_ignored() -> None:
    assert wire.decode_from_daemon(msgspec.msgpack.encode(["stored", 7, "new", {}])) == Stored(7)


def test_a_frame_may_be_one_mebibyte_and_no_more() -> None:
    overhead = len(wire.encode(Trouble(1, 1.0, 1, "x", "y" * 70_000))) - 4 - 70_000
    largest = "y" * (wire.MAX_FRAME_BYTES - overhead)
    frame = wire.encode(Trouble(1, 1.0, 1, "x", largest))
    assert len(frame) == 4 + wire.MAX_FRAME_BYTES
    assert wire.decode_from_rank(body_of(frame)).text == largest
    with pytest.raises(WireError, match="1048577 bytes does not fit"):
        wire.encode(Trouble(1, 1.0, 1, "x", largest + "y"))
    with pytest.raises(WireError, match="at most 1048576"):
        wire.decode_from_rank(b"\x00" * (wire.MAX_FRAME_BYTES + 1))


def test_an_oversized_announcement_is_refused_before_its_bytes_come() -> None:
    reader = wire.FrameReader()
    with pytest.raises(WireError, match="announces 1048577 bytes"):
        list(reader.feed(struct.pack(">I", wire.MAX_FRAME_BYTES + 1)))


def nested(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize("kind", ["arguments", "body", "evidence"])
def test_nesting_deeper_than_eight_is_refused_on_both_sides(kind) -> None:
    def message(levels: int):
        if kind == "arguments":
            return ControlRequest(1, "status", "latest", nested(levels))
        if kind == "body":
            return ControlReply(True, "ok", nested(levels))
        return Reflex(1, 1.0, 0, 1, Kind.OOM, Action.NONE, Outcome.APPLIED, 1, nested(levels))

    decode = wire.decode_from_daemon if kind == "body" else wire.decode_from_rank
    most = message(wire.MAX_DEPTH - 1)  # the message itself is a level too
    assert decode(body_of(wire.encode(most))) == most
    with pytest.raises(WireError, match="deeper than 8"):
        wire.encode(message(wire.MAX_DEPTH))
    with pytest.raises(WireError, match="deeper than 8"):
        decode(msgspec.msgpack.encode(message(wire.MAX_DEPTH)))


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"])
def test_text_that_is_not_utf8_is_a_wire_error(text) -> None:
    with pytest.raises(WireError):
        wire.encode(Trouble(1, 1.0, 1, "x", text))


def test_endless_nesting_in_a_typed_field_is_a_wire_error() -> None:
    loop: dict = {}
    loop["a"] = loop
    with pytest.raises(WireError):
        wire.encode(records.StepRecord(1, 0, 1, 1.0, "applied", reported=loop))


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=6), cuts=st.lists(st.integers(1, 50), max_size=80))
def test_frames_come_out_whole_however_the_stream_is_cut(counts, cuts) -> None:
    sent = [Heartbeat(1.0, n, "train" * n, n, {}, 0.0) for n in counts]
    stream = b"".join(wire.encode(message) for message in sent)
    reader, got, place = wire.FrameReader(), [], 0
    for size in [*cuts, len(stream)]:
        got += [wire.decode_from_rank(body) for body in reader.feed(stream[place : place + size])]
        place += size
    assert got == sent
    assert reader.pending_bytes == 0


def test_a_reader_that_stops_halfway_goes_on_where_it_was() -> None:
    reader = wire.FrameReader()
    frames = wire.encode(Stored(1)) + wire.encode(Stored(2))
    first = next(iter(reader.feed(frames)))
    assert [wire.decode_from_daemon(body).seq for body in (first, *reader.feed(b""))] == [1, 2]
