"""Check sentinel on a CUDA machine and print a table: `python -m tests.gpu.run`, from the repository's root.

Exit code 0: every check passed, or there is no CUDA; 1: a check failed. Needs torch, msgspec and psutil, no network.
`--device cpu` rehearses the checks that a CPU can carry out.
"""

import argparse
import os
import sys
import time
import traceback
from typing import NamedTuple


class Row(NamedTuple):
    """One line of the table."""

    name: str
    result: str  # "ok", "failed" or "skipped"
    seconds: float
    words: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    # Before CUDA starts: bit-exact comparisons need kernels that always add in the same order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA")
        return 0
    torch.use_deterministic_algorithms(True)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, a rehearsal"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {where}\n")
    rows = _run_all(device)
    _print(rows)
    return int(any(row.result == "failed" for row in rows))


def _run_all(device: str) -> list[Row]:
    from tests.gpu.checks import CHECKS

    rows = []
    for check in CHECKS:
        name = check.function.__name__.replace("_", " ")
        if check.needs_cuda and device != "cuda":
            rows.append(Row(name, "skipped", 0.0, "needs CUDA"))
            continue
        started = time.perf_counter()
        try:
            result, words = "ok", check.function(device)
        except Exception as error:
            traceback.print_exc()
            result, words = "failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        rows.append(Row(name, result, time.perf_counter() - started, words))
    return rows


def _print(rows: list[Row]) -> None:
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:{width}}  {row.result:7}  {row.seconds:5.1f} s  {row.words}")
    count = {result: sum(row.result == result for row in rows) for result in ("ok", "failed", "skipped")}
    print(f"\n{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped")


if __name__ == "__main__":
    sys.exit(main())
