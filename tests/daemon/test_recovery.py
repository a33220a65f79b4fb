"""What an earlier daemon left open is closed with the run."""

import math
import urllib.request
from pathlib import Path

from sentinel.daemon import recovery
from sentinel.records import Origin, RunEnd
from sentinel.store.database import Store
from sentinel.store.history import History
from sentinel.vocabulary import IncidentStatus, RunStatus
from tests.daemon.daemon_process import DaemonProcess
from tests.store.building import RUN, START, entries, hello, incident, record, start, url_in
from tests.waiting import until


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


def test_a_run_whose_last_word_is_stored_is_closed_by_the_next_daemon(tmp_path: Path) -> None:
    """The daemon was killed after it acknowledged the end of the last rank, before it closed the books."""
    home = tmp_path / "home"
    home.mkdir()
    store = Store.open(url_in(home))
    store.register_rank(hello(), "box", START)
    store.write(entries(start(), RunEnd(2, START + 40, 0, 13, "failed", "ValueError: x")), critical=True)
    store.save_incident(incident(status=IncidentStatus.OPEN, resolved_at=None, cause=""))
    store.close()
    with DaemonProcess(home) as daemon, History(daemon.database) as history:
        until(lambda: history.run(RUN)["status"] == "failed", 10.0, "the run is closed")
        assert history.run(RUN)["ended_at"] == START + 40
        assert [row["status"] for row in history.incidents(RUN)] == ["gave_up"]
        with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=5) as reply:
            assert 'sentinel_runs_ended_total{status="failed"} 1.0' in reply.read().decode()


def test_what_detectors_learn_from_after_a_restart_carries_the_global_norm(tmp_path: Path) -> None:
    """Under sharding every rank stored its part; of step 3 one part was dropped."""
    store = Store.open(url_in(tmp_path))
    for rank, part in ((0, 3.0), (1, 4.0)):
        store.register_rank(hello(rank=rank, nonce=f"n{rank}", world_size=2), "box", START)
        told = [
            record(1 + step, step, grad_norm_local=part, grad_norm_source="local")
            for step in (1, 2, 3)
            if (rank, step) != (1, 3)
        ]
        store.write(entries(start(world_size=2, local_rank=rank), *told, origin=Origin(RUN, 1, rank)), critical=True)
    store.close()
    learnt = recovery.recent_steps(url_in(tmp_path), Origin(RUN, 1, 0), 500)
    assert [(one.step, one.grad_norm) for one in learnt] == [(1, 5.0), (2, 5.0), (3, None)]
    assert {one.grad_norm_local for one in learnt} == {3.0}
