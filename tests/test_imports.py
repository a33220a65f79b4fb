"""What importing loads, and what it must not do."""

import importlib.util
import os
import subprocess
import sys

import pytest

DAEMON_ONLY = {"sqlalchemy", "alembic", "prometheus_client", "starlette", "uvicorn", "pydantic", "typer", "rich"}


def loaded_by(module: str) -> set[str]:
    """Top-level names that `import module` loads in a fresh process, in an empty folder's environment."""
    script = f"import sys; before = set(sys.modules); import {module}; print(*sorted(set(sys.modules) - before))"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).split())


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def only_existing(*modules: str) -> list[str]:
    return [module for module in modules if exists(module)]


def test_importing_sentinel_loads_next_to_nothing() -> None:
    loaded = loaded_by("sentinel")
    assert "sentinel" in loaded
    assert not {name for name in loaded if name.startswith("sentinel.")}
    assert not loaded & {"torch", "msgspec", "numpy", "psutil"}


@pytest.mark.parametrize(
    "module", only_existing("sentinel.daemon.app", "sentinel.store.database", "sentinel.detect.catalogue")
)
def test_the_daemons_side_loads_no_torch(module) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not loaded & {"torch", "numpy", "sentinel.client"}


@pytest.mark.parametrize(
    "module", only_existing("sentinel.client.attach", "sentinel.client.link", "sentinel.client.identity")
)
def test_the_training_process_loads_none_of_the_daemons_packages(module) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not loaded & DAEMON_ONLY
    assert not loaded & {"sentinel.daemon", "sentinel.store", "sentinel.cli", "sentinel.detect", "sentinel.respond"}


@pytest.mark.parametrize("module", ["sentinel.client.link", "sentinel.client.identity", "sentinel.testing"])
def test_the_link_and_its_test_double_need_no_torch(module) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert "torch" not in loaded


QUIET = """
import os, sys, threading
import json, asyncio, socket, subprocess, importlib.metadata  # the standard library may read what it likes
for name in {others}:
    try:
        __import__(name)
    except ImportError:
        pass
read, opened = [], []
kind = type(os.environ)
original = kind.__getitem__

def watched(self, name):
    caller = sys._getframe(1)
    while caller and ("os" in caller.f_code.co_filename.split("/")[-1] or "abc" in caller.f_code.co_filename):
        caller = caller.f_back
    if caller and "/sentinel/" in caller.f_code.co_filename:  # what a dependency reads is its own affair
        read.append(name)
    return original(self, name)

kind.__getitem__ = watched

def audit(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if not str(arguments[0]).endswith((".pyc", "null")) and "__pycache__" not in str(arguments[0]):
            opened.append(str(arguments[0]))
    if event in ("os.mkdir", "socket.bind", "socket.connect"):
        opened.append(event)

sys.addaudithook(audit)
threads = threading.active_count()
import {module}
assert "{module}" in sys.modules
print(json.dumps([read, opened, threading.active_count() - threads]))
"""


def seen_while_importing(module: str, others: list[str], folder: str = "") -> str:
    environ = {**os.environ, "HOME": "/nowhere", "PYTHONPATH": folder}
    script = QUIET.format(module=module, others=others)
    return subprocess.check_output([sys.executable, "-B", "-c", script], text=True, env=environ).strip()


@pytest.mark.parametrize(
    "module",
    only_existing(
        "sentinel",
        "sentinel.client.attach",
        "sentinel.client.link",
        "sentinel.daemon.app",
        "sentinel.testing",
        "sentinel.cli",
    ),
)
def test_importing_starts_no_thread_reads_no_variable_and_writes_nothing(module) -> None:
    others = [
        "torch",
        "msgspec",
        "psutil",
        "sqlalchemy",
        "starlette.applications",
        "uvicorn",
        "typer",
        "rich.console",
    ]
    others += ["prometheus_client", "pydantic_settings", "structlog", "alembic.command", "torch.distributed"]
    if module in {"sentinel.client.link", "sentinel.testing", "sentinel"}:
        others = ["msgspec", "psutil"]
    assert seen_while_importing(module, others) == "[[], [], 0]"


def test_a_module_that_does_all_that_is_found_out(tmp_path) -> None:
    folder = tmp_path / "sentinel"
    folder.mkdir()
    written = folder / "written"
    (folder / "loud.py").write_text(
        f"import os, threading\nos.environ.get('LOUD')\nopen({str(written)!r}, 'w').close()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    assert seen_while_importing("loud", [], str(folder)) == f'[["LOUD"], ["{written}"], 1]'
