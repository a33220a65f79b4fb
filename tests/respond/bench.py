"""A judge with its detectors, fed with plain numbers: what the daemon's pipeline does, without the daemon."""

from itertools import count

from sentinel.config import Settings
from sentinel.detect import catalogue
from sentinel.records import Decision, Finding, Incident, Mark, Observation, Origin
from sentinel.respond.judge import Judge, Ruling, Situation
from sentinel.vocabulary import Action, Mode, Outcome, Quality, Reason
from tests.detect.series import note, record

CAN = frozenset({"rollback", "skip_data", "replay_data", "pause", "stop"})


def situation(**other) -> Situation:
    usual = {
        "mode": Mode.PROTECT,
        "world_size": 1,
        "ranks_connected": 1,
        "can": CAN,
        "in_flight": False,
        "record_kept": True,
        "time": 0.0,
    }
    return Situation(**{**usual, **other})


class Bench:
    """Keeps everything that the judge ever said."""

    def __init__(self, settings: Settings | None = None, **other) -> None:
        numbers = count(1)
        self.settings = settings or Settings()
        self.detectors = catalogue.build(self.settings.detect)
        self.judge = Judge(Origin("run", 1, 0), self.detectors, self.settings, lambda: f"i{next(numbers)}")
        self.situation = situation(**other)
        self.generation = 0
        self.findings: list[tuple[Finding, str]] = []
        self.decisions: list[Decision] = []
        self.marks: list[Mark] = []
        self.incidents: dict[str, Incident] = {}
        self.written = 0

    def see(self, seen: Observation) -> Ruling:
        return self.keep(self.judge.observe(seen, self.situation))

    def keep(self, ruling: Ruling) -> Ruling:
        self.findings += ruling.findings
        self.decisions += ruling.decisions
        self.marks += ruling.marks
        self.written += len(ruling.incidents)
        self.incidents.update({incident.id: incident for incident in ruling.incidents})
        return ruling

    def steps(self, first: int, last: int, loss: float = 2.0, **more) -> Ruling:
        """Steps first..last with a little noise; the last ruling."""
        ruling = Ruling()
        for step in range(first, last + 1):
            wave = 1 + 0.01 * (step % 3)
            ruling = self.see(record(step, loss * wave, generation=self.generation, data_position=step, **more))
        return ruling

    def snapshots(self, *steps: int, quality=None) -> None:
        for step in steps:
            self.see(note(step, *([quality] if quality else []), generation=self.generation))

    def answer(self, decision: Decision, outcome=Outcome.APPLIED, reason=Reason.OK, target: int | None = 0) -> Ruling:
        """The outcome of a decision; an applied rollback starts the next generation."""
        rolled = outcome is Outcome.APPLIED and decision.action is Action.ROLLBACK
        self.generation += rolled
        return self.keep(
            self.judge.outcome(
                decision,
                outcome,
                reason,
                generation=self.generation,
                applied_step=decision.step + 1,
                target_step=target if rolled else None,
                situation=self.situation,
            )
        )

    def end(self) -> Ruling:
        return self.keep(self.judge.end(self.situation))

    @property
    def acting(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.action is not Action.NONE]

    @property
    def only(self) -> Incident:
        (incident,) = self.incidents.values()
        return incident


def spiked(**other) -> Bench:
    """A bench in whose run a spike at step 100 was just confirmed; GOOD snapshots at 20 and 40."""
    bench = Bench(**other)
    bench.steps(1, 20)
    bench.snapshots(20, quality=Quality.GOOD)
    bench.steps(21, 40)
    bench.snapshots(40, quality=Quality.GOOD)
    bench.steps(41, 99)
    bench.steps(100, 101, loss=6.0)
    return bench
