"""The script for CUDA machines works as far as a machine without CUDA can tell."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here, and the script would use it")
def test_without_cuda_it_says_so_and_succeeds() -> None:
    ended = run()
    assert (ended.returncode, ended.stdout) == (0, "skipped: no CUDA\n")


def test_its_checks_pass_a_rehearsal_on_the_cpu() -> None:
    ended = run("--device", "cpu")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n7 ok, 0 failed, 5 skipped\n" in ended.stdout
