"""The extras of the frameworks bring the framework and leave torch alone."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CONSTRAINT = next(
    Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
)


@pytest.mark.parametrize("extra", ["transformers", "lightning"])
def test_every_package_of_the_extra_is_content_with_the_constrained_torch(extra: str) -> None:
    assert version("torch").partition("+")[0] in CONSTRAINT.specifier
    asking = [
        (name, wish)
        for name in sorted(needed_by(EXTRAS[extra]))
        for wish in requirements_of(name)
        if wish.name == "torch"
    ]
    assert asking, "no package of the extra asks for torch: this test looks in the wrong place"
    for name, wish in asking:
        assert wish.specifier.contains(version("torch").partition("+")[0]), (name, str(wish))


@pytest.mark.service
@pytest.mark.parametrize("extra", ["transformers", "lightning"])
def test_pip_would_install_nothing_more_under_the_constraint(extra: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check"]
    command += ["--report", "-", "-c", str(ROOT / "constraints.txt"), *EXTRAS[extra]]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [one["metadata"]["name"] for one in json.loads(told.stdout)["install"]] == []


def test_without_the_framework_the_package_still_imports() -> None:
    script = "import sys, sentinel_hooks, sentinel_hooks.attachment; print(*sorted(sys.modules))"
    loaded = set(subprocess.check_output([sys.executable, "-c", script], text=True).split())
    assert "sentinel_hooks.attachment" in loaded
    assert not loaded & {"transformers", "lightning", "accelerate"}


def needed_by(wishes: list[str]) -> set[str]:
    """The names of what is installed because of these requirements, torch itself left out."""
    found: set[str] = set()
    waiting = [Requirement(wish).name for wish in wishes]
    while waiting:
        name = waiting.pop()
        if name in found or name == "torch":
            continue
        found.add(name)
        waiting += [wish.name for wish in requirements_of(name)]
    return found


def requirements_of(name: str) -> list[Requirement]:
    """Those that hold here, without extras."""
    wishes = [Requirement(text) for text in distribution(name).requires or []]
    return [wish for wish in wishes if wish.marker is None or wish.marker.evaluate({"extra": ""})]
