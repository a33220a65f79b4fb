"""The live page at `/`: one table per run, rendered here, reloading itself, with nothing fetched from elsewhere."""

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

REFRESH_SECONDS = 2

_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{seconds}">
<title>sentinel</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; }}
th, td {{ text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }}
.bad {{ color: #b00020; }} .quiet {{ opacity: .7; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }} .bad {{ color: #ff6b6b; }} }}
</style></head><body><h1>sentinel</h1>{trouble}{runs}
<p class="quiet"><a href="/metrics">metrics</a> · <a href="/api/v1/runs">all runs as JSON</a></p></body></html>
"""


def render(runs: Iterable[Mapping[str, Any]], trouble: str) -> str:
    """`runs`: live runs as `sentinel ctl status` tells them, each with `gauges` and `open` incidents."""
    shown = "".join(_run(run) for run in runs)
    return _FRAME.format(
        seconds=REFRESH_SECONDS,
        trouble=f'<p class="bad">The database takes no writes: {escape(trouble)}</p>' if trouble else "",
        runs=shown or "<p>No run is going. <code>sentinel runs</code> lists those that ended.</p>",
    )


def _run(run: Mapping[str, Any]) -> str:
    rows = "".join(_rank(rank) for rank in run["ranks"])
    held = "".join(f'<p class="bad">open incident: {escape(kind)}</p>' for kind in run["open"])
    facts = f"{run['status']}, mode {run['mode']}, attempt {run['attempt']}, generation {run['generation']}"
    head = "".join(f"<th>{name}</th>" for name in ("rank", "step", "loss", "grad norm", "lr", "phase", "connected"))
    return (
        f"<h2>{_title(run)}</h2><p>{escape(facts)}</p>{held}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _title(run: Mapping[str, Any]) -> str:
    name, run_id = str(run["name"] or run["run_id"]), str(run["run_id"])
    return f'{escape(name)} <span class="quiet">{escape(run_id)}</span>'


def _rank(rank: Mapping[str, Any]) -> str:
    gauges = rank["gauges"]
    values = [
        rank["rank"],
        rank["step"],
        *(_number(gauges.get(name)) for name in ("loss", "grad_norm", "learning_rate")),
        rank["phase"],
        "yes" if rank["connected"] else "no",
    ]
    return f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in values)}</tr>"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
