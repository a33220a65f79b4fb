"""`sentinel ctl RUN VERB`: ask a live run for something, and wait for what became of it."""

import socket
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from sentinel import wire
from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import print_json
from sentinel.errors import MisuseError, NoDaemonError, NoSuchRunError
from sentinel.places import Places
from sentinel.records import ControlReply, ControlRequest
from sentinel.vocabulary import Reason

WAIT_SECONDS = 600.0  # a turn takes a few steps, and steps can take minutes


class Verb(StrEnum):
    STATUS = "status"
    PAUSE = "pause"
    RESUME = "resume"
    ROLLBACK = "rollback"
    STOP = "stop"
    CHECKPOINT = "checkpoint"


Run = Annotated[str, typer.Argument(metavar="RUN", help="latest, an id, a unique prefix of one, or a name")]
Asked = Annotated[Verb, typer.Argument(metavar="VERB", help=" | ".join(Verb))]
To = Annotated[int | None, typer.Option("--to", min=0, help="rollback: to the snapshot of this step")]
Skip = Annotated[
    int | None, typer.Option("--skip", min=1, help="rollback: leave out so many batches; else they are replayed")
]
Factor = Annotated[float | None, typer.Option("--factor", help="of a learning rate; for verbs of later versions")]
Size = Annotated[int | None, typer.Option("--size", help="of a micro-batch; for verbs of later versions")]


def command(
    run: Run,
    verb: Asked,
    *,
    to: To = None,
    skip: Skip = None,
    factor: Factor = None,
    size: Size = None,
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """Ask a live run to pause, resume, roll back or stop. Exit code 1: it was refused, and why is printed."""
    given = {"to": to, "skip": skip, "factor": factor, "size": size}
    arguments = {name: value for name, value in given.items() if value is not None}
    _check(verb, arguments)
    places = places_of(home)
    try:
        reply = _ask(places, ControlRequest(wire.VERSION, verb, run, arguments))
    except NoDaemonError:
        if verb is not Verb.STATUS:
            raise
        reply = _from_database(places, run)
    if reply.reason == "no_such_run":
        raise NoSuchRunError(reply.body.get("text") or f"no run has the id, prefix or name {run!r}")
    if as_json:
        print_json({"verb": verb, "ok": reply.ok, "reason": reply.reason, **reply.body})
    else:
        _tell(verb, reply)
    if not reply.ok:
        raise typer.Exit(1)


def _check(verb: Verb, arguments: dict[str, Any]) -> None:
    known = {"to", "skip"} if verb is Verb.ROLLBACK else set()
    for name, value in arguments.items():
        if name not in known:
            raise MisuseError(
                f"--{name} {value} says nothing to {verb}; leave it out (--to and --skip go with rollback)"
            )


def _ask(places: Places, request: ControlRequest) -> ControlReply:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(WAIT_SECONDS)
        try:
            client.connect(str(places.socket))
            client.sendall(wire.encode(request))
            return _reply(client)
        except TimeoutError:
            raise NoDaemonError(f"the daemon of {places.home} gave no answer within {WAIT_SECONDS:g} s") from None
        except OSError as error:
            raise NoDaemonError(
                f"no daemon answers for {places.home} ({error.strerror or error}); "
                "is the run of another home? Name it with --home or SENTINEL_HOME"
            ) from None


def _reply(client: socket.socket) -> ControlReply:
    frames = wire.FrameReader()
    while data := client.recv(1 << 16):
        for body in frames.feed(data):
            message = wire.decode_from_daemon(body)
            if isinstance(message, ControlReply):
                return message
    raise ConnectionResetError(0, "it closed the connection before it answered")


def _from_database(places: Places, run: str) -> ControlReply:
    """What was last known. Raises NoSuchRunError."""
    from sentinel.store.history import History

    with History(database_url(places)) as history:
        row = history.run(history.resolve(run))
    names = ("run_id", "name", "status", "mode", "steps", "attempts", "generations", "world_size")
    note = "no daemon is running; this is what the database last knew"
    body = {**{name: row[name] for name in names}, "source": "database", "text": note}
    return ControlReply(ok=True, reason=Reason.RUN_ENDED, body=body)


def _tell(verb: Verb, reply: ControlReply) -> None:
    body = reply.body
    if verb is Verb.STATUS and reply.ok:
        for name, value in body.items():
            if name not in {"ranks", "text"}:
                print(f"{name.replace('_', ' '):18} {value if value not in (None, '') else '-'}")
        if body.get("text"):
            print(f"sentinel: {body['text']}", file=sys.stderr)
        return
    if not reply.ok:
        text = f": {body['text']}" if body.get("text") else ""
        print(f"{verb} {body.get('outcome') or 'refused'} ({reply.reason}){text}", file=sys.stderr)
        return
    print(f"{verb} applied{_details(body)}")


def _details(body: dict[str, Any]) -> str:
    at = f" at step {body['applied_step']}" if body.get("applied_step") is not None else ""
    parts = []
    if body.get("target_step") is not None:
        parts.append(f"back to step {body['target_step']}")
    if body.get("skipped_batches"):
        parts.append(f"{body['skipped_batches']} batches left out")
    return f"{at}: {', '.join(parts)}" if parts else at
