"""`sentinel doctor`: say what works on this machine, what does not, and why."""

import typer

from sentinel.cli.options import AsJson, Home, places_of
from sentinel.cli.output import console, print_json

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def command(as_json: AsJson = False, home: Home = None) -> None:
    """Check this machine. Exit code 1 when something must be put right before sentinel can protect a run."""
    from rich.text import Text

    from sentinel.cli.doctor_checks import Status, examine

    checks = examine(places_of(home))
    failed = any(check.status is Status.FAILED for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        out = console()
        width = max(len(check.name) for check in checks)
        for check in checks:
            line = Text(f"{check.status:8}", style=_COLOURS[check.status])
            out.print(line.append(f" {check.name:{width}}  {check.text}", style="default"), soft_wrap=True)
    if failed:
        raise typer.Exit(1)
