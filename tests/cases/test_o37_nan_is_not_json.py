"""O37: bare NaN breaks every strict reader, so whatever we print as JSON has null and the word beside it."""

import json
import math
from pathlib import Path

import pytest

from sentinel.cli import main
from tests.store.building import RUN, entries, record, rolled_back_run

ODD = {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "reported": {"score": math.nan}}


def test_the_danger_is_real_with_the_standard_writer() -> None:
    with pytest.raises(ValueError, match="NaN"):
        json.loads(json.dumps(ODD), parse_constant=lambda word: (_ for _ in ()).throw(ValueError(word)))


@pytest.mark.parametrize("line", [["postmortem", "--json"], ["runs", "--json"], ["export", RUN, "--format", "jsonl"]])
def test_every_json_of_the_command_line_is_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    store = rolled_back_run(tmp_path)
    store.write(entries(record(22, 14, 1, **ODD)), critical=True)
    assert main([*line, "--home", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    documents = text.splitlines() if "export" in line else [text]
    found = [
        json.loads(document, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) for document in documents
    ]
    assert found
    if "export" in line:
        assert found[-1]["nonfinite"] == {"loss": "nan", "grad_norm": "inf", "lr": "-inf"}
        assert found[-1]["reported"] == {"score": None, "nonfinite": "nan"}
        assert all(found[-1][name] is None for name in ("loss", "grad_norm", "lr"))
