"""Write the dashboards' JSON: `python -m dashboards.generate [FOLDER]` (a development tool, never installed)."""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.machine import page_of_machines
from dashboards.run import page_of_run
from dashboards.sentinel import page_of_sentinel

HERE = Path(__file__).resolve().parent
PAGES = {"run.json": page_of_run, "machine.json": page_of_machines, "sentinel.json": page_of_sentinel}


def main(folder: Path = HERE) -> None:
    for name, page in PAGES.items():
        (folder / name).write_text(text(page()), encoding="utf-8")


def text(page: Dashboard) -> str:
    """Stable JSON: the same panels give the same bytes, whatever the SDK's order of keys."""
    return json.dumps(page, cls=JSONEncoder, sort_keys=True, indent=2) + "\n"


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:2]))
