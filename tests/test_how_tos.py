"""The how-tos are true: their loops train, their settings are settings, their commands exist."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from sentinel import config
from sentinel.cli import COMMANDS
from sentinel.places import find
from sentinel.records import RunEnd, RunStart
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action
from tests.generated_docs import parameters
from tests.test_docs import ROOT, STEPS, blocks, names
from tests.waiting import until

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


(UNTIL_STOPPED,) = [code for code in LOOPS if "on_stop" in code]


def test_the_loop_with_an_end_of_its_own_breaks_when_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _attached_in(tmp_path, monkeypatch) as daemon:
        known = _that_stops(daemon, apply_at=3)
        exec(compile(UNTIL_STOPPED, "how-to-attach.md", "exec"), known)
        assert known["stop_reasons"] == ["enough"]
        assert known["run"].step < STEPS
        assert daemon.wait_for(lambda: daemon.of(RunEnd))[0].status == "completed"


def test_the_loop_that_catches_its_exception_ends_its_run_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_given: Any) -> None:
        raise RuntimeError("bad batch")

    with _attached_in(tmp_path, monkeypatch) as daemon:
        exec(compile(UNTIL_STOPPED, "how-to-attach.md", "exec"), {**names(), "loss_function": fail})
        assert "training ended: bad batch" in capsys.readouterr().out
        end = daemon.wait_for(lambda: daemon.of(RunEnd))[0]
        assert (end.status, "bad batch" in end.error) == ("failed", True)


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


def _attached_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    """The daemon that a run attached from now on finds."""
    for name, value in {"SENTINEL_HOME": folder / "home", "XDG_RUNTIME_DIR": folder}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SENTINEL_DAEMON__AUTOSTART", "false")
    return FakeDaemon(find({"SENTINEL_HOME": str(folder / "home"), "XDG_RUNTIME_DIR": str(folder)}).socket)


def _that_stops(daemon: FakeDaemon, apply_at: int) -> dict[str, Any]:
    """What a reader has, with a loader that has the run stopped while it yields its second batch."""
    known = names()
    loader = known["loader"]

    def stopping() -> Iterator[Any]:
        for number, batch in enumerate(loader, 1):
            if number == 2:
                daemon.wait_for(lambda: daemon.of(RunStart))
                command = daemon.command(Action.STOP, apply_at=apply_at, reason="enough")
                Thread(target=lambda: daemon.turn(command), daemon=True).start()
                until(lambda: known["run"]._inbox.turn, 10.0, "the command has arrived")
            yield batch

    known["loader"] = stopping()
    return known
