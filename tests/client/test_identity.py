"""Which run it is, and where it comes from."""

import math
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum

import msgspec
import pytest

from sentinel import wire
from sentinel.client import environment, identity, plain
from sentinel.client.rank import ALONE, Rank
from sentinel.errors import MisuseError
from tests.client.test_outbox import run_start

TWO = Rank(0, 0, 2, 2)
PRINT_ID = """
import os
from sentinel.client.identity import resolve_run_id
from sentinel.client.rank import Rank
print(resolve_run_id(None, os.environ, Rank(0, 0, 2, 2)))
"""


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ("mine", {"SENTINEL_RUN_ID": "theirs", "TORCHELASTIC_RUN_ID": "job"}, "mine"),
        (None, {"SENTINEL_RUN_ID": "theirs", "TORCHELASTIC_RUN_ID": "job"}, "theirs"),
        (None, {"TORCHELASTIC_RUN_ID": "job"}, "job"),
    ],
)
def test_the_argument_beats_the_variable_beats_the_launcher(given, environ, expected) -> None:
    assert identity.resolve_run_id(given, environ, ALONE) == expected


def test_torchruns_none_is_no_id() -> None:
    first, second = (identity.resolve_run_id(None, {"TORCHELASTIC_RUN_ID": "none"}, ALONE) for _ in range(2))
    assert first != "none"
    assert first != second
    assert first[:4] == time.strftime("%Y", time.gmtime())


def test_a_launchers_odd_id_is_made_usable_and_stays_distinct() -> None:
    first = identity.resolve_run_id(None, {"TORCHELASTIC_RUN_ID": "job/1"}, ALONE)
    second = identity.resolve_run_id(None, {"TORCHELASTIC_RUN_ID": "job:1"}, ALONE)
    assert first.startswith("job-1-")
    assert first != second
    assert identity.check_run_id(first, "it") == first


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "..", "-", "x" * 65, "ü", 7])
def test_an_id_that_cannot_be_a_file_name_is_refused_with_the_rule(bad) -> None:
    with pytest.raises(MisuseError, match="1 to 64") as error:
        identity.resolve_run_id(bad, {}, ALONE)
    assert repr(bad) in str(error.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(MisuseError, match="SENTINEL_RUN_ID is 'a b'"):
        identity.resolve_run_id(None, {"SENTINEL_RUN_ID": "a b"}, ALONE)


def test_local_ranks_of_one_launcher_derive_the_same_id() -> None:
    found = {subprocess.check_output([sys.executable, "-c", PRINT_ID], text=True, cwd="/").strip() for _ in range(2)}
    assert len(found) == 1
    assert found != {identity.resolve_run_id(None, {}, TWO)}, "another parent is another job"


def test_two_jobs_of_one_parent_differ_by_their_port() -> None:
    first = identity.resolve_run_id(None, {"MASTER_PORT": "29500"}, TWO)
    assert first == identity.resolve_run_id(None, {"MASTER_PORT": "29500"}, TWO)
    assert first != identity.resolve_run_id(None, {"MASTER_PORT": "29501"}, TWO)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/x/train.py"], "train"),
        (["/x/job/__main__.py"], "job"),
        (["-c"], "python"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_the_name_is_the_scripts(argv, name) -> None:
    assert identity.default_name(argv) == name


def test_provenance_fits_a_run_start() -> None:
    found = identity.provenance({"lr": 0.1, "odd": object()})
    start = msgspec.structs.replace(run_start(), **found._asdict())
    assert wire.decode_from_rank(wire.encode(start)[4:]) == start
    assert found.packages["python"].startswith("3.")
    assert "msgspec" in found.packages
    assert found.host
    assert found.devices


def test_git_tells_commit_and_dirt(tmp_path) -> None:
    def git(*arguments: str) -> str:
        identity_of_author = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        return subprocess.check_output(["git", *identity_of_author, *arguments], cwd=tmp_path, text=True).strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    assert environment.git(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert environment.git(tmp_path)["dirty"] is True


def test_outside_a_repository_git_says_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.git(tmp_path) == {}


def test_a_git_that_hangs_costs_a_second_not_the_run(tmp_path, monkeypatch) -> None:
    fake = tmp_path / "git"
    fake.write_text('#!/bin/sh\ntouch "$0.ran"\nexec sleep 60\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(environment, "GIT_SECONDS", 0.3)
    began = time.monotonic()
    assert environment.git(tmp_path) == {}
    assert (tmp_path / "git.ran").exists()
    assert time.monotonic() - began < 10


class Colour(Enum):
    RED = "red"


@dataclass
class Nested:
    width: int
    api_key: str


def test_config_becomes_plain_data() -> None:
    found = plain.data(
        {"lr": 0.1, "colour": Colour.RED, "shape": (1, 2), "model": Nested(8, "k"), 3: None, "big": 2**70}, 1 << 16
    )
    assert found == {
        "lr": 0.1,
        "colour": "red",
        "shape": [1, 2],
        "model": {"width": 8, "api_key": "***"},
        "3": None,
        "big": str(2**70),
    }


def test_nan_and_infinity_stay() -> None:
    found = plain.data({"a": math.nan, "b": math.inf}, 1 << 16)
    assert math.isnan(found["a"])
    assert found["b"] == math.inf


@pytest.mark.parametrize("key", ["token", "HF_TOKEN", "password", "aws_secret", "api_key", "API-KEY", "wandb.apikey"])
def test_secrets_are_hidden(key) -> None:
    assert plain.data({key: "hunter2", "inner": {key: "hunter2"}}, 1 << 16) == {key: "***", "inner": {key: "***"}}
    assert "hunter2" not in " ".join(plain.argv(["t.py", f"--{key}=hunter2", f"--{key}", "hunter2"], 1 << 14))


@pytest.mark.parametrize("key", ["max_tokens", "tokens_per_batch", "tokenizer", "pad_token", "token_count"])
def test_a_models_tokens_are_no_secrets(key) -> None:
    assert plain.data({key: 5}, 1 << 16) == {key: 5}


def test_an_option_after_a_secret_flag_is_not_hidden() -> None:
    assert plain.argv(["t.py", "--use-token", "--lr", "0.1"], 1 << 14) == ["t.py", "--use-token", "--lr", "0.1"]


def test_depth_and_size_are_bounded() -> None:
    loop: dict = {}
    loop["self"] = loop
    endless = plain.data({"loop": loop, "text": "x" * 10**6, "list": list(range(10**5))}, 1 << 16)
    assert len(msgspec.msgpack.encode(endless)) < 1 << 16
    many = plain.data({f"key{number}": "x" * 1000 for number in range(900)}, 1 << 16)
    assert "(cut)" in many.values()
    assert len(msgspec.msgpack.encode(many)) < (1 << 16) + 100
    words = plain.argv(["word" * 100] * 1000, 1 << 14)
    assert words[-1] == "(cut)"
    assert sum(map(len, words)) <= 1 << 14


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_nothing_a_user_hands_over_raises_or_cannot_be_sent() -> None:
    found = plain.data({"a": Hostile(), "b": "\ud800", "c": {Hostile(): b"\xff"}, "d": {1, 2}}, 1 << 16)
    assert found["a"] == "<Hostile>"
    wire.encode(msgspec.structs.replace(run_start(), config=found, argv=plain.argv(["\udcff"], 99)))
    assert found["d"] == [1, 2]
