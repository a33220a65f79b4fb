"""`sentinel demo`: train, break, repair and explain a small model."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sentinel import places
from sentinel.cli.options import AsJson
from sentinel.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sentinel.demo.plan import Plan
    from sentinel.demo.scenario import Variant
    from sentinel.demo.training import Result
    from sentinel.demo.verdict import Check

SETTLE_SECONDS = 20.0  # most time for the daemon to write the run's end


class Where(NamedTuple):
    """What the demo left on disk."""

    home: Path
    database: str
    page: Path | None


def command(
    out: Annotated[Path, typer.Option("--out", help="Directory for the demo's home: database, logs.")],
    steps: Annotated[int, typer.Option("--steps", help="Update attempts of each run.")] = 240,
    seed: Annotated[int, typer.Option("--seed", help="Of the weights and of the data's order.")] = 0,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Keep the daemon up and training going until Ctrl-C, for a look at page and metrics."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a small character GPT on real text, let it meet a NaN and poisoned data, repair and explain it."""
    from sentinel.cli.demo_watch import keep_going, sidecar
    from sentinel.demo.plan import Plan
    from sentinel.errors import MisuseError

    if watch and as_json:
        raise MisuseError("--watch shows a live page to a person and --json ends with one object; give one of them")
    plan = Plan(steps=steps, seed=seed)
    home = out.absolute() / "home"
    shown = console()
    if not watch:
        kept = _play(plan, home, shown, as_json=as_json)
    else:
        with sidecar(home) as url:
            _say(shown, f"Live page {url}  metrics {url}/metrics  runs {url}/api/v1/runs\n")
            kept = _play(plan, home, shown, as_json=False)
            _say(shown, f"\nTraining goes on, run after run: {url} is live until Ctrl-C.")
            keep_going(plan, home)
    if not kept:
        raise typer.Exit(1)


def _play(plan: "Plan", home: Path, shown: "Console", *, as_json: bool) -> bool:
    """The four runs, and what they showed; whether every promise was kept."""
    from sentinel.demo.scenario import play
    from sentinel.demo.verdict import judge

    if not as_json:
        _introduce(shown, plan.nan_batch, plan.first_poisoned, plan.poisoned_batches)
    with _progress(shown, plan.steps, quiet=as_json) as watch:
        results = play(plan, home, watch)
    run_id = list(results.values())[-1].run_id
    with _settled(home, run_id) as (report, database):
        checks = judge({variant: result.validation_loss for variant, result in results.items()}, report)
        where = Where(home, database, _page(home, run_id))
        if as_json:
            print_json(_summary(results, checks, report, where))
        else:
            _show(shown, results, checks, report, where)
    return all(check.kept for check in checks)


def _page(home: Path, run_id: str) -> Path | None:
    """The postmortem as a page beside the home; None where plotly is not installed."""
    from importlib.util import find_spec

    from sentinel.postmortem.html_page import write
    from sentinel.store.history import History
    from sentinel.store.location import url_of

    if find_spec("plotly") is None:
        return None
    path = home.parent / "postmortem.html"
    with History(url_of(places.find({}, home))) as history:
        write(history, run_id, path)
    return path


@contextmanager
def _settled(home: Path, run_id: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The postmortem and where its database is, once the daemon has written the run's end; after
    SETTLE_SECONDS whatever is there, which the checks will then refuse.
    """
    from sentinel.demo.verdict import balances
    from sentinel.errors import NoSuchRunError
    from sentinel.postmortem.report import report
    from sentinel.store.history import History
    from sentinel.store.location import url_of

    deadline = time.monotonic() + SETTLE_SECONDS
    pause = threading.Event()
    while True:
        late = time.monotonic() > deadline
        try:
            with History(url_of(places.find({}, home))) as history:
                found = report(history, run_id)
                done = found["run"]["status"] != "running" and all(balances(books) for books in found["conservation"])
                if done or late:
                    yield found, history.place
                    return
        except NoSuchRunError:
            if late:
                raise
        pause.wait(0.1)


def _introduce(shown: "Console", nan_batch: int, first: int, count: int) -> None:
    shown.print(
        "Four runs of one small character GPT on the standard library's own sources: same seed, same data.\n"
        f"Fault 1: the gradient of batch {nan_batch} turns NaN, once. "
        f"Fault 2: batches {first} to {first + count - 1} are poisoned, every target is one character.\n",
        markup=False,
    )


@contextmanager
def _progress(shown: "Console", steps: int, *, quiet: bool) -> Iterator[Callable[["Variant", int, float], None]]:
    """A live line per run: its step and loss."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=shown, disable=quiet, refresh_per_second=5) as progress:
        tasks: dict[str, Any] = {}

        def watch(variant: "Variant", step: int, loss: float) -> None:
            if variant not in tasks:
                tasks[variant] = progress.add_task(str(variant), total=steps, loss="")
            progress.update(tasks[variant], completed=step, loss=f"loss {loss:.3f}")

        yield watch


def _summary(
    results: "Mapping[Variant, Result]",
    checks: "Sequence[Check]",
    report: Mapping[str, Any],
    where: Where,
) -> dict[str, Any]:
    clean = next(iter(results.values())).validation_loss
    return {
        "ok": all(check.kept for check in checks),
        "runs": [
            {
                "name": variant,
                "validation_loss": result.validation_loss,
                "ratio_to_clean": result.validation_loss / clean if math.isfinite(result.validation_loss) else None,
                "steps": result.steps,
                "attempts": result.attempts,
                "faults_fired": result.faults_fired,
                "seconds": result.seconds,
            }
            for variant, result in results.items()
        ],
        "checks": [check._asdict() for check in checks],
        "home": str(where.home),
        "database": where.database,
        "page": None if where.page is None else str(where.page),
        "postmortem": report,
    }


def _show(
    shown: "Console",
    results: "Mapping[Variant, Result]",
    checks: "Sequence[Check]",
    report: Mapping[str, Any],
    where: Where,
) -> None:
    from sentinel.postmortem.text import show

    shown.print(_side_by_side(results))
    show(report, where.database, shown)
    shown.print()
    for check in checks:
        mark = "[green]kept  [/]" if check.kept else "[bold red]BROKEN[/]"
        shown.print(f"{mark} {check.promise}: {check.seen}")
    _tell_more(shown, report["run"]["run_id"], where)


def _tell_more(shown: "Console", run_id: str, where: Where) -> None:
    """How to see all of it."""
    of_run = f"{run_id} --home {where.home}"
    page = str(where.page) if where.page else "pip install 'train-sentinel[report]', then sentinel postmortem --html"
    known = {
        "The page": page,
        "This again": f"sentinel postmortem {of_run}",
        "Every record": f"sentinel export {of_run} --format csv",
        "All runs": f"sentinel runs --home {where.home}",
        "Live": f"sentinel demo --watch --out {where.home.parent}",
        "In Grafana": "sentinel dashboards render",
    }
    _say(shown, "\nSee all of it")
    for name, how in known.items():
        _say(shown, f"  {name:13} {how}")


def _say(shown: "Console", line: str) -> None:
    shown.print(line, markup=False, soft_wrap=True)


def _side_by_side(results: "Mapping[Variant, Result]") -> "Table":
    from rich import box
    from rich.table import Table

    from sentinel.demo.scenario import SETUPS

    table = Table(box=box.SIMPLE_HEAD, title="Side by side", title_justify="left")
    for name in ("run", "validation loss", "to clean", "steps", "attempts", "bad batches met", "took"):
        table.add_column(name, justify="left" if name == "run" else "right")
    clean = next(iter(results.values())).validation_loss
    for variant, result in results.items():
        table.add_row(
            SETUPS[variant].words,
            f"{result.validation_loss:.4f}",
            f"{result.validation_loss / clean:.3f}",
            str(result.steps),
            str(result.attempts),
            str(result.faults_fired),
            f"{result.seconds:.0f} s",
        )
    return table
