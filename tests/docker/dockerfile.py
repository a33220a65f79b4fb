"""Carry out a Dockerfile without an engine: each stage in a folder of its own, which stands for its root."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.conftest import missing, require_service

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile"
IGNORED = FILE.with_name("Dockerfile.dockerignore")
# They say how a container is to be run; whoever starts one here asks `only`, `health` or `Image` for them.
DECLARED = {"CMD", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "USER"}


class Instruction(NamedTuple):
    """One of the file, with its lines joined."""

    word: str
    rest: str


class Health(NamedTuple):
    """HEALTHCHECK."""

    words: list[str]
    interval_seconds: float
    timeout_seconds: float
    start_period_seconds: float
    retries: int

    @property
    def unhealthy_after_seconds(self) -> float:
        return self.start_period_seconds + self.retries * (self.interval_seconds + self.timeout_seconds)


def instructions() -> list[Instruction]:
    text = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    parts = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [Instruction(word, rest.strip()) for word, _, rest in parts]


def only(word: str) -> str:
    """What the one instruction of this kind says."""
    (found,) = (each.rest for each in instructions() if each.word == word)
    return found


def health() -> Health:
    options, _, command = only("HEALTHCHECK").partition("CMD ")
    given = dict(re.findall(r"--([a-z-]+)=(\d+)s?(?= )", options))
    found = Health(
        words=json.loads(command),
        interval_seconds=float(given.pop("interval")),
        timeout_seconds=float(given.pop("timeout")),
        start_period_seconds=float(given.pop("start-period")),
        retries=int(given.pop("retries")),
    )
    assert not given, f"options that are not understood: {given}"
    return found


class Image:
    """What the Dockerfile makes. `root` stands for the container's /, and the Python of the base image is a virtual
    environment at its usr/local. Absolute paths in instructions are taken as below `root`.

    Commands run as the image's USER, in a user namespace where nobody else exists: without capabilities, without a
    name or a home, and without write access to what was installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unshare = require_service("unshare")
        self._stages: list[Path] = []
        for instruction in instructions():
            self._do(*instruction)
        self.root = self._stages[-1]
        for stage in self._stages[:-1]:  # an image holds its last stage only
            shutil.rmtree(stage)
        subprocess.run(["chmod", "-R", "a-w", str(self.root / "usr")], check=True)
        if (done := self.run(["true"])).returncode:
            missing(f"no user namespace can be made: {done.stderr}")

    def run(
        self, words: Sequence[str], variables: Mapping[str, str] | None = None, timeout_seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """A command inside."""
        return subprocess.run(
            [*self._inside(), *words],
            cwd=self.root,
            env=self._environ | dict(variables or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )

    def start(self, log: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """CMD, as `docker run` starts it; stderr goes to `log`."""
        words = [*self._inside(), *json.loads(only("CMD"))]
        with log.open("w") as errors:
            return subprocess.Popen(
                words,
                cwd=self.root,
                env=self._environ | dict(variables),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def _inside(self) -> list[str]:
        user, _, group = only("USER").partition(":")
        return [self._unshare, "--user", f"--map-user={user}", f"--map-group={group}", "--"]

    def _do(self, word: str, rest: str) -> None:
        match word:
            case "FROM":
                self._stage(rest.partition(" AS ")[2] or "last")
            case "WORKDIR":
                self._work = Path(self._here(rest))
                self._work.mkdir(parents=True)
            case "COPY":
                self._copy(rest)
            case "RUN":
                self._shell(self._here(rest))
            case "ENV":
                self._environ |= dict(pair.split("=", 1) for pair in shlex.split(self._here(rest)))
            case _:
                assert word in DECLARED, f"{word} is not understood here: teach tests/docker/dockerfile.py to do it"

    def _stage(self, name: str) -> None:
        """Every stage starts from a fresh Python, and with nothing in its environment from the one before."""
        stage = self._folder / name
        for directory in ("tmp", "var/lib"):
            (stage / directory).mkdir(parents=True)
        venv.create(stage / "usr" / "local", with_pip=True)
        outside = [part for part in os.environ["PATH"].split(":") if not part.startswith(sys.prefix)]
        self._environ = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self._environ |= {"PATH": ":".join([str(stage / "usr/local/bin"), *outside]), "LANG": "C.UTF-8"}
        self._environ |= {"HOME": "/", "TMPDIR": str(stage / "tmp")}  # Docker's HOME of a user without a name
        self._stages.append(stage)
        self._work = stage

    def _copy(self, rest: str) -> None:
        *source, target = rest.split()
        if source[0].startswith("--from="):
            stage, folder = source
            shutil.copytree(f"{self._folder / stage.removeprefix('--from=')}{folder}", self._here(target))
            return
        assert (source, target) == (["."], "."), rest
        for path in context():
            if path.is_dir():
                shutil.copytree(path, self._work / path.name, ignore=shutil.ignore_patterns(*ignored_names()))
            else:
                shutil.copy(path, self._work / path.name)

    def _shell(self, command: str) -> None:
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=self._work, env=self._environ, capture_output=True, text=True, check=False
        )
        if "No matching distribution found" in done.stderr and "Retrying" in done.stderr:
            missing("no package index can be reached")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def _here(self, text: str) -> str:
        """Its absolute paths below the stage; and USER replaced by whoever runs this, whom `run` shows as USER."""
        user, _, group = only("USER").partition(":")
        text = text.replace(f"-o {user} -g {group}", f"-o {os.getuid()} -g {os.getgid()}")
        return re.sub(r"(?<![\w.:/$)}\]*-])/(?=\w)", f"{self._stages[-1]}/", text)


def context() -> list[Path]:
    """What the build may see: everything is ignored but the names after an exclamation mark."""
    patterns = _patterns()
    assert patterns[0] == "**", "the context begins empty"
    return [ROOT / pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]


def ignored_names() -> list[str]:
    """And of these not what is called so, at any depth."""
    rest = [pattern for pattern in _patterns()[1:] if not pattern.startswith("!")]
    assert all(re.fullmatch(r"\*\*/\w+", pattern) for pattern in rest), f"not understood: {rest}"
    return [pattern.removeprefix("**/") for pattern in rest]


def _patterns() -> list[str]:
    return [line for line in IGNORED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
