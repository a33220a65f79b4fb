"""produced = stored + dropped + in flight, whatever is dropped, lost, or sent again."""

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.records import Gap
from sentinel.store.database import Entry, Store
from sentinel.store.history import History
from sentinel.vocabulary import DropReason
from tests.store.building import RANK0, RUN, START, hello, record

# What becomes of a message: it is sent; it is dropped with a marker; it vanishes without one.
FATES = st.lists(st.sampled_from(["sent", "sent", "sent", "dropped", "vanished"]), min_size=1, max_size=25)
# The daemon dies after so many messages, and the client sends again from so many before what it knows is stored.
DEATHS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=8)


@settings(
    max_examples=30,
    deadline=None,
    # Every example takes a new database from the fixture.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(fates=FATES, deaths=DEATHS, unsent=st.integers(0, 4))
def test_nothing_is_counted_twice_and_nothing_is_forgotten(
    new_url: Callable[[], str], fates: list[str], deaths: list[tuple[int, int]], unsent: int
) -> None:
    store = Store.open(new_url())
    store.register_rank(hello(), "box", START)
    stream = [
        Entry(RANK0, record(seq, seq) if fate == "sent" else Gap(seq, seq, DropReason.OUTBOX_FULL))
        for seq, fate in enumerate(fates, 1)
        if fate != "vanished"
    ]
    store = deliver(store, stream, deaths)
    store.heard({RANK0: len(fates) + unsent})
    with History(store.url) as history:
        (books,) = history.conservation(RUN)
        stored_steps = [row["step"] for row in history.steps(RUN)]
    store.close()
    assert books["produced"] == books["stored"] + books["dropped"] + books["in_flight"] == len(fates) + unsent
    assert stored_steps == [seq for seq, fate in enumerate(fates, 1) if fate == "sent"]
    assert books["stored"] == len(stored_steps)
    assert books["dropped_by_reason"].get("outbox_full", 0) == fates.count("dropped")
    assert sum(books["dropped_by_reason"].values()) == books["dropped"]
    # A hole shows as soon as a later message comes; one at the very end is still in flight.
    last_known = max((seq for seq, fate in enumerate(fates, 1) if fate != "vanished"), default=0)
    assert books["dropped_by_reason"].get("unexplained", 0) == fates[:last_known].count("vanished")
    assert books["in_flight"] == len(fates) + unsent - last_known


def deliver(store: Store, stream: list[Entry], deaths: list[tuple[int, int]]) -> Store:
    """Write the stream in pieces; between two pieces the store is closed, opened, and sent some of it again."""
    position = 0
    for size, repeated in deaths:
        store.write(stream[position : position + size], critical=False)
        position += size
        store.close()
        store = Store.open(store.url)
        store.write(stream[max(0, position - size - repeated) : position], critical=True)
    store.write(stream[position:], critical=False)
    return store
