"""A full disk, a locked file, a killed process: nothing half, nothing lost, and it goes on when the fault is over."""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.errors import PermanentError, TemporaryError
from sentinel.store.database import Store
from sentinel.store.history import History
from tests.store.building import RANK0, RUN, START, entries, hello, record, start, url_in

WRITE_UNTIL_KILLED = """
import sys
from itertools import count
from sentinel.store.database import Store
from tests.store.building import START, entries, hello, record
store = Store.open(sys.argv[1])
store.register_rank(hello(), "box", START)
for seq in count(1):
    store.write(entries(record(seq, seq)), critical=True)
    print(seq, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(url_in(tmp_path))
    store.register_rank(hello(), "box", START)
    store.write(entries(start()), critical=True)
    return store


def test_a_full_disk_is_temporary_and_costs_nothing_once_there_is_room(store: Store) -> None:
    def pragma(text: str) -> int:
        return store._connection.connection.dbapi_connection.execute(f"PRAGMA {text}").fetchone()[0]

    batch = entries(*(record(seq, seq - 1) for seq in range(2, 500)))
    room = pragma("max_page_count")
    pragma(f"max_page_count = {pragma('page_count') + 2}")
    with pytest.raises(TemporaryError, match="full"):
        store.write(batch, critical=False)
    assert store.rank_state(RANK0).stored == 1, "nothing of the failed batch stayed"
    pragma(f"max_page_count = {room}")
    store.write(batch, critical=False)
    with History(store.url) as history:
        (books,) = history.conservation(RUN)
        assert len(list(history.steps(RUN))) == 498
    assert (books["produced"], books["stored"], books["dropped"]) == (499, 499, 0)


def test_a_file_that_another_process_locks_is_temporary(store: Store, tmp_path: Path) -> None:
    store._connection.connection.dbapi_connection.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(tmp_path / "sentinel.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        with pytest.raises(TemporaryError, match="locked"):
            store.write(entries(record(2, 1)), critical=True)
    other.execute("ROLLBACK")
    store.write(entries(record(2, 1)), critical=True)
    assert store.rank_state(RANK0).stored == 2


def test_a_table_that_vanished_is_permanent(store: Store, tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "sentinel.db").execute("DROP TABLE steps").close()
    with pytest.raises(PermanentError, match="steps"):
        store.write(entries(record(2, 1)), critical=True)


def test_what_was_acknowledged_before_a_kill_is_in_the_database(tmp_path: Path) -> None:
    line = [sys.executable, "-c", WRITE_UNTIL_KILLED, url_in(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as writer:
        while int(writer.stdout.readline()) < 20:
            pass
        writer.kill()
        acknowledged = [20, *(int(word) for word in writer.stdout.read().split())][-1]
    assert writer.returncode == -signal.SIGKILL
    again = Store.open(url_in(tmp_path))
    stored = again.rank_state(RANK0).stored
    assert acknowledged <= stored <= acknowledged + 1
    with History(again.url) as history:
        assert [row["step"] for row in history.steps(RUN)] == list(range(1, stored + 1))
