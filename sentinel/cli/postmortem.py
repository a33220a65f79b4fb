"""`sentinel postmortem`: explain a run, while it is going or afterwards."""

from typing import Annotated

import typer

from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import console, print_json


def command(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="latest, an id, a unique prefix or a name.")] = "latest",
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """Explain a run: what happened, what was done, what it cost."""
    from sentinel.postmortem.report import report
    from sentinel.store.history import History

    with History(database_url(places_of(home))) as history:
        found = report(history, history.resolve(run))
        if as_json:
            print_json(found)
            return
        from sentinel.postmortem.text import show

        show(found, history.place, console())
