"""The report keeps its contract: every key, every word, every time."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sentinel.postmortem.report import report, rfc3339
from sentinel.records import Origin, RunEnd
from sentinel.store.database import Store
from sentinel.store.history import History
from sentinel.store.strict_json import dumps
from sentinel.vocabulary import Action, Kind, Outcome, Quality, Reason, RunStatus, Severity, Tier
from tests.store.building import RUN, START, entries, hello, record, rolled_back_run, snapshot, start, url_in


class OneOf:
    def __init__(self, *values: Any) -> None:
        self.values = values


TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
MAYBE_INT, MAYBE_NUMBER = (int, type(None)), (int, float, type(None))
ACTION = {
    "action": OneOf(*Action),
    "reason": OneOf(*Reason),
    "requested_step": int,
    "applied_step": MAYBE_INT,
    "target_step": MAYBE_INT,
    "skipped_batches": MAYBE_INT,
    "outcome": OneOf(None, *Outcome),
    "seconds": MAYBE_NUMBER,
    "text": str,
}
CONTRACT = {
    "run": {
        "run_id": str,
        "name": str,
        "status": OneOf(*RunStatus),
        "steps": int,
        "attempts": int,
        "generations": int,
        "world_size": int,
        "started_at": TIME,
        "ended_at": OneOf(None, TIME),
        "error": (str, type(None)),
    },
    "incidents": [
        {
            "id": str,
            "kind": OneOf(*Kind),
            "severity": OneOf(*Severity),
            "tier": OneOf(*Tier),
            "ranks": [int],
            "first_step": int,
            "onset_step": int,
            "last_step": int,
            "status": OneOf("open", "resolved", "gave_up"),
            "summary": str,
            "cause": str,
            "evidence": dict,
            "opened_at": TIME,
            "resolved_at": OneOf(None, TIME),
            "attempt": int,
            "generation": int,
            "actions": [ACTION],
        }
    ],
    "requests": [ACTION | {"requested_at": TIME}],
    "checkpoints": [
        {
            "step": int,
            "tier": OneOf("ram", "disk"),
            "quality": OneOf(*Quality),
            "verified": bool,
            "reason": str,
            "generation": int,
            "attempt": int,
            "kept": bool,
        }
    ],
    "goodput": {"useful_seconds": (int, float), "lost_seconds": (int, float), "ratio": MAYBE_NUMBER},
    "conservation": [
        {"rank": int, "produced": int, "stored": int, "dropped": int, "dropped_by_reason": dict, "in_flight": int}
    ],
}


def check(value: Any, wanted: Any, where: str = "report") -> None:
    if isinstance(wanted, dict):
        assert value.keys() == wanted.keys(), where
        for name in wanted:
            check(value[name], wanted[name], f"{where}.{name}")
    elif isinstance(wanted, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            check(item, wanted[0], f"{where}[{index}]")
    elif isinstance(wanted, OneOf):
        assert any(matches(value, choice) for choice in wanted.values), f"{where} is {value!r}"
    else:
        assert matches(value, wanted), f"{where} is {value!r}"


def matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, re.Pattern):
        return isinstance(value, str) and wanted.fullmatch(value) is not None
    if isinstance(wanted, type | tuple):
        return isinstance(value, wanted) and (bool in (wanted, type(value))) == (wanted is bool)
    return value == wanted


def report_of(store: Store, run_id: str = RUN) -> dict[str, Any]:
    with History(store.url) as history:
        return json.loads(dumps(report(history, run_id)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return rolled_back_run(tmp_path)


def test_a_report_has_exactly_the_keys_and_words_of_the_contract(store: Store) -> None:
    found = report_of(store)
    check(found, CONTRACT)
    assert all(found[name] for name in CONTRACT), "an empty list checks nothing"
    with pytest.raises(AssertionError, match="status"):
        check(found | {"run": found["run"] | {"status": "fine"}}, CONTRACT)


def test_a_rollback_is_told_with_its_steps_and_batches(store: Store) -> None:
    found = report_of(store)
    assert (found["run"]["steps"], found["run"]["generations"]) == (13, 2)
    (incident,) = found["incidents"]
    assert (incident["kind"], incident["first_step"], incident["onset_step"]) == ("loss_spike", 7, 6)
    assert (incident["opened_at"], incident["resolved_at"]) == (
        "2023-11-14T22:13:27.000Z",
        "2023-11-14T22:13:50.250Z",
    )
    rollback, nothing = incident["actions"]
    wanted = {"requested_step": 8, "applied_step": 9, "target_step": 4, "skipped_batches": 3, "outcome": "applied"}
    assert wanted.items() <= rollback.items()
    assert (nothing["action"], nothing["reason"], nothing["outcome"]) == ("none", "cooldown", None)


def test_what_a_person_asked_for_belongs_to_no_incident(store: Store) -> None:
    (request,) = report_of(store)["requests"]
    assert (request["action"], request["outcome"], request["reason"]) == ("pause", "refused", "requested")


def test_numbers_that_are_not_finite_are_null_with_the_word_beside_them(store: Store) -> None:
    (incident,) = report_of(store)["incidents"]
    assert incident["evidence"] == {
        "z": None,
        "losses": [2.0, None],
        "nonfinite": {"z": "inf", "losses[1]": "nan"},
    }


def test_goodput_counts_history_and_turns_as_lost(store: Store) -> None:
    goodput = report_of(store)["goodput"]
    assert goodput["useful_seconds"] == pytest.approx((4 + 9) * 0.5)
    assert goodput["lost_seconds"] == pytest.approx(4 * 0.5 + 0.25)
    assert goodput["ratio"] == pytest.approx(6.5 / 8.75)


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path / "new"))
    store.register_rank(hello(world_size=2), "box", START)
    found = report_of(store)
    check(found, CONTRACT)
    assert (found["run"]["status"], found["run"]["ended_at"], found["goodput"]["ratio"]) == ("running", None, None)


def test_a_checkpoint_is_as_good_as_its_worst_rank(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    for rank in (0, 1):
        store.register_rank(hello(rank=rank, nonce=f"n{rank}"), "box", START)
    store.write(entries(start(), snapshot(2, 10)), critical=True)
    bad = snapshot(1, 10, Quality.BAD, verified=False, reason="w is NaN")
    store.write(entries(bad, origin=Origin(RUN, 1, 1)), critical=True)
    (found,) = report_of(store)["checkpoints"]
    assert (found["quality"], found["verified"], found["reason"]) == ("BAD", False, "w is NaN")


def test_a_failed_run_says_which_rank_failed_first(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    for rank in (0, 1):
        origin = Origin(RUN, 1, rank)
        store.register_rank(hello(rank=rank, nonce=f"n{rank}"), "box", START)
        store.write(
            entries(RunEnd(1, START + 9 - rank, 0, 4, "failed", f"Error {rank}"), origin=origin), critical=True
        )
    store.end_run(RUN, RunStatus.FAILED, START + 10)
    assert report_of(store)["run"]["error"] == "rank 1: Error 1"


def test_conservation_is_over_all_attempts_of_a_rank(store: Store) -> None:
    store.register_rank(hello(nonce="n2", last_seq=5), "box", START)
    store.write(entries(start(), record(3, 14), origin=Origin(RUN, 2, 0)), critical=True)
    (books,) = report_of(store)["conservation"]
    assert (books["produced"], books["stored"], books["dropped"], books["in_flight"]) == (26, 23, 1, 2)


def test_times_are_rfc_3339_in_utc() -> None:
    assert rfc3339(0.25) == "1970-01-01T00:00:00.250Z"
    assert rfc3339(None) is None
