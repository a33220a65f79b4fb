"""`sentinel dashboards`: write dashboards and rules to a folder, push them to Grafana, annotate a run's incidents."""

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import print_json
from sentinel.errors import MisuseError, PermanentError
from sentinel.vocabulary import Action

if TYPE_CHECKING:
    from sentinel.cli.grafana import Change, Note, Server
    from sentinel.store.history import Row

PAGES = ("run.json", "machine.json", "sentinel.json")
FILES = (
    *PAGES,
    "rules.yml",
    "provisioning/datasources/sentinel.yml",
    "provisioning/dashboards/sentinel.yml",
    "provisioning/prometheus/sentinel.yml",
)
DEFAULT_FOLDER = Path("sentinel-dashboards")


class Verb(StrEnum):
    RENDER = "render"
    PUSH = "push"
    ANNOTATE = "annotate"


MEANS = {
    Verb.RENDER: {"out"},
    Verb.PUSH: {"url", "token_file", "folder"},
    Verb.ANNOTATE: {"run", "url", "token_file"},
}

Asked = Annotated[Verb, typer.Argument(metavar="VERB", help=" | ".join(Verb))]
Run = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="annotate: latest (the default), an id, a unique prefix or a name"),
]
Out = Annotated[Path | None, typer.Option("--out", help=f"render: the folder; else {DEFAULT_FOLDER} in this one")]
Url = Annotated[str | None, typer.Option("--url", help="push, annotate: Grafana's address, http://localhost:3000")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="push, annotate: a file with a service account's token")
]
Folder = Annotated[str | None, typer.Option("--folder", help="push: title of Grafana's folder; else sentinel")]


def command(
    verb: Asked,
    run: Run = None,
    *,
    out: Out = None,
    url: Url = None,
    token_file: TokenFile = None,
    folder: Folder = None,
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """Write dashboards and alert rules to a folder, push the dashboards to Grafana, or annotate a run's incidents."""
    _check(verb, {"run": run, "out": out, "url": url, "token_file": token_file, "folder": folder})
    if verb is Verb.RENDER:
        _tell_rendered(out or DEFAULT_FOLDER, as_json=as_json)
        return
    server = _server(url, token_file)
    if verb is Verb.PUSH:
        from sentinel.cli.grafana import push

        title = folder or "sentinel"
        _tell_changes(push(server, _pages(), title), {"folder": title}, as_json=as_json)
    else:
        from sentinel.cli.grafana import annotate

        run_id, notes = _incidents(run or "latest", home)
        _tell_changes(annotate(server, notes), {"run_id": run_id}, as_json=as_json)


def render(folder: Path) -> list[Path]:
    """Write every file, over older ones of the same name. Raises PermanentError."""
    source = _source()
    written = []
    for name in FILES:
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.joinpath(name).read_bytes())
        except OSError as error:
            raise PermanentError(f"{path} cannot be written: {error.strerror}") from None
        written.append(path)
    return written


def note_of(incident: "Row", actions: Iterable["Row"]) -> "Note":
    """The annotation of one incident; its text is HTML, as Grafana shows it."""
    from sentinel.cli.grafana import Note

    done = [f"{row['action']} {row['outcome']}" for row in actions if row["action"] != Action.NONE.value]
    text = f"{incident['kind']} at step {incident['first_step']}: {incident['summary']}"
    if done:
        text += f" -> {', '.join(done)}"
    ended = incident["resolved_at"] or incident["opened_at"]
    return Note(
        incident["id"],
        incident["run_id"],
        int(incident["opened_at"] * 1000),
        int(ended * 1000),
        html.escape(text, quote=False),
        (incident["kind"], incident["severity"]),
    )


def _check(verb: Verb, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and name not in MEANS[verb]:
            shown = name.upper() if name == "run" else f"--{name.replace('_', '-')}"
            raise MisuseError(f"{shown} {str(value)!r} says nothing to {verb}; leave it out")


def _server(url: str | None, token_file: Path | None) -> "Server":
    from sentinel.cli.grafana import Server, read_token

    if url is None or token_file is None:
        raise MisuseError("Grafana's address and a token are needed: --url http://localhost:3000 --token-file FILE")
    return Server(url, read_token(token_file))


def _source() -> Traversable:
    """Where the files are: within the installed package, or in the checkout that an editable install points to."""
    package = resources.files("sentinel")
    installed = package.joinpath("_dashboards")
    if installed.is_dir():
        return installed
    checkout = Path(str(package)).parent / "dashboards"
    if checkout.joinpath(PAGES[0]).is_file():
        return checkout
    raise PermanentError("this installation carries no dashboards; install train-sentinel again")


def _pages() -> list[dict[str, Any]]:
    source = _source()
    return [json.loads(source.joinpath(name).read_text(encoding="utf-8")) for name in PAGES]


def _incidents(run: str, home: Path | None) -> tuple[str, list["Note"]]:
    from sentinel.store.history import History

    with History(database_url(places_of(home))) as history:
        run_id = history.resolve(run)
        actions = defaultdict(list)
        for row in history.actions(run_id):
            actions[row["incident_id"]].append(row)
        return run_id, [note_of(row, actions[row["id"]]) for row in history.incidents(run_id)]


def _tell_rendered(folder: Path, *, as_json: bool) -> None:
    written = render(folder)
    if as_json:
        print_json({"folder": str(folder), "files": [str(path) for path in written]})
    else:
        print(f"{len(written)} files written to {folder}: " + ", ".join(FILES))


def _tell_changes(changes: Mapping[str, "Change"], about: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json({**about, "changes": dict(changes)})
        return
    for name, change in changes.items():
        print(f"{change:10} {name}")
    if not changes:
        print("nothing to annotate: the run has no incident")
