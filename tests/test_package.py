"""What is in the wheel, and what an installation gets."""

import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import sentinel
from tests.conftest import missing

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a user's pip would; the build back-end comes from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution found for hatchling" in built.stderr:
        missing("no package index can be reached for hatchling")
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.service
def test_the_wheel_carries_both_packages_their_types_and_the_migrations(names: list[str]) -> None:
    wanted = {
        "sentinel/__init__.py",
        "sentinel/py.typed",
        "sentinel/postmortem/page/page.css",
        "sentinel/postmortem/page/page.js",
        "sentinel/client/attach.py",
        "sentinel/_dashboards/run.json",
        "sentinel/_dashboards/machine.json",
        "sentinel/_dashboards/sentinel.json",
        "sentinel/_dashboards/rules.yml",
        "sentinel/_dashboards/provisioning/dashboards/sentinel.yml",
        "sentinel/store/migrations/env.py",
        "sentinel/store/migrations/versions/v0001_first.py",
        "sentinel_hooks/__init__.py",
        "sentinel_hooks/py.typed",
    }
    assert wanted - set(names) == set()


@pytest.mark.service
def test_every_module_of_the_source_is_in_the_wheel(names: list[str]) -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sentinel").rglob("*.py")}
    assert sources - set(names) == set()


@pytest.mark.service
def test_the_wheel_carries_nothing_else(names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"sentinel", "sentinel_hooks", f"train_sentinel-{sentinel.__version__}.dist-info"}


@pytest.mark.service
def test_the_wheel_says_who_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"train_sentinel-{sentinel.__version__}.dist-info"
        metadata = archive.read(f"{folder}/METADATA").decode()
        commands = archive.read(f"{folder}/entry_points.txt").decode()
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert "\nName: train-sentinel\n" in metadata
    assert f"\nVersion: {sentinel.__version__}\n" in metadata
    assert "\nRequires-Dist: msgspec" in metadata
    assert commands == "[console_scripts]\nsentinel = sentinel.cli:main\n"
    assert len(licences) == 1


def test_the_installed_command_is_ours() -> None:
    (command,) = entry_points(group="console_scripts", name="sentinel")
    assert command.value == "sentinel.cli:main"
    assert callable(command.load())
