"""Trees as the kernel shows them: recorded on a virtual machine, and one of an RDMA port written after its layout."""

from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def proc() -> Path:
    return FIXTURES / "proc"


def plant(root: Path, files: dict[str, str]) -> Path:
    """`root` with these files below it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root
