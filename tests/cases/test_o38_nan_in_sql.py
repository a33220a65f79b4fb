"""O38: SQLite turns NaN into NULL; here nan, +inf, -inf and absent stay four values through the database."""

import math
import sqlite3
from pathlib import Path

from sentinel.store.database import Store
from sentinel.store.history import History
from tests.store.building import RUN, START, entries, hello, record, start, url_in

FOUR = [math.nan, math.inf, -math.inf, None]


def word(value: float | None) -> str:
    return "absent" if value is None else str(value)


def test_the_danger_is_real_in_sqlite() -> None:
    (stored,) = sqlite3.connect(":memory:").execute("SELECT ?", (math.nan,)).fetchone()
    assert stored is None


def test_four_values_come_back_as_four(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    store.register_rank(hello(), "box", START)
    steps = [
        record(2 + index, 1 + index, loss=value, grad_norm=FOUR[index - 1], reported={"score": value or 0.5})
        for index, value in enumerate(FOUR)
    ]
    store.write(entries(start(), *steps), critical=False)
    with History(store.url) as history:
        found = list(history.steps(RUN))
    assert [word(row["loss"]) for row in found] == ["nan", "inf", "-inf", "absent"]
    assert [word(row["grad_norm"]) for row in found] == ["absent", "nan", "inf", "-inf"]
    assert [word(row["reported"]["score"]) for row in found] == ["nan", "inf", "-inf", "0.5"]


def test_a_step_written_again_with_another_nonfinite_value_does_not_clash(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    store.register_rank(hello(), "box", START)
    steps = [record(2 + index, 1, loss=value) for index, value in enumerate(FOUR)]
    store.write(entries(start(), *steps), critical=False)
    with History(store.url) as history:
        assert [word(row["loss"]) for row in history.steps(RUN)] == ["absent"]
        replaced = [row["body"]["loss"] for row in history.events(RUN) if row["kind"] == "replaced_step"]
    assert [word(value) for value in replaced] == ["nan", "inf", "-inf"]
