"""Watch a training run from inside the loop, repair it, prove the repair, explain it afterwards.

`sentinel.attach(model, optimizer)` is all that most loops need. The names below are loaded on first use
(PEP 562), so that the daemon, which imports this package too, never loads torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentinel.client.attach import attach
    from sentinel.client.run import Run
    from sentinel.errors import RunStopped, SentinelError

__version__ = "0.1.0"

__all__ = ["Run", "RunStopped", "SentinelError", "__version__", "attach"]

_HOME_OF = {
    "attach": "sentinel.client.attach",
    "Run": "sentinel.client.run",
    "RunStopped": "sentinel.errors",
    "SentinelError": "sentinel.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sentinel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
