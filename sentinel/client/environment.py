"""Look at what the run stands on: the git commit, package versions, devices."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

GIT_SECONDS = 1.0  # for each of two questions; a repository on a slow disk is not worth more
PACKAGES = ("torch", "numpy", "transformers", "lightning", "accelerate", "deepspeed", "msgspec", "train-sentinel")


def git(folder: str | Path | None = None) -> dict[str, Any]:
    """{"commit", "dirty"} of the working folder's repository; empty outside one, or where git gives no answer."""
    commit = _ask_git(["rev-parse", "HEAD"], folder)
    if not commit:
        return {}
    status = _ask_git(["status", "--porcelain", "--untracked-files=no"], folder)
    return {"commit": commit.strip(), "dirty": None if status is None else bool(status.strip())}


def packages() -> dict[str, str]:
    """Installed versions of what matters to a run, and Python's own. Absent is absent."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def devices() -> list[str]:
    """Names of the CUDA devices if torch is loaded and sees any, else the processor's."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [f"{_processor()} ({os.cpu_count()} cores)"]


def _ask_git(arguments: list[str], folder: str | Path | None) -> str | None:
    # No locks taken, no prompt, no pager: this is somebody else's repository.
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        answer = subprocess.run(
            command,
            cwd=folder,
            env=quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode(errors="replace") if answer.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
