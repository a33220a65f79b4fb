"""`sentinel dashboards`: what it writes, what it refuses, and that an installed wheel can do it too."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pytest_httpserver import HTTPServer

from sentinel.cli import main
from sentinel.cli.dashboards import FILES
from sentinel.vocabulary import Action, Outcome
from tests.conftest import missing
from tests.dashboards import expressions
from tests.dashboards.grafana_contract import TOKEN, GrafanaContract
from tests.store.building import RUN, rolled_back_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    store = rolled_back_run(tmp_path / "home")
    yield tmp_path / "home"
    store.close()


def test_render_writes_every_file_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "grafana"
    assert main(["dashboards", "render", "--out", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"folder": str(folder), "files": [str(folder / name) for name in FILES]}
    for name in FILES:
        assert (folder / name).read_bytes() == (expressions.FOLDER / name).read_bytes()


def test_render_again_replaces_what_was_changed(tmp_path: Path) -> None:
    assert main(["dashboards", "render", "--out", str(tmp_path)]) == 0
    (tmp_path / "run.json").write_text("{}")
    assert main(["dashboards", "render", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "run.json").read_bytes() == (expressions.FOLDER / "run.json").read_bytes()


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["dashboards", "render", "--out", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["render", "--url", "http://a"], "--url 'http://a' says nothing to render"),
        (["push", "--out", "x"], "--out 'x' says nothing to push"),
        (["push", "latest"], "RUN 'latest' says nothing to push"),
        (["annotate", "--folder", "x"], "--folder 'x' says nothing to annotate"),
        (["push"], "--url http://localhost:3000 --token-file FILE"),
        (["annotate", "--url", "http://a"], "--url http://localhost:3000 --token-file FILE"),
    ],
)
def test_wrong_usage_says_what_to_do(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", *words]) == 2
    assert said in capsys.readouterr().err


def test_annotate_tells_grafana_of_a_runs_incidents_once(
    home: Path, httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = GrafanaContract(httpserver)
    token = home / "token"
    token.write_text(TOKEN)
    words = ["dashboards", "annotate", RUN, "--url", contract.url, "--token-file", str(token), "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["run_id"] == RUN
    assert set(said["changes"].values()) == {"created"}
    assert main(words) == 0
    assert set(json.loads(capsys.readouterr().out)["changes"].values()) == {"unchanged"}
    (stored,) = contract.annotations
    assert stored["tags"][:3] == ["sentinel", RUN, next(iter(said["changes"]))]
    assert f"{Action.ROLLBACK} {Outcome.APPLIED}" in stored["text"]
    assert stored["timeEnd"] >= stored["time"] > 0


def test_a_run_that_does_not_exist_is_said_so(home: Path) -> None:
    (home / "token").write_text(TOKEN)
    words = ["--url", "http://127.0.0.1:9", "--token-file", str(home / "token")]
    assert main(["dashboards", "annotate", "nobody", *words]) == 4


def test_provisioning_and_rules_fit_together() -> None:
    def read(name: str) -> dict:
        return yaml.safe_load((expressions.FOLDER / "provisioning" / name).read_text())

    (source,) = read("datasources/sentinel.yml")["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = read("dashboards/sentinel.yml")["providers"]
    assert provider["type"] == "file"
    scrape = read("prometheus/sentinel.yml")
    assert [Path(path).name for path in scrape["rule_files"]] == ["rules.yml"]
    (job,) = scrape["scrape_configs"]
    (down,) = [rule for rule in expressions.rules() if rule["alert"] == "SentinelDaemonDown"]
    assert f'job="{job["job_name"]}"' in down["expr"]


def test_the_wheel_is_told_to_carry_every_file() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    carried = wheel["force-include"]
    for name in FILES:
        there = [source for source in carried if f"dashboards/{name}".startswith(source)]
        assert len(there) == 1, name
        assert carried[there[0]] == there[0].replace("dashboards/", "sentinel/_dashboards/", 1)


@pytest.mark.service
def test_an_unpacked_wheel_renders_without_the_repository(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution found for hatchling" in built.stderr:
        missing("no package index can be reached for hatchling")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    asked = "import sentinel, sys; from sentinel.cli import main; print(sentinel.__file__); "
    asked += "sys.exit(main(['dashboards', 'render', '--out', 'out']))"
    rendered = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert rendered.returncode == 0, rendered.stderr
    assert rendered.stdout.startswith(str(tmp_path / "site")), "it was not the wheel's code that ran"
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (expressions.FOLDER / name).read_bytes()
