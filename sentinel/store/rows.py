"""Turn the nouns of the system into rows of tables. Pure."""

import math
import operator
from collections.abc import Mapping
from typing import Any

from sentinel.records import (
    Ack,
    Command,
    Decision,
    Finding,
    Incident,
    Origin,
    PhaseNote,
    Reflex,
    SnapshotNote,
    StepRecord,
    Trouble,
    Word,
)
from sentinel.store.tables import steps
from sentinel.store.values import finite, set_aside, to_text, word_of
from sentinel.vocabulary import Outcome

Row = dict[str, Any]

STEP_COLUMNS = tuple(column.name for column in steps.columns)
# The key's columns come from the origin, `nonfinite` is ours; all others are fields of StepRecord.
_FIELDS = STEP_COLUMNS[STEP_COLUMNS.index("seq") : -1]
_take = operator.attrgetter(*_FIELDS)
_FLOATS = tuple(index for index, name in enumerate(_FIELDS) if steps.columns[name].type.python_type is float)
_STRUCTURED = tuple(_FIELDS.index(name) for name in ("optimizers", "reported", "sampled"))
_RESULT = _FIELDS.index("result")
_HOST_MEMORY = _FIELDS.index("host_memory_bytes")


def of_step(origin: Origin, record: StepRecord, host_memory_bytes: int | None) -> tuple[Any, ...]:
    """The values of STEP_COLUMNS. The hot path: once per record of every rank."""
    values = list(_take(record))
    nonfinite = None
    for index in _FLOATS:
        value = values[index]
        if value is not None and not math.isfinite(value):
            part = f"{_FIELDS[index]}={word_of(value)}"
            nonfinite = part if nonfinite is None else f"{nonfinite},{part}"
            values[index] = None
    for index in _STRUCTURED:
        if values[index] is not None:
            values[index] = to_text(values[index])
    values[_RESULT] = record.result.value
    if host_memory_bytes is not None:
        values[_HOST_MEMORY] = host_memory_bytes
    run_id, attempt, rank = origin
    return (run_id, attempt, record.generation, record.step, rank, *values, nonfinite)


def of_snapshot(origin: Origin, note: SnapshotNote) -> Row:
    return {
        **_whose(origin),
        "generation": note.generation,
        "step": note.step,
        "tier": note.tier,
        "quality": note.quality.value,
        "verified": note.verified,
        "reason": note.reason,
        "program_point": note.program_point,
        "digest": note.digest,
        "seq": note.seq,
        "size_bytes": note.size_bytes,
        "time": finite(note.time),
        "seconds": finite(note.seconds),
        "kept": note.kept,
    }


def of_ack(origin: Origin, ack: Ack) -> Row:
    return {
        **_whose(origin),
        "seq": ack.seq,
        "command_id": ack.command_id,
        "state": ack.state,
        "reason": ack.reason.value,
        "text": ack.text,
        "candidates": to_text(ack.candidates),
        "generation": ack.generation,
        "step": ack.step,
        "target_step": ack.target_step,
        "skipped_batches": ack.skipped_batches,
        "time": finite(ack.time),
        "seconds": finite(ack.seconds),
        "lr_aligned": ack.lr_aligned,
    }


def of_event(origin: Origin, message: Reflex | PhaseNote | Trouble) -> Row:
    """Whatever is neither telemetry nor an answer; the body keeps all its fields."""
    row = {
        **_whose(origin),
        "generation": None,
        "step": message.step,
        "seq": message.seq,
        "time": finite(message.time),
        "body": to_text({name: getattr(message, name) for name in message.__struct_fields__}),
    }
    if isinstance(message, Reflex):
        return {**row, "kind": "reflex", "generation": message.generation, "text": message.kind.value}
    if isinstance(message, PhaseNote):
        return {**row, "kind": "phase", "text": f"{message.phase} {'began' if message.entered else 'ended'}"}
    return {**row, "kind": "trouble", "text": f"{message.what}: {message.text}"}


def of_replaced_step(old: Mapping[str, Any]) -> Row:
    """A step row whose key a later record took: kept as an event, so that nothing is lost silently."""
    return {
        **{name: old[name] for name in ("run_id", "attempt", "rank", "generation", "step", "seq", "time")},
        "kind": "replaced_step",
        "text": "a later record of the same attempt, generation, rank and step took its place",
        "body": to_text(dict(old)),
    }


def of_finding(origin: Origin, finding: Finding, generation: int, time: float, incident_id: str) -> Row:
    row = {
        **_whose(origin),
        "generation": generation,
        "time": time,
        "incident_id": incident_id,
        "kind": finding.kind.value,
        "severity": finding.severity.value,
        "tier": finding.tier.value,
        "step": finding.step,
        "onset_step": finding.onset_step,
        "detector": finding.detector,
        "summary": finding.summary,
        "value": finding.value,
        "expected": finding.expected,
        "evidence": to_text(finding.evidence),
        "ranks": to_text(finding.ranks),
    }
    set_aside(row, ("value", "expected"))
    return row


def of_incident(incident: Incident) -> Row:
    row = {name: getattr(incident, name) for name in incident.__struct_fields__}
    for name in ("kind", "severity", "tier", "status"):
        row[name] = row[name].value
    for name in ("evidence", "ranks"):
        row[name] = to_text(row[name])
    return row


def of_decision(
    decision_id: str, origin: Origin, generation: int, time: float, *, decision: Decision, outcome: Outcome | None
) -> Row:
    return {
        **_whose(origin),
        "id": decision_id,
        "generation": generation,
        "time": time,
        "incident_id": decision.incident_id,
        "action": decision.action.value,
        "reason": decision.reason.value,
        "text": decision.text,
        "data": decision.data,
        "step": decision.step,
        "onset_step": decision.onset_step,
        "wanted_target_step": decision.target_step,
        "skip_batches": decision.skip_batches,
        "size": decision.size,
        "limit_seconds": finite(decision.limit_seconds),
        "factor": finite(decision.factor),
        "pending_ok": decision.pending_ok,
        "outcome": None if outcome is None else outcome.value,
    }


def of_command(command: Command, decision_id: str, time: float) -> Row:
    return {
        "command_id": command.id,
        "state": "prepare",
        "decision_id": decision_id,
        "run_id": command.run_id,
        "attempt": command.attempt,
        "generation": command.generation,
        "sequence": command.sequence,
        "action": command.action.value,
        "reason": command.reason,
        "apply_at": command.apply_at,
        "target_step": command.target_step,
        "body": to_text({name: getattr(command, name) for name in command.__struct_fields__}),
        "time": time,
    }


def of_word(word: Word, prepared: Mapping[str, Any], time: float) -> Row:
    """The row of a commit or abort beside that of its prepare (empty when there is none)."""
    same = ("decision_id", "run_id", "attempt", "generation", "sequence", "action", "apply_at")
    return {
        "command_id": word.command_id,
        "state": "commit" if word.commit else "abort",
        **{name: prepared.get(name) for name in same},
        "reason": word.reason.value,
        "target_step": word.target_step,
        "body": None,
        "time": time,
    }


def _whose(origin: Origin) -> Row:
    return {"run_id": origin.run_id, "attempt": origin.attempt, "rank": origin.rank}
