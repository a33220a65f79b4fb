"""`sentinel db`: look at the run database, or bring it to the schema of this version."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import print_json


class Verb(StrEnum):
    STATUS = "status"
    UPGRADE = "upgrade"


Asked = Annotated[Verb, typer.Argument(metavar="VERB", help=" | ".join(Verb))]


def command(verb: Asked, as_json: AsJson = False, home: Home = None) -> None:
    """`status` says where the run database is and at which schema, and changes nothing; `upgrade` creates or migrates
    it. A daemon does that by itself when it starts: `upgrade` is for whoever wants to choose the moment.
    """
    from sentinel.store import schema

    url = database_url(places_of(home))
    before = schema.revision_of(url)
    if verb is Verb.UPGRADE:
        schema.open_writer(url).dispose()
    found = _told(url, before, schema.revision_of(url))
    if as_json:
        print_json(found)
    else:
        _show(found)


def _told(url: str, before: str | None, now: str | None) -> dict[str, Any]:
    from sentinel.store import engine, schema

    newest = schema.REVISIONS[-1]
    state = (
        "missing" if now is None else "current" if now == newest else "old" if now in schema.REVISIONS else "newer"
    )
    return {"database": engine.shown(url), "state": state, "schema": now, "newest": newest, "before": before}


def _show(found: dict[str, Any]) -> None:
    print(f"{found['database']}: {_in_words(found)}")


def _in_words(found: dict[str, Any]) -> str:
    match found["state"]:
        case "missing":
            return "no database yet; the first run makes it, or `sentinel db upgrade`"
        case "old":
            return f"schema {found['schema']}; `sentinel db upgrade` brings it to {found['newest']}"
        case "newer":
            return f"schema {found['schema']}, newer than {found['newest']}; upgrade sentinel"
        case _:
            moved = f", from {found['before'] or 'nothing'}" if found["before"] != found["schema"] else ""
            return f"schema {found['schema']}, the newest{moved}"
