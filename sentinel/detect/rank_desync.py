"""Find ranks whose parameters have come to differ from those of their replicas.

Replicas start equal and apply equal updates, so the bits of their parameters stay equal. A fingerprint is a sum of
bits per layer group, sampled on all ranks at the same step; one that differs is certain (T0). A silent error of the
hardware, a collective that one rank was behind in, or a random number drawn on one rank alone makes it differ.

A group counts as replicated once all ranks agreed on it, or when DDP averages its gradients: shards, pipeline stages
and ranks that train models of their own never agree, and are no anomaly.
"""

from collections import Counter
from typing import Any

import msgspec

from sentinel.detect.run_detector import Comparison
from sentinel.detect.statistics import plain
from sentinel.detect_settings import RankDesyncSettings
from sentinel.records import Finding, StepRecord
from sentinel.vocabulary import Kind, Severity, Tier

MOST_OPEN = 64  # sampled steps that wait for ranks: one rank's records may be delivered long after another's
LEAST_OPEN = 4
MOST_PRINTS = 4096  # of all ranks and open steps together, for large worlds
MOST_NAMED = 8  # groups in the evidence

Prints = dict[str, int]  # group -> fingerprint


class Open(msgspec.Struct):
    """A sampled step of which not every rank has told yet."""

    generation: int
    step: int
    prints: dict[int, Prints] = {}  # by rank
    averaged: bool = False  # DDP averages the gradients


class Memory(msgspec.Struct):
    """All that the detector knows."""

    generation: int = 0
    agreed: dict[
        str, int
    ] = {}  # group -> the latest step of this generation at which all ranks agreed; -1 if earlier
    waiting: list[Open] = []  # oldest first
    given_up: int = -1  # the latest step that is waited for no longer


class RankDesync:
    """Kind rank_desync.

    >>> from sentinel.records import StepRecord
    >>> from sentinel.sample import Sample
    >>> from sentinel.vocabulary import UpdateResult
    >>> def told(step, bits):
    ...     return StepRecord(1, 0, step, 0.0, UpdateResult.APPLIED, sampled=Sample(fingerprint={"layer": bits}))
    >>> detector = RankDesync(RankDesyncSettings(), world_size=3)
    >>> [detector.observe(rank, told(10, 7)) for rank in (0, 1, 2)]
    [None, None, Comparison(finding=None)]
    >>> found = [detector.observe(rank, told(20, 8 if rank == 1 else 7)) for rank in (0, 1, 2)][2].finding
    >>> found.ranks, found.onset_step, found.evidence["observers"], found.evidence["groups"]
    ((1,), 11, [0, 2], ['layer'])
    """

    name = "rank_desync"

    def __init__(self, settings: RankDesyncSettings, world_size: int) -> None:
        del settings  # nothing to tune: bits are equal or they are not
        self._world_size = world_size
        self._most_open = max(LEAST_OPEN, min(MOST_OPEN, MOST_PRINTS // world_size))
        self._memory = Memory()

    def observe(self, rank: int, seen: StepRecord) -> Comparison | None:
        prints = seen.sampled.fingerprint if seen.sampled is not None else None
        memory = self._memory
        if not prints or seen.generation < memory.generation:
            return None
        if seen.generation == memory.generation and seen.step <= memory.given_up:
            return None
        if seen.generation > memory.generation:
            memory.generation, memory.waiting, memory.given_up = seen.generation, [], -1
            memory.agreed = dict.fromkeys(memory.agreed, -1)
        step, given_up = self._open(seen)
        step.prints[rank] = prints
        step.averaged = step.averaged or seen.communication_source == "ddp"
        if len(step.prints) >= self._world_size:
            # Ranks may sample at different cadences. Each tells in order: of an older step nothing more will come.
            memory.waiting = [one for one in memory.waiting if one.step > step.step]
            return Comparison(self._compare(step))
        finding = self._compare(given_up) if given_up is not None and len(given_up.prints) > 1 else None
        return Comparison(finding) if finding is not None else None  # some that agree prove nothing of the rest

    def state(self) -> dict[str, Any]:
        return plain(self._memory)

    def restore(self, state: dict[str, Any]) -> None:
        self._memory = msgspec.convert(state, Memory)

    def _open(self, seen: StepRecord) -> tuple[Open, Open | None]:
        """The step of this record, and one that is waited for no longer: some rank's record of it was dropped."""
        waiting = self._memory.waiting
        for step in waiting:
            if step.step == seen.step:
                return step, None
        fresh = Open(seen.generation, seen.step)
        waiting.append(fresh)
        if len(waiting) <= self._most_open:
            return fresh, None
        oldest = waiting.pop(0)
        self._memory.given_up = oldest.step
        return fresh, oldest

    def _compare(self, step: Open) -> Finding | None:
        agreed = self._memory.agreed
        first, *others = step.prints.values()
        common = [group for group in first if all(group in prints for prints in others)]
        differing = [group for group in common if any(prints[group] != first[group] for prints in others)]
        since = min((agreed.get(group, -1) for group in differing), default=-1)
        certain = [group for group in differing if step.averaged or group in agreed]
        if len(step.prints) >= self._world_size:
            agreed |= dict.fromkeys((group for group in common if group not in differing), step.step)
        return self._finding(step, certain, since if since < step.step else -1) if certain else None

    def _finding(self, step: Open, groups: list[str], agreed_step: int) -> Finding:
        odd, observers = _sides({rank: tuple(prints[one] for one in groups) for rank, prints in step.prints.items()})
        named = groups[0] if len(groups) == 1 else f"{groups[0]} and {len(groups) - 1} more groups"
        who = "rank " + str(odd[0]) if len(odd) == 1 else "ranks " + ", ".join(map(str, odd[:MOST_NAMED]))
        against = "those of the others" if observers else "each other's"
        return Finding(
            kind=Kind.RANK_DESYNC,
            severity=Severity.CRITICAL,
            tier=Tier.T0,
            step=step.step,
            onset_step=agreed_step + 1 if agreed_step >= 0 else step.step,
            detector=self.name,
            summary=f"the parameters of {who} differ from {against} at step {step.step}, in {named}",
            evidence={
                "groups": groups[:MOST_NAMED],
                "differing_groups": len(groups),
                "observers": observers,
                "agreed_step": agreed_step if agreed_step >= 0 else None,
            },
            ranks=tuple(odd),
        )


def _sides(told: dict[int, tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """(the ranks to name, those that agree): the minority if there is a majority, else everybody."""
    usual, count = Counter(told.values()).most_common(1)[0]
    if 2 * count <= len(told):
        return sorted(told), []
    return sorted(rank for rank in told if told[rank] != usual), sorted(rank for rank in told if told[rank] == usual)
