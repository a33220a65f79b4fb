"""A database is created or migrated once, by whoever comes first, and one of a newer version is left alone."""

import hashlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text

from sentinel.errors import MisuseError, PermanentError, SchemaTooNewError
from sentinel.store import schema
from sentinel.store.database import Store
from sentinel.store.history import History
from sentinel.store.tables import metadata
from tests.store.building import hello, make_older, url_in

OPEN_AND_WRITE = """
import sys
from sentinel.store.database import Store
from tests.store.building import hello
print("ready", flush=True)
sys.stdin.readline()
store = Store.open(sys.argv[1])
store.register_rank(hello(run_id=sys.argv[2]), "box", 1.0)
store.close()
"""


def test_a_fresh_database_has_exactly_the_tables_of_the_code(url: str) -> None:
    store = Store.open(url)
    with store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_folder_of_a_file_is_made(tmp_path: Path) -> None:
    Store.open(url_in(tmp_path / "not" / "there" / "yet")).close()
    assert (tmp_path / "not" / "there" / "yet" / "sentinel.db").exists()


def test_the_list_of_revisions_is_the_folder_of_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    found = [script.revision for script in scripts.walk_revisions()]
    assert tuple(reversed(found)) == schema.REVISIONS


def test_opening_again_changes_nothing_and_needs_no_alembic(url: str) -> None:
    Store.open(url).close()
    script = (
        "import sys; from sentinel.store.database import Store; Store.open(sys.argv[1]).close();"
        "sys.exit('alembic' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, url], check=False).returncode == 0


def test_processes_that_open_at_the_same_time_migrate_once(url: str) -> None:
    arguments = [[sys.executable, "-c", OPEN_AND_WRITE, url, f"run-{number}"] for number in range(3)]
    pipe = subprocess.PIPE
    openers = [subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for line in arguments]
    for opener in openers:
        assert opener.stdout.readline() == "ready\n"
    for opener in openers:
        opener.stdin.write("go\n")
        opener.stdin.flush()
    for opener in openers:
        _, complaint = opener.communicate(timeout=60)
        assert opener.returncode == 0, complaint
    with History(url) as history:
        assert sorted(row["run_id"] for row in history.runs()) == ["run-0", "run-1", "run-2"]
    with create_engine(url).connect() as connection:
        assert connection.execute(text("SELECT * FROM alembic_version")).all() == [(schema.REVISIONS[-1],)]


def test_a_newer_schema_is_refused_and_the_file_untouched(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    store.register_rank(hello(), "box", 1.0)
    store.close()
    path = tmp_path / "sentinel.db"
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    connection.close()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(SchemaTooNewError, match=r"0999.*upgrade sentinel"):
        Store.open(url_in(tmp_path))
    with pytest.raises(SchemaTooNewError, match="0999"):
        History(url_in(tmp_path))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_a_newer_schema_is_refused_by_writer_and_reader(url: str) -> None:
    Store.open(url).close()
    with create_engine(url).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    with pytest.raises(SchemaTooNewError, match=r"0999.*upgrade sentinel"):
        Store.open(url)
    with pytest.raises(SchemaTooNewError, match="0999"):
        History(url)
    with create_engine(url).connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0999"


def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "sentinel.db").write_bytes(b"this was a database once" * 100)
    with pytest.raises(PermanentError, match=r"sentinel\.db is damaged.*move it away"):
        Store.open(url_in(tmp_path))


def test_a_folder_that_is_a_file_is_named_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(PermanentError, match="home of the run database"):
        Store.open(url_in(tmp_path / "home"))


def test_somebody_elses_tables_are_not_touched(url: str) -> None:
    with create_engine(url).begin() as connection:
        connection.execute(text("CREATE TABLE runs (theirs TEXT)"))
    with pytest.raises(PermanentError, match="'runs' that is not ours"):
        Store.open(url)
    assert inspect(create_engine(url)).get_table_names() == ["runs"]


@pytest.mark.parametrize("url", ["nonsense", "sqlite://", "sqlite:///:memory:", "nosuchdatabase://x/y"])
def test_a_url_that_names_no_usable_database_is_misuse(url: str) -> None:
    with pytest.raises(MisuseError, match=r"store\.url"):
        Store.open(url)


@pytest.mark.parametrize("revision", schema.REVISIONS[:-1])
def test_an_older_schema_is_migrated_and_keeps_its_rows(url: str, revision: str) -> None:
    make_older(url, revision)
    store = Store.open(url)
    assert schema.revision_of(url) == schema.REVISIONS[-1]
    with store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(text("SELECT run_id FROM runs")).all() == [("kept",)]
