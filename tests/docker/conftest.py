"""The image of the Dockerfile, made once for all tests that use it."""

import pytest

from tests.docker.dockerfile import Image


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Needs the package index."""
    return Image(tmp_path_factory.mktemp("image"))
