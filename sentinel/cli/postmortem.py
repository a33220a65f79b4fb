"""`sentinel postmortem`: explain a run, while it is going or afterwards."""

from pathlib import Path
from typing import Annotated

import typer

from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import console, print_json

Page = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write one self-contained page with plots; needs the extra report."),
]


def command(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="latest, an id, a unique prefix or a name.")] = "latest",
    html: Page = None,
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """Explain a run: what happened, what was done, what it cost."""
    from sentinel.postmortem.report import report
    from sentinel.store.history import History

    with History(database_url(places_of(home))) as history:
        run_id = history.resolve(run)
        if html is not None:
            from sentinel.postmortem.html_page import write

            write(history, run_id, html)
        if as_json:
            print_json(report(history, run_id))
        elif html is not None:
            print(f"{html.absolute()}: the postmortem of {run_id}; open it in a browser")
        else:
            from sentinel.postmortem.text import show

            show(report(history, run_id), history.place, console())
