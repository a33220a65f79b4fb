"""The command line. A command's module is loaded when that command is called, and not before.

To add a command: a module with a function `command`, typed for typer, and one line in COMMANDS. This file is the
one exception boundary: errors that sentinel raises on purpose become an exit code and one line on stderr.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from sentinel import errors


class Listed(NamedTuple):
    """A command that is not loaded yet."""

    module: str
    help: str
    function: str = "command"


COMMANDS = {
    "demo": Listed("sentinel.cli.demo", "Train, break, repair and explain a small model."),
    "daemon": Listed("sentinel.cli.daemon", "Run the sidecar that runs report to."),
    "runs": Listed("sentinel.cli.runs", "List the runs of this home."),
    "postmortem": Listed("sentinel.cli.postmortem", "Explain a run: what happened, what was done, what it cost."),
    "export": Listed("sentinel.cli.export", "Write every record of a run as JSON lines or CSV."),
    "dashboards": Listed("sentinel.cli.dashboards", "Grafana dashboards and alert rules: write, push, annotate."),
    "alerts": Listed("sentinel.cli.alerts", "List alerts and what became of them, or test a channel."),
    "ctl": Listed("sentinel.cli.ctl", "Ask a live run to pause, resume, roll back or stop."),
    "db": Listed("sentinel.cli.db", "Look at the run database, or bring it to the schema of this version."),
    "doctor": Listed(
        "sentinel.cli.doctor", "Check this machine: what works, what can be seen, and why not the rest."
    ),
}

# The first match counts, so the special come before the general (design section 14).
EXIT_CODES: tuple[tuple[type[errors.SentinelError], int], ...] = (
    (errors.MisuseError, 2),
    (errors.DaemonRunningError, 3),
    (errors.NoSuchRunError, 4),
    (errors.NoDaemonError, 5),
    (errors.SentinelError, 1),
)

# Packages that come with another extra than [daemon].
_EXTRAS = {"torch": "torch", "numpy": "torch", "plotly": "report", "psycopg": "postgres"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. `arguments` default to those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except errors.SentinelError as error:
        return _explain(error, as_json="--json" in given)
    except ModuleNotFoundError as error:
        package = (error.name or "sentinel").partition(".")[0]
        if package == "sentinel":
            raise
        extra = _EXTRAS.get(package, "daemon")
        print(f"sentinel: {error.name} is not installed; pip install 'train-sentinel[{extra}]'", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has seen enough. The interpreter flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(given: list[str]) -> int:
    if "--version" in given[:1]:
        from sentinel import __version__

        print(f"sentinel {__version__}")
        return 0
    try:
        _application(given)(given, prog_name="sentinel")
    except SystemExit as stop:
        sys.stdout.flush()
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _application(given: list[str]) -> Any:
    """All commands by name and help; only the one that is called is loaded, with its options."""
    import typer

    application = typer.Typer(
        name="sentinel",
        help="Watch training runs, repair them, prove the repair, explain it afterwards.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    called = next((word for word in given if not word.startswith("-")), None)
    for name, listed in COMMANDS.items():
        function = _load(listed) if name == called else _listed_only
        application.command(name, help=listed.help)(function)
    return application


def _load(listed: Listed) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(listed.module), listed.function)
    return function


def _listed_only() -> None:
    """Stands for a command in the list of all of them; whoever is called is loaded instead."""


def _explain(error: errors.SentinelError, *, as_json: bool) -> int:
    code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    if as_json:
        from sentinel.store.strict_json import dumps

        print(dumps({"error": {"code": code, "kind": type(error).__name__, "text": str(error)}}))
    print(f"sentinel: {error}", file=sys.stderr)
    return code
