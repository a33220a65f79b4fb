"""`sentinel doctor`: say what works on this machine, which signals can be had, and why the others cannot."""

import typer

from sentinel.cli.options import AsJson, Home, places_of
from sentinel.cli.output import console, print_json

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "available": "green", "absent": "dim"}


def command(as_json: AsJson = False, home: Home = None) -> None:
    """Check this machine, and list the signals that can be had here.

    Exit code 1 when something must be put right before sentinel can protect a run. An absent signal is no fault.
    """
    from sentinel.cli import doctor_signals
    from sentinel.cli.doctor_checks import Status, examine

    places = places_of(home)
    checks, signals = examine(places), doctor_signals.find(places)
    failed = any(check.status is Status.FAILED for check in checks)
    if as_json:
        told = {"checks": [check._asdict() for check in checks], "signals": [signal._asdict() for signal in signals]}
        print_json({"ok": not failed, **told})
    else:
        _print([(str(status), name, text) for name, status, text in checks])
        console().print("\nSignals")
        _print([(str(status), name, reason) for name, status, reason in signals])
    if failed:
        raise typer.Exit(1)


def _print(rows: list[tuple[str, str, str]]) -> None:
    """A line each: status, name, text."""
    from rich.text import Text

    out = console()
    width = max(len(name) for _, name, _ in rows)
    for status, name, text in rows:
        line = Text(f"{status:9}", style=_COLOURS[status])
        out.print(line.append(f" {name:{width}}  {text}", style="default"), soft_wrap=True)
