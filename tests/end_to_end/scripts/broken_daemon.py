"""A daemon whose sinks fail: `python -m ...broken_daemon`. The rest of it is the real one.

Metrics and a detector raise on every step record; the database refuses every seventh of them for good.
"""

import sys
from typing import Any
from unittest import mock

from sentinel.cli import main as cli
from sentinel.daemon.series import RankSeries
from sentinel.detect.loss_spike import LossSpike
from sentinel.records import StepRecord
from sentinel.store.database import Store

EVERY = 7


def main() -> int:
    real = Store.write

    def write(store: Store, entries: Any, *, critical: bool) -> Any:
        for entry in entries:
            if isinstance(entry.message, StepRecord) and entry.message.step % EVERY == 0:
                raise ValueError("injected into the database")
        return real(store, entries, critical=critical)

    with (
        mock.patch.object(RankSeries, "step", side_effect=ValueError("injected into the metrics")),
        mock.patch.object(LossSpike, "observe", side_effect=ValueError("injected into a detector")),
        mock.patch.object(Store, "write", write),
    ):
        return cli(["daemon"])


if __name__ == "__main__":
    sys.exit(main())
