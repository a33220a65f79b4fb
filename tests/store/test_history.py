"""Whoever reads sees every commit, never writes, and is told which runs there are."""

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from sentinel.errors import NoSuchRunError
from sentinel.records import Origin, RunEnd
from sentinel.store.database import Store
from sentinel.store.history import History
from tests.postgres_server import Server
from tests.store.building import RANK0, RUN, START, entries, hello, record, start, url_in

# Permissions do not bind root, so root reads as somebody else, after everything is loaded.
READ_ONLY = """
import os, sys
from sentinel.store.history import History
with History(sys.argv[1]) as history:
    history.runs()
if os.geteuid() == 0:
    os.setuid(65534)
print(f"may-write:{os.access(sys.argv[3], os.W_OK)}")
with History(sys.argv[2]) as history:
    print(f"runs:{len(history.runs())}")
"""


@pytest.fixture
def store(url: str) -> Store:
    store = Store.open(url)
    for number, (run_id, name) in enumerate([("aa-old", "gpt"), ("aa-new", "gpt"), ("bb", "")]):
        store.register_rank(hello(run_id=run_id), "box", START + number)
        begun = start(name=name)
        store.write(entries(begun, origin=Origin(run_id, 1, 0)), critical=True)
    return store


def test_a_run_is_found_by_id_prefix_name_and_latest(url: str) -> None:
    store = Store.open(url)
    for number, (run_id, name) in enumerate([("aa-old", "gpt"), ("aa-new", "gpt"), ("bb", "")]):
        store.register_rank(hello(run_id=run_id), "box", START + number)
        message = start(name=name)
        message = type(message)(
            **{f: getattr(message, f) for f in message.__struct_fields__} | {"time": START + number}
        )
        store.write(entries(message, origin=Origin(run_id, 1, 0)), critical=True)
    with History(store.url) as history:
        assert history.resolve("latest") == "bb"
        assert history.resolve("aa-old") == "aa-old"
        assert history.resolve("aa-o") == "aa-old"
        assert history.resolve("gpt") == "aa-new", "the latest of that name"
        store.register_rank(hello(run_id="aa-old", nonce="n2"), "box", START + 50)
        assert history.resolve("latest") == "aa-old", "it was started again"


@pytest.mark.parametrize(("run", "says"), [("aa", "beginning of 2 runs"), ("zz", r"there are: .*aa-old \(gpt\)")])
def test_a_run_that_cannot_be_found_is_answered_with_those_that_can(store: Store, run: str, says: str) -> None:
    with History(store.url) as history, pytest.raises(NoSuchRunError, match=says):
        history.resolve(run)


@pytest.mark.service
def test_an_empty_database_of_a_server_is_no_run(postgres: Server) -> None:
    with postgres.database() as url, pytest.raises(NoSuchRunError, match=r":\*\*\*@127.0.0.1.* yet") as caught:
        History(url)
    assert postgres.password not in str(caught.value)


def test_no_database_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRunError, match=r"sentinel\.db"):
        History(url_in(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_reader_sees_each_commit_and_nothing_before_it(store: Store) -> None:
    origin = Origin("bb", 1, 0)
    with History(store.url) as history:
        for step in range(1, 4):
            with store.transaction(critical=False):
                store.write(entries(record(step + 1, step), origin=origin), critical=False)
                assert history.run("bb")["steps"] == step - 1
            assert history.run("bb")["steps"] == step


def test_a_reader_cannot_write(store: Store) -> None:
    with History(store.url) as history, history._engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.exec_driver_sql("DELETE FROM runs")
    assert isinstance(caught.value.orig, (sqlite3.OperationalError, psycopg.errors.ReadOnlySqlTransaction))


def test_a_copy_in_a_folder_that_nobody_may_write_to_can_be_read(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    for run_id in ("aa", "bb", "cc"):
        store.register_rank(hello(run_id=run_id), "box", START)
    store.close()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder)
        shutil.copy(tmp_path / "sentinel.db", archive)
        (archive / "sentinel.db").chmod(0o444)
        archive.chmod(0o555)
        reading = [sys.executable, "-c", READ_ONLY, store.url, url_in(archive), folder]
        found = subprocess.run(reading, capture_output=True, text=True, check=False)
        archive.chmod(0o755)
    assert found.stdout.split() == ["may-write:False", "runs:3"], found.stderr


def test_provenance_comes_back_with_its_structure(store: Store) -> None:
    with History(store.url) as history:
        run = history.run("bb")
    assert run["argv"] == ["train.py", "--lr", "0.1"]
    assert run["git"] == {"commit": "abc123", "dirty": True}
    assert run["config"] == {"lr": 0.1, "limit": float("inf")}
    assert run["packages"] == {"torch": "2.13"}
    assert (run["cwd"], run["host"], run["devices"], run["world_size"]) == ("/somewhere", "box", ["cpu"], 1)


def test_the_last_step_is_known_from_the_end_even_if_its_record_was_dropped(url: str) -> None:
    store = Store.open(url)
    store.register_rank(hello(), "box", START)
    store.write(entries(start(), record(2, 1), RunEnd(4, START, 0, 2, "failed", "ValueError: x")), critical=True)
    state = store.rank_state(RANK0)
    assert state.ended
    with History(store.url) as history:
        assert history.run(RUN)["steps"] == 2
        assert history.ranks(RUN)[0]["error"] == "ValueError: x"
