"""A message and what was ruled about it are one commit: a daemon killed in between has both or neither."""

from pathlib import Path

import pytest

from sentinel.daemon import batch
from sentinel.daemon.writer import BATCH_ENTRIES
from tests.daemon.test_writer import Bench, on


@pytest.mark.parametrize("before", [0, BATCH_ENTRIES - 1])
def test_what_is_queued_together_is_never_cut_apart(tmp_path: Path, monkeypatch, before: int) -> None:
    groups: list[list[batch.Item]] = []
    real = batch.write

    def watched(store, group) -> None:
        groups.append(list(group))
        real(store, group)

    monkeypatch.setattr(batch, "write", watched)
    done: list[str] = []

    async def body(bench: Bench) -> None:
        if before:
            bench.append(1, before)
        with bench.writer.together():
            bench.append(before + 1, before + 1, critical=True)
            bench.writer.later(lambda store: done.append("ruled"))
            bench.writer.later(lambda store: done.append("ruled again"))
        await bench.until_stored(before + 1)

    on(tmp_path, body, batch_seconds=60.0)
    assert done == ["ruled", "ruled again"]
    together = next(group for group in groups if any(item.follows for item in group))
    entry, first, second = together[-3:]
    assert (entry.entry.message.seq, entry.follows) == (before + 1, False)
    assert first.follows
    assert second.follows
