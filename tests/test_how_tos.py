"""The how-tos are true: their loops train, their settings are settings, their commands exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from sentinel import config
from sentinel.cli import COMMANDS
from sentinel.testing import FakeDaemon
from tests.generated_docs import parameters
from tests.test_docs import ROOT, STEPS, blocks, names

PAGES = [*sorted((ROOT / "docs").glob("how-to-*.md")), ROOT / "docker" / "README.md"]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in PAGES}
LOOPS = blocks(TEXTS["how-to-attach.md"], "python")


@pytest.mark.parametrize("code", LOOPS, ids=range(len(LOOPS)))
def test_the_code_of_how_to_attach_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SENTINEL_DAEMON__AUTOSTART", "false")
    known = names()
    exec(compile(code, "how-to-attach.md", "exec"), known)
    if "run" in known:
        assert known["run"].step == STEPS
        known["run"].detach()
    else:
        assert isinstance(known["daemon"], FakeDaemon)


@pytest.mark.parametrize("page", TEXTS)
def test_settings_are_settings(page: str) -> None:
    for text in blocks(TEXTS[page], "toml"):
        assert config.build(tomllib.loads(text)) != config.Settings()
    for name in re.findall(r"\bSENTINEL_[A-Z_]*[A-Z]", TEXTS[page]):
        if "__" in name:
            value = "http://localhost" if name.endswith("URL") else "false" if name.endswith("AUTOSTART") else "x"
            config.build(config.from_environment({name: value}))
        else:
            assert name in {*config.PLAIN_VARIABLES, "SENTINEL_UID", "SENTINEL_GID", "SENTINEL_RUNTIME"}, name


def test_commands_and_their_options_exist() -> None:
    lines = [line[2:] for text in TEXTS.values() for block in blocks(text, "console") for line in block.splitlines()]
    ours = [words for words in map(_words, lines) if words and words[0] == "sentinel"]
    assert len(ours) >= 8
    for _, command, *rest in ours:
        known = {name for one in parameters(COMMANDS[command]) for name in one.name.split(", ")}
        assert {word for word in rest if word.startswith("-")} <= known, f"{command} {rest}"


def _words(line: str) -> list[str]:
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    # In a container the command comes after the name of the service.
    return words[words.index("exec") + 2 :] if words[:2] == ["docker", "compose"] and "exec" in words else words
