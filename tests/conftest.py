"""What all tests share: services that may be missing, how often a campaign repeats, and no way to the real home."""

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

LONG = "SENTINEL_TEST_LONG"  # "1": every repetition and every case of the campaigns
SEED = "SENTINEL_TEST_SEED"  # chooses the tenth that runs otherwise


def require_service(path_or_name: str) -> str:
    """The path of a program that a test needs; without it the test skips, or fails where CI=true."""
    found = shutil.which(path_or_name)
    return missing(f"{path_or_name} is not installed") if found is None else found


def missing(what: str) -> NoReturn:
    """End a test that cannot run here: skipped, but failed where CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}; .ci/run is to provide it")
    pytest.skip(what)


@pytest.fixture
def repetitions() -> Callable[[int], int]:
    """`repetitions(50)`: how often to repeat a campaign of 50 here: all of it in long mode, else a tenth."""
    return lambda whole: whole if _is_long() else _tenth(whole)


@pytest.fixture(autouse=True, scope="session")
def no_real_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What forgets to choose a home gets one of the session's own, also in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        for name in ("SENTINEL_HOME", "SENTINEL_MODE", "SENTINEL_RUN_ID", "SENTINEL_SETTINGS"):
            patch.delenv(name, raising=False)
        yield


def pytest_report_header() -> str:
    return f"campaigns: {'complete' if _is_long() else f'a tenth, chosen by {SEED}={_seed()}'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a parametrised `long` test keep a seeded tenth of the cases, at least one."""
    if _is_long():
        return
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") is not None and hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    chance = random.Random(_seed())
    dropped: set[pytest.Item] = set()
    for group in cases.values():
        dropped.update(chance.sample(group, len(group) - _tenth(len(group))))
    if dropped:
        config.hook.pytest_deselected(items=sorted(dropped, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in dropped]


def _is_long() -> bool:
    return os.environ.get(LONG) == "1"


def _tenth(whole: int) -> int:
    return max(1, whole // 10)


def _seed() -> int:
    return int(os.environ.get(SEED, "0"))
