"""`runs`, `postmortem` and `export`: what they print, how they exit, and what they load."""

import csv
import io
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel import places
from sentinel.cli import COMMANDS, EXIT_CODES, main
from sentinel.errors import DaemonRunningError, MisuseError, NoDaemonError, NoSuchRunError, SchemaTooNewError
from tests.store.building import RUN, entries, record, rolled_back_run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in [name for name in os.environ if name.startswith("SENTINEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    store = rolled_back_run(tmp_path)
    odd = record(22, 14, 1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, reported={"accuracy": math.nan})
    store.write(entries(odd), critical=True)
    yield tmp_path
    store.close()


def strict(text: str) -> object:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_postmortem_prints_the_latest_run_as_text_or_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["postmortem"]) == 0
    assert "rolled back to step 4" in capsys.readouterr().out
    assert main(["postmortem", RUN[:4], "--json"]) == 0
    assert strict(capsys.readouterr().out)["run"]["run_id"] == RUN


def test_runs_lists_every_run_and_no_address_without_a_daemon(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "targets.json").write_text('[{"targets": ["127.0.0.1:9477"], "labels": {}}]')
    assert main(["runs", "--json"]) == 0
    (run,) = strict(capsys.readouterr().out)
    wanted = {
        "run_id": RUN,
        "name": "gpt",
        "status": "completed",
        "steps": 14,
        "attempts": 1,
        "host": "box",
        "url": None,
    }
    assert wanted.items() <= run.items()
    assert main(["runs"]) == 0
    assert RUN in capsys.readouterr().out


def test_runs_tells_the_address_while_a_daemon_listens(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "targets.json").write_text('[{"targets": ["127.0.0.1:9477"], "labels": {}}]')
    path = places.find(os.environ).socket
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        daemon.bind(str(path))
        try:
            daemon.listen(1)
            assert main(["runs", "--json"]) == 0
        finally:
            path.unlink()
    assert strict(capsys.readouterr().out)[0]["url"] == "http://127.0.0.1:9477"


def test_no_run_at_all_is_an_empty_list_but_not_a_postmortem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--json", "--home", str(tmp_path / "empty")]) == 0
    assert strict(capsys.readouterr().out) == []
    assert main(["postmortem", "--home", str(tmp_path / "empty")]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_an_unknown_run_exits_with_4_and_says_which_there_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["postmortem", "nonesuch", "--json"]) == 4
    captured = capsys.readouterr()
    assert strict(captured.out)["error"]["code"] == 4
    assert RUN in captured.err


@pytest.mark.parametrize(
    "line", [["postmortem", "--nonsense"], ["nonsense"], ["export"], ["export", "x", "--format", "x"]]
)
def test_wrong_usage_exits_with_2(home: Path, line: list[str]) -> None:
    assert main(line) == 2


def test_a_wrong_setting_exits_with_2(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_STORE__URL", '"nonsense"')
    assert main(["runs"]) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(MisuseError, 2), (DaemonRunningError, 3), (NoSuchRunError, 4), (NoDaemonError, 5), (SchemaTooNewError, 1)],
)
def test_each_kind_of_error_has_its_exit_code(error: type, code: int) -> None:
    assert next(number for kind, number in EXIT_CODES if issubclass(error, kind)) == code


def test_csv_parses_back_with_blank_for_absent_and_words_for_nonfinite(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "latest", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 18
    last = rows[-1]
    assert (last["loss"], last["grad_norm"], last["lr"], last["tokens"]) == ("nan", "inf", "-inf", "")
    assert math.isnan(float(last["loss"]))
    assert strict(last["reported"]) == {"accuracy": None, "nonfinite": "nan"}
    assert [row["step"] for row in rows if row["live"] == "false"] == ["5", "6", "7", "8"]


def test_jsonl_parses_back_with_every_signal_and_only_live_rows_if_asked(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", RUN, "--live-only"]) == 0
    rows = [strict(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert rows[-1]["nonfinite"] == {"loss": "nan", "grad_norm": "inf", "lr": "-inf"}
    assert rows[0].keys() >= {"run_id", "attempt", "generation", "rank", "step", "grad_norm", "data_position", "live"}


def test_export_to_a_file_says_how_many_records(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home / "out.csv"
    assert main(["export", RUN, "--format", "csv", "--output", str(file), "--json"]) == 0
    assert strict(capsys.readouterr().out) == {"run_id": RUN, "records": 18, "file": str(file)}
    assert len(file.read_text().splitlines()) == 19
    assert main(["export", RUN, "--output", str(home / "no" / "folder")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_causes_no_noise(tmp_path: Path) -> None:
    store = rolled_back_run(tmp_path)
    store.write(entries(*(record(seq, seq, 1) for seq in range(22, 2500))), critical=False)  # more than a pipe holds
    line = [sys.executable, "-m", "sentinel.cli", "export", RUN, "--format", "csv", "--home", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdout.readline().startswith("run_id,")
        exporter.stdout.close()
        assert exporter.wait(30) in {0, 1}
        assert exporter.stderr.read() == ""


def test_a_command_loads_neither_the_others_nor_torch(home: Path) -> None:
    script = (
        "import sys; from sentinel.cli import main; code = main(sys.argv[1:]);"
        "print(code, [name for name in ['torch', 'sqlalchemy', 'sentinel.postmortem.report',"
        " 'sentinel.cli.export', 'sentinel.daemon'] if name in sys.modules])"
    )

    def loaded(*line: str) -> str:
        command = [sys.executable, "-c", script, *line]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]

    assert loaded("--help") == "0 []"
    assert loaded("postmortem", "--help") == "0 []"
    assert loaded("postmortem") == "0 ['sqlalchemy', 'sentinel.postmortem.report']"


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["runs"]) == 1
    assert "pip install 'train-sentinel[daemon]'" in capsys.readouterr().err


def test_without_torch_the_demo_asks_for_its_extra(home: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from sentinel.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "demo", "--out", str(home / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "torch is not installed; pip install 'train-sentinel[torch]'" in done.stderr


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sentinel ")
