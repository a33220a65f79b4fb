"""What an earlier daemon left open is closed with the run."""

import math
from pathlib import Path

from sentinel.daemon import recovery
from sentinel.records import IncidentStatus
from sentinel.store.database import Store
from sentinel.store.history import History
from sentinel.vocabulary import RunStatus
from tests.store.building import RUN, START, entries, hello, incident, start, url_in


def test_an_incident_that_no_judge_remembers_is_given_up_when_the_run_ends(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    store.register_rank(hello(), "box", START)
    store.write(entries(start()), critical=True)
    store.save_incident(incident(status=IncidentStatus.OPEN, resolved_at=None, cause=""))
    recovery.close_books(store, RUN, RunStatus.COMPLETED, START + 9)
    store.close()
    with History(url_in(tmp_path)) as history:
        (closed,) = history.incidents(RUN)
        assert (closed["status"], closed["resolved_at"]) == ("gave_up", START + 9)
        assert closed["ranks"] == [0]
        assert math.isinf(closed["evidence"]["z"])
        assert history.run(RUN)["status"] == "completed"
