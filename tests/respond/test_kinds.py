"""The table of kinds and its document."""

from pathlib import Path

from sentinel.respond import kinds
from sentinel.vocabulary import Action, Kind

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kinds.md"


def test_the_document_is_the_table():
    assert DOCUMENT.read_text(encoding="utf-8") == kinds.document()


def test_every_ladder_ends_with_a_person():
    assert {row.ladder[-1] for row in kinds.TABLE} == {Action.PAUSE}


def test_a_kind_that_is_not_listed_causes_nothing():
    assert kinds.row(Kind.GPU_FAULT).ladder == ()
    assert len({row.kind for row in kinds.TABLE}) == len(kinds.TABLE)
