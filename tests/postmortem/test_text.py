"""The text tells a person the same as the report, in fewer words."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from sentinel.postmortem.report import report
from sentinel.postmortem.text import show
from sentinel.postmortem.wording import action_line, duration, grouped_actions, sentences
from sentinel.store.history import History
from sentinel.vocabulary import Action, Outcome, Quality
from tests.store.building import RUN, START, entries, incident, rolled_back_run, snapshot


def action(**other: object) -> dict:
    fields = {"reason": "confirmed", "requested_step": 8, "applied_step": 9, "target_step": None, "text": ""}
    return fields | {"skipped_batches": None, "outcome": "applied", "seconds": None} | other


def text_of(folder: Path, width: int = 110) -> str:
    out = io.StringIO()
    with History(f"sqlite:///{folder / 'sentinel.db'}") as history:
        show(report(history, RUN), history.place, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_the_text_names_what_happened_what_was_done_and_what_it_cost(tmp_path: Path) -> None:
    rolled_back_run(tmp_path)
    text = text_of(tmp_path)
    for part in (
        "Loss spike at step 7 (it began at 6): the run was rolled back to step 4, skipping 3 batches",
        "the loss jumped to 9.1",
        "poisoned data",
        "pause was refused",
        "Goodput 74.3% (6.50 s useful, 2.25 s lost)",
        "rank 0: 21 produced = 21 stored + 0 dropped  balances",
        f"Database {tmp_path / 'sentinel.db'}",
        f"sentinel postmortem {RUN}",
    ):
        assert part in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal_but_the_path(tmp_path: Path, width: int) -> None:
    rolled_back_run(tmp_path)
    lines = text_of(tmp_path, width).splitlines()
    assert max(len(line) for line in lines if not line.startswith("Database")) <= width


def test_many_checkpoints_are_cut_to_the_newest_and_the_rest_counted(tmp_path: Path) -> None:
    store = rolled_back_run(tmp_path)
    notes = [snapshot(22 + number, 100 + number, Quality.PENDING, generation=1) for number in range(20)]
    store.write(entries(*notes), critical=False)
    text = text_of(tmp_path)
    assert "the newest 12; 10 older ones in --json" in text
    assert "119" in text


def test_a_name_with_brackets_is_printed_as_it_is(tmp_path: Path) -> None:
    store = rolled_back_run(tmp_path)
    store.save_incident(incident(summary="[bold]x[/bold]", opened_at=START))
    assert "[bold]x[/bold]" in text_of(tmp_path)


def test_equal_actions_in_a_row_are_one_line() -> None:
    skips = [action(action="skip_update", reason="reflex", requested_step=step) for step in (5, 6, 7)]
    assert grouped_actions([*skips, action(action="rollback", target_step=4)]) == [
        "the update was skipped 3 times, steps 5 to 7 (reflex)",
        "the run was rolled back to step 4 (confirmed)",
    ]


@pytest.mark.parametrize("name", Action)
@pytest.mark.parametrize("outcome", [None, *Outcome])
def test_every_action_and_outcome_has_words(name: Action, outcome: Outcome | None) -> None:
    line = action_line(action(action=name, outcome=outcome))
    assert line.endswith("(confirmed)")
    if outcome is Outcome.FAILED:
        assert "failed" in line


def test_an_incident_without_an_action_says_so() -> None:
    incident = {"kind": "oom", "onset_step": 3, "first_step": 3, "actions": [action(action="none", outcome=None)]}
    assert sentences(incident) == "OOM at step 3: nothing was done."


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "unknown"), (0.25, "0.25 s"), (42.0, "42.0 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 05 min")],
)
def test_durations_are_short(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words
