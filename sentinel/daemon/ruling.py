"""Write a ruling down: findings, incidents and decisions in one commit."""

import itertools
import time
from typing import Any

from sentinel.daemon.rank import Rank
from sentinel.daemon.writer import Job
from sentinel.records import Decision, Incident
from sentinel.respond.judge import Ruling
from sentinel.vocabulary import Action, IncidentStatus, Outcome

Named = list[tuple[str, Decision]]  # decisions with their ids


class Clerk:
    """Makes the jobs that write rulings. One may overtake another; the newest version of an incident stays."""

    def __init__(self) -> None:
        self._versions = itertools.count(1)
        self._written: dict[str, int] = {}  # of open incidents; belongs to the writer's thread

    def record(self, rank: Rank, ruling: Ruling, named: Named, reflex: Outcome) -> Job[None]:
        """Everything a ruling says. `reflex`: what became of the update that the loop left out."""
        origin, generation, now, version = rank.origin, rank.generation, time.time(), next(self._versions)

        def save(store: Any) -> None:
            with store.transaction(critical=True):
                for finding, incident_id in ruling.findings:
                    store.save_finding(origin, finding, generation, now, incident_id)
                for incident in ruling.incidents:
                    if self._is_newest(incident, version):
                        store.save_incident(incident)
                for name, decision in named:
                    outcome = outcome_of(decision, reflex)
                    store.save_decision(name, origin, generation, now, decision, outcome)
                    if decision.action is Action.SKIP_UPDATE and outcome is not None:
                        store.save_outcome(name, outcome, decision.reason, decision.step)

        return save

    def _is_newest(self, incident: Incident, version: int) -> bool:
        if self._written.get(incident.id, 0) > version:
            return False
        self._written[incident.id] = version
        if incident.status is not IncidentStatus.OPEN:
            del self._written[incident.id]
        return True


def outcome_of(decision: Decision, reflex: Outcome) -> Outcome | None:
    """As it stands when the decision is written: none for nothing done, pending for what takes a turn."""
    if decision.action is Action.NONE:
        return None
    return reflex if decision.action is Action.SKIP_UPDATE else Outcome.PENDING


def nothing_more(store: Any) -> None:
    """The first decision of a ruling has brought the whole record along."""
    del store
