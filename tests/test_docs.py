"""The documents are true: their code runs, and what they name exists."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel import config
from sentinel.cli import COMMANDS
from sentinel.places import find
from sentinel.records import RunStart, StepRecord
from sentinel.sample import Sample
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Kind
from tests import generated_docs

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
STEPS = 8


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def names() -> dict[str, Any]:
    """What a reader of the README has already."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(STEPS * 4, 4), torch.randint(2, (STEPS * 4,)))
    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "loader": DataLoader(data, batch_size=4),
        "loss_function": nn.CrossEntropyLoss(),
    }


@pytest.mark.parametrize("code", blocks(README, "python"), ids=["first", "second"])
def test_the_loops_of_the_readme_train_and_are_seen(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SENTINEL_HOME": tmp_path / "home", "XDG_RUNTIME_DIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SENTINEL_DAEMON__AUTOSTART", "false")
    attached = []

    def attach(*arguments: Any, **more: Any) -> Any:
        attached.append(real(*arguments, **more))
        return attached[-1]

    real = sentinel.attach
    monkeypatch.setattr(sentinel, "attach", attach, raising=False)
    places = find({"SENTINEL_HOME": str(tmp_path / "home"), "XDG_RUNTIME_DIR": str(tmp_path)})
    with FakeDaemon(places.socket) as daemon:
        exec(compile(code, "README.md", "exec"), names())
        (run,) = attached
        assert run.step == STEPS
        run.detach()
        daemon.wait_for(lambda: len(daemon.of(StepRecord)) == STEPS)
        assert daemon.of(RunStart)
        assert daemon.errors == []


def test_the_first_loop_of_the_readme_has_two_lines_of_ours() -> None:
    lines = blocks(README, "python")[0].splitlines()
    assert len([line for line in lines if line.strip()]) <= 8
    assert len([line for line in lines if "sentinel" in line]) == 2


def test_console_blocks_name_commands_options_and_targets_that_exist() -> None:
    lines = [line for text in blocks(README, "console") for line in text.splitlines()]
    assert len(lines) >= 8
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in lines:
        assert line.startswith("$ "), line
        words = [word for word in shlex.split(line[2:]) if not re.match(r"[A-Z_]+=", word)]
        match words:
            case ["sentinel", command, *rest]:
                _check_command(command, rest)
            case ["make", target]:
                assert target in targets
            case ["pip", "install", what]:
                assert set(what.partition("[")[2].rstrip("]").split(",")) <= set(extras)
            case _:
                assert words == ["python", "train.py"], line


def test_environment_variables_in_the_readme_exist() -> None:
    for name in re.findall(r"SENTINEL_[A-Z_]*[A-Z]", README):
        if "__" in name:
            config.build(config.from_environment({name: "1"}))
        else:
            assert name in config.PLAIN_VARIABLES


@pytest.mark.parametrize("text", blocks(README, "toml"))
def test_settings_in_the_readme_are_valid(text: str) -> None:
    assert config.build(tomllib.loads(text)) != config.Settings()


def test_exit_codes_in_the_readme_are_those_of_the_commands() -> None:
    for code, meaning in generated_docs.exit_codes().items():
        assert f"| {code} | {meaning} |" in README


@pytest.mark.parametrize("name", generated_docs.PAGES)
def test_a_generated_document_is_what_the_code_says(name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == generated_docs.PAGES[name](), "run `make docs`"


def test_every_setting_says_what_it_is_for() -> None:
    rows = [(title, row) for title, _, rows in generated_docs.sections(config.Settings, "") for row in rows]
    assert len(rows) > 40
    assert [(title, row.key) for title, row in rows if not row.meaning] == []


def test_every_metric_named_in_a_document_exists() -> None:
    known = {family.name for family in generated_docs.families()}
    known |= {f"{family.name}_{part}" for family in generated_docs.families() for part in ("bucket", "sum", "count")}
    others = {"sentinel_hooks", *Kind}
    for path in [ROOT / "README.md", *DOCS]:
        found = set(re.findall(r"\bsentinel_[a-z_]+\b", path.read_text(encoding="utf-8")))
        assert found - known - others == set(), path.name


def test_every_word_of_the_closed_sets_is_explained() -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("glossary.md", "kinds.md"))
    missing = [word for words in generated_docs.closed_sets() for word in words if f"`{word}`" not in text]
    assert missing == []


def test_every_signal_of_a_record_is_defined() -> None:
    text = (ROOT / "docs" / "signals.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    defined = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    of_record = [name for name in StepRecord.__struct_fields__ if name != "sampled"]
    assert sorted(defined) == sorted([*of_record, *Sample.__struct_fields__])


def test_links_between_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS]:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (path.parent / link).exists(), f"{path.name}: {link}"


def test_documents_named_in_the_code_exist() -> None:
    for source in sorted((ROOT / "sentinel").rglob("*.py")):
        for name in re.findall(r"\bdocs/[\w/-]+\.md", source.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{source.relative_to(ROOT)} names {name}"


def test_decisions_are_numbered_without_holes_and_short() -> None:
    found = sorted((ROOT / "docs" / "decisions").iterdir())
    assert [path.name[:4] for path in found] == [f"{number:04}" for number in range(1, len(found) + 1)]
    for path in found:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith(f"# {int(path.name[:4])}. ")
        assert len(lines) <= 50, path.name


def _check_command(command: str, words: list[str]) -> None:
    known = generated_docs.parameters(COMMANDS[command])
    options = {name for one in known for name in one.name.split(", ") if name.startswith("-")}
    assert {word for word in words if word.startswith("-")} <= options, command
