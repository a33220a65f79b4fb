"""`sentinel export`: write the records of a run, one row each, as JSON lines or CSV."""

import csv
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import print_json
from sentinel.errors import MisuseError, PermanentError


class Format(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="latest, an id, a unique prefix or a name.")],
    *,
    format: Annotated[Format, typer.Option("--format", help="JSON lines or CSV.")] = Format.JSONL,  # noqa: A002
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; else standard output.")] = None,
    live_only: Annotated[
        bool,
        typer.Option("--live-only/--all", help="Leave out history: what a rollback or restart made the run repeat."),
    ] = False,
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """Write every record of a run: run_id, attempt, generation, rank, step, every signal, and whether it is live."""
    if as_json and output is None and format is Format.CSV:
        raise MisuseError("--json and --format csv both want standard output; name a file with --output")
    from sentinel.store.history import History

    with History(database_url(places_of(home))) as history:
        run_id = history.resolve(run)
        rows = history.steps(run_id, live_only=live_only)
        with _opened(output) as file:
            records = (_write_csv if format is Format.CSV else _write_jsonl)(rows, file)
    if output is None:
        return
    if as_json:
        print_json({"run_id": run_id, "records": records, "file": str(output)})
    else:
        print(f"{records} records of {run_id} written to {output}")


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise PermanentError(f"{path} cannot be written: {error.strerror}") from None


def _write_jsonl(rows: Iterator[Mapping[str, Any]], file: TextIO) -> int:
    """One strict JSON object a line; a non-finite number is null, and `nonfinite` beside it says which it was."""
    from sentinel.store.strict_json import dumps

    records = 0
    for records, row in enumerate(rows, 1):  # noqa: B007 -- the last number is the count
        print(dumps(row), file=file)
    return records


def _write_csv(rows: Iterator[Mapping[str, Any]], file: TextIO) -> int:
    """Blank is absent; nan, inf and -inf stand as such. `optimizers`, `reported` and `sampled` are JSON."""
    from sentinel.store.rows import STEP_COLUMNS

    names = [*(name for name in STEP_COLUMNS if name != "nonfinite"), "live"]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    records = 0
    for records, row in enumerate(rows, 1):  # noqa: B007 -- the last number is the count
        writer.writerow([_cell(row[name]) for name in names])
    return records


def _cell(value: Any) -> Any:
    from sentinel.store.strict_json import dumps

    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return dumps(value)
    return repr(value) if isinstance(value, float) else value
