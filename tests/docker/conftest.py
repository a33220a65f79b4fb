"""The image of the Dockerfile, made once for all tests that use it."""

from pathlib import Path

import pytest

from tests.docker.dockerfile import Image


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Needs the package index."""
    folder: Path = tmp_path_factory.mktemp("image")
    (folder / "var" / "lib").mkdir(parents=True)
    return Image(folder)
