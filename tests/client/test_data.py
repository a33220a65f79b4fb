"""The data cursor hands out every batch of the stream exactly as asked: again, or left out, never lost or doubled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import sentinel
from sentinel.client.data import Cursor
from sentinel.errors import MisuseError
from sentinel.testing import FakeDaemon
from tests.client.training import Numbers, make


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


LOADERS: dict[str, Any] = {
    "list": lambda: [torch.tensor([place]) for place in range(10)],
    "shuffled": lambda: DataLoader(range(40), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(range(40), batch_size=4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        range(40), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "no batches": lambda: DataLoader(range(10), batch_size=None, shuffle=True),
    "iterable": lambda: DataLoader(Counting(), batch_size=4),
    "generator": lambda: DataLoader(
        range(40), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}


class Reader:
    """Reads epochs through a cursor, as run.batches does, without a model."""

    def __init__(self, loader: Any) -> None:
        torch.manual_seed(1)
        self.cursor = Cursor(1 << 28)
        self.loader = loader
        self.seen: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self.source = self.cursor.source = self.cursor.open(self.loader)
        self.cursor.active = True

    def read(self, count: int) -> list[Any]:
        got = []
        while len(got) < count:
            try:
                entry, batch = self.source.next()
            except StopIteration:
                self.source.close()
                self._begin()
                continue
            self.cursor.hand_out(entry)
            got.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        self.seen += got
        return got


@pytest.mark.parametrize("kind", LOADERS)
def test_the_stream_is_the_loaders_own(kind: str) -> None:
    torch.manual_seed(1)
    plain, loader = [], LOADERS[kind]()
    for _ in range(3):
        plain += [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]
    assert Reader(LOADERS[kind]()).read(len(plain)) == plain


PLACES = [(kind, where) for kind in LOADERS for where in ([14] if "workers" in str(kind) else [3, 10, 14, 20])]


@pytest.mark.parametrize(("kind", "where"), PLACES)
def test_a_rewind_hands_out_the_same_again_also_across_the_end_of_an_epoch(kind: str, where: int) -> None:
    clean = Reader(LOADERS[kind]()).read(30)
    reader = Reader(LOADERS[kind]())
    reader.read(where)
    back = max(0, where - 6)
    assert reader.cursor.can_rewind_to(back)
    assert reader.cursor.rewind(back) == 0
    assert reader.read(30 - back) == clean[back:]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_skip_leaves_out_exactly_the_window(kind: str) -> None:
    clean = Reader(LOADERS[kind]()).read(30)
    for ahead in (False, True):
        reader = Reader(LOADERS[kind]())
        reader.read(7)
        if ahead:  # batches 2..8, two of them never handed out yet
            assert reader.cursor.rewind(2, skip=7) == 7
            rest = clean[9:10] + clean[10:]
        else:  # from 4 on, up to what had been handed out
            assert reader.cursor.rewind(2, skip_from=4) == 3
            rest = clean[2:4] + clean[7:]
        assert reader.read(12) == rest[:12]
        # What was left out stays left out in a second rewind.
        reader.cursor.rewind(2)
        assert reader.read(12) == rest[:12]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 12), st.sampled_from(["again", "from", "count"])), max_size=5
    )
)
def test_any_series_of_rewinds_keeps_the_order_and_loses_nothing(moves: list[tuple[int, int, str]]) -> None:
    stream = list(range(200))
    reader = Reader([torch.tensor([number]) for number in stream])
    expected = [[number] for number in stream]  # what is still to be had, from the very first batch on
    at = 0
    for read, back, how in moves:
        assert reader.read(read) == expected[at : at + read]
        at += read
        target = max(0, at - back)
        position = expected[target][0] if target < at else reader.cursor.position
        if how == "again":
            reader.cursor.rewind(position)
        elif how == "count":
            reader.cursor.rewind(position, skip=3)
            del expected[target : target + 3]
        else:
            first_bad = position + 2
            reader.cursor.rewind(position, skip_from=first_bad)
            kept = [one for one in expected[target:at] if one[0] < first_bad]
            expected[target:at] = kept
        at = target
    assert reader.read(10) == expected[at : at + 10]


def test_memory_for_kept_batches_is_bounded_and_an_older_rewind_is_refused() -> None:
    cursor = Cursor(tape_bytes=10 * 800)
    source = cursor.source = cursor.open([torch.zeros(100, dtype=torch.float64) for _ in range(50)])
    cursor.active = True
    for _ in range(30):
        cursor.hand_out(source.next()[0])
    assert cursor.can_rewind_to(25)
    assert not cursor.can_rewind_to(5)
    assert cursor.can_rewind_to(30)


def test_an_index_list_is_never_served_by_another_loader() -> None:
    cursor = Cursor(1 << 20)
    for size in (8, 4):
        source = cursor.source = cursor.open(DataLoader(range(size), batch_size=2))
        cursor.active = True
        cursor.hand_out(source.next()[0])
    assert cursor.can_rewind_to(1)
    assert not cursor.can_rewind_to(0)


def test_what_is_read_only_once_is_refused() -> None:
    with pytest.raises(MisuseError, match="bare iterator"):
        Cursor(1).open(iter([1, 2]))
    with pytest.raises(MisuseError, match="needs an iterable"):
        Cursor(1).open(3)


def test_run_batches_calls_iter_once_per_epoch_and_knows_its_length(daemon: FakeDaemon) -> None:
    class Loader:
        calls = 0

        def __iter__(self) -> Iterator[int]:
            self.calls += 1
            return iter([1, 2, 3])

        def __len__(self) -> int:
            return 3

    setup, loader = make(), Loader()
    run = sentinel.attach(setup.model, setup.optimizer)
    batches = run.batches(loader)
    assert len(batches) == 3  # type: ignore[arg-type]
    assert list(batches) == [1, 2, 3]
    assert list(run.batches(loader)) == [1, 2, 3]
    assert loader.calls == 2
    run.detach()


def test_a_pass_that_was_left_early_does_not_disable_the_next(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    first = run.batches([1, 2, 3])
    assert next(first) == 1
    second = run.batches([4, 5])
    assert next(second) == 4
    assert run._cursor.active
    assert list(second) == [5]
    assert list(first) == [2, 3]  # a nested pass is over: the outer goes on
    assert not run._cursor.active
    run.detach()


def test_batches_of_an_evaluation_are_not_training_data(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    with run.phase("eval"):
        assert list(run.batches(iter([1, 2]))) == [1, 2]
    assert run._cursor.position == 0
    run.detach()


def test_the_loader_is_left_as_it_was(daemon: FakeDaemon) -> None:
    setup = make()
    loader = DataLoader(Numbers(64), batch_size=8, shuffle=True)
    sampler = loader.batch_sampler
    run = sentinel.attach(setup.model, setup.optimizer)
    next(iter(run.batches(loader)))
    assert loader.batch_sampler is sampler
    assert len(loader) == 8
    run.detach()


def test_index_lists_count_against_the_memory_of_the_tape() -> None:
    cursor = Cursor(tape_bytes=10_000)
    source = cursor.open(DataLoader(list(range(8000)), batch_size=80))
    for _ in range(100):
        entry, _batch = source.next()
        cursor.hand_out(entry)
    assert 2 <= len(cursor._tape) <= 10_000 // (36 * 80)
    assert not cursor.can_rewind_to(0)
