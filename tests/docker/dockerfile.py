"""Carry out a Dockerfile without an engine: RUN, COPY and ENV in a virtual environment and folder of their own."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from tests.conftest import missing

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile"
CONTEXT = FILE.with_name("Dockerfile.dockerignore")
USER = "65532"  # of the image; here its files belong to whoever runs the test
INSIDE = ("/source", "/wheels", "/var/lib/sentinel")  # every absolute path that the file names


class Instruction(NamedTuple):
    """One of the file, with its lines joined."""

    word: str
    rest: str


def instructions() -> list[Instruction]:
    text = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    parts = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [Instruction(word, rest.strip()) for word, _, rest in parts]


def only(word: str) -> str:
    """What the one instruction of this kind says."""
    (found,) = (each.rest for each in instructions() if each.word == word)
    return found


class Image:
    """What the Dockerfile makes, in `folder`. Its commands run with the `python` and `sentinel` of `folder`/venv."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
        self.environ |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self._work = folder
        for instruction in instructions():
            self._do(*instruction)

    def run(self, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """A command inside."""
        return subprocess.run(
            words, cwd=self.folder, env=self.environ | variables, capture_output=True, text=True, check=False
        )

    def command(self, word: str) -> list[str]:
        """CMD, or that of HEALTHCHECK, as a list."""
        words: list[str] = json.loads(only(word).partition("CMD ")[2] if word == "HEALTHCHECK" else only(word))
        return words

    def _do(self, word: str, rest: str) -> None:
        match word:
            case "FROM":
                self._stage(rest.partition(" AS ")[2])
            case "WORKDIR":
                self._work = Path(self._here(rest))
                self._work.mkdir(parents=True)
            case "COPY":
                self._copy(rest)
            case "RUN":
                self._shell(self._here(rest))
            case "ENV":
                self.environ |= dict(pair.split("=", 1) for pair in shlex.split(self._here(rest)))

    def _stage(self, name: str) -> None:
        """Every stage starts from a fresh Python."""
        place = self.folder / f"venv-{name or 'last'}"
        venv.create(place, with_pip=True)
        outside = [part for part in os.environ["PATH"].split(":") if not part.startswith(sys.prefix)]
        self.environ["PATH"] = ":".join([str(place / "bin"), *outside])
        self._work = self.folder

    def _copy(self, rest: str) -> None:
        if rest.startswith("--from="):
            _, source, target = rest.split()
            assert Path(self._here(source)).is_dir()
            assert source == target, "here both stages see the same folder"
            return
        assert rest == ". ."
        for name in (line[1:] for line in CONTEXT.read_text().splitlines() if line.startswith("!")):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self._work / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, self._work / name)

    def _shell(self, command: str) -> None:
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=self._work, env=self.environ, capture_output=True, text=True, check=False
        )
        if "No matching distribution found" in done.stderr and "Retrying" in done.stderr:
            missing("no package index can be reached")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def _here(self, text: str) -> str:
        for path in INSIDE:
            text = re.sub(rf"(?<![\w.]){re.escape(path)}\b", f"{self.folder}{path}", text)
        return text.replace(f"-o {USER} -g {USER}", f"-o {os.getuid()} -g {os.getgid()}")
