"""Every immutable noun that moves through the system. Read this first.

The nouns follow one path: StepRecord/Event -> Finding -> Incident -> Decision -> Command -> Ack -> Outcome.
Those that cross the wire are msgspec structs packed as tagged arrays. A connection belongs to one `Origin`, so that
what it carries repeats neither run, attempt nor rank.
"""

from typing import Any, NamedTuple

import msgspec

from sentinel.sample import Sample
from sentinel.vocabulary import (
    Action,
    Delivery,
    DropReason,
    IncidentStatus,
    Kind,
    Mode,
    Outcome,
    Quality,
    Reason,
    Severity,
    Tier,
    UpdateResult,
)


class Origin(NamedTuple):
    """Who speaks: one rank of one attempt of one run."""

    run_id: str
    attempt: int
    rank: int


class _Wire(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=False):
    """A message on the wire. New fields go to the end, with a default, so that older readers still decode."""


# ---------------------------------------------------------------- rank -> daemon, numbered by `seq`


class StepRecord(_Wire, frozen=True, tag="step"):
    """What one rank saw of one update attempt. Absent is None, never 0. Delivery: telemetry."""

    seq: int  # grows by one per message of this rank, across all message types
    generation: int
    step: int  # number of the update attempt, the first is 1
    time: float  # wall clock, unix seconds, when the attempt ended
    result: UpdateResult  # what became of the update
    loss: float | None = None  # reported, else the captured objective, unscaled
    grad_norm: float | None = None  # global L2, before clipping, unscaled
    grad_norm_source: str | None = None  # one of GRAD_NORM_SOURCES
    lr: float | None = None
    loss_scale: float | None = None
    step_seconds: float | None = None  # end of the previous attempt to end of this one
    data_wait_seconds: float | None = None  # waiting for data: in run.batches, else in torch's DataLoader
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    applied: int = 0  # updates applied since the start of the attempt
    skipped: int = 0  # updates not applied: AMP overflows and reflexes
    tokens: float | None = None
    samples: float | None = None
    memory_allocated_bytes: int | None = None  # device
    memory_reserved_bytes: int | None = None  # device
    memory_peak_bytes: int | None = None  # device
    host_memory_bytes: int | None = None  # USS of the process tree; filled in by the daemon
    data_position: int | None = None  # batches that run.batches has handed out
    hook_seconds: float | None = None  # sentinel's own time inside this step
    clip_max_norm: float | None = None
    optimizers: dict[str, dict[str, float]] | None = None  # per optimizer, only with several
    reported: dict[str, float] | None = None  # other values the user reported
    forward_seconds: float | None = None  # from the batch's arrival, or the last backward's end, to backward
    communication_wait_seconds: float | None = None  # waiting for other ranks
    communication_source: str | None = None  # how that was had: "ddp", "work"
    grad_norm_local: float | None = None  # of this rank's shards: with source "local" squares add up over the ranks
    clip_fraction: float | None = None  # share of the last 100 clipped updates whose gradients were made smaller
    scheduler_steps: int | None = None  # steps of the lr scheduler since the start of the attempt
    evaluations: int | None = None  # of the closure, for optimizers that take one
    gradients_absent: int | None = None  # trainable parameters of the optimizers without a gradient
    flops: float | None = None  # floating point operations of this step on this rank, where known
    mfu_ratio: float | None = None  # model FLOPs utilisation: flops per second over the device's peak
    sampled: Sample | None = None  # on the steps that are sampled

    delivery = Delivery.TELEMETRY


class RunStart(_Wire, frozen=True, tag="start"):
    """A rank attached. Everything that identifies the run (design section 14)."""

    seq: int
    time: float
    step: int  # run.step at attach; the state restored from a step-0 snapshot is that one
    name: str
    mode: Mode
    world_size: int
    local_rank: int
    pid: int
    process_start: float  # psutil's create_time, so that a reused pid is not taken for ours
    host: str
    argv: list[str]
    cwd: str
    git: dict[str, Any]  # {"commit", "dirty"}; empty outside a repository
    packages: dict[str, str]  # name -> version, of what matters to the run
    config: dict[str, Any]  # the user's hyperparameters
    settings: dict[str, Any]  # the sections of sentinel.toml that the run asked for
    devices: list[str]
    can: list[str] = []  # what this loop can do: "rollback", "skip_data", "replay_data", "pause", "stop"

    delivery = Delivery.CRITICAL


class RunEnd(_Wire, frozen=True, tag="end"):
    """A rank is done: detached, its process ends, or an exception ended it."""

    seq: int
    time: float
    generation: int
    step: int
    status: str  # "completed" or "failed"
    error: str = ""  # type and text of the exception, never its frames

    delivery = Delivery.CRITICAL


class Reflex(_Wire, frozen=True, tag="reflex"):
    """The loop skipped an update by itself before the daemon could know (design section 4)."""

    seq: int
    time: float
    generation: int
    step: int
    kind: Kind
    action: Action
    outcome: Outcome
    consecutive: int  # non-finite gradients in a row, this one included
    evidence: dict[str, Any] = {}

    delivery = Delivery.CRITICAL


class SnapshotNote(_Wire, frozen=True, tag="snapshot"):
    """A snapshot was taken, judged or dropped. The latest note about (generation, step, tier) holds."""

    seq: int
    time: float
    generation: int
    step: int  # run.step whose finished state it holds
    tier: str  # "ram" or "disk"
    quality: Quality
    verified: bool  # finite check and digest passed
    reason: str  # why it has this quality; for BAD, the first bad tensor
    program_point: str  # "batches" or "step"
    size_bytes: int
    seconds: float
    digest: str = ""
    kept: bool = True  # False: it left the ring

    delivery = Delivery.LASTING


class PhaseNote(_Wire, frozen=True, tag="phase"):
    """A phase began or ended. A stall inside one is not a hang."""

    seq: int
    time: float
    step: int
    phase: str
    entered: bool

    delivery = Delivery.LASTING


class Trouble(_Wire, frozen=True, tag="trouble"):
    """Sentinel itself is degraded on this rank (a probe disabled, the spool unwritable, a snapshot refused)."""

    seq: int
    time: float
    step: int
    what: str  # a short closed word: "probe", "spool", "snapshot", "data", "boundary"
    text: str

    delivery = Delivery.LASTING


class Ack(_Wire, frozen=True, tag="ack"):
    """A rank's answer to a command: prepared or refused, later its outcome."""

    seq: int
    time: float
    command_id: str
    state: str  # "prepared" | "refused" | "applied" | "failed" | "aborted" | "released" (a pause ended)
    reason: Reason
    text: str = ""
    generation: int = 0  # after the command
    step: int = 0  # run.step when the ack was made
    target_step: int | None = None  # whose finished state was restored
    skipped_batches: int | None = None
    seconds: float | None = None
    lr_aligned: bool | None = None
    candidates: list[tuple[int, Quality, str]] = []  # prepared rollbacks: (step, quality, digest), newest first

    delivery = Delivery.CRITICAL


# ---------------------------------------------------------------- rank -> daemon, not numbered


class Hello(_Wire, frozen=True, tag="hello"):
    """First message of a rank. The daemon answers `Welcome` or closes."""

    version: int
    run_id: str
    rank: int
    world_size: int
    nonce: str  # new in each process lifetime; tells the daemon which attempt this is
    pid: int
    process_start: float
    last_seq: int  # highest sequence number produced so far


class Gap(_Wire, frozen=True, tag="gap"):
    """The numbers first_seq..last_seq will never come: they were dropped here, counted, with the reason."""

    first_seq: int
    last_seq: int
    reason: DropReason

    @property
    def count(self) -> int:
        return self.last_seq - self.first_seq + 1


class Heartbeat(_Wire, frozen=True, tag="heartbeat"):
    """From the client's helper thread, about once a second: alive, and how far."""

    time: float
    step: int
    phase: str
    last_seq: int
    dropped: dict[str, int]  # totals by reason
    hook_seconds: float  # sentinel's own time in the loop, total


# ---------------------------------------------------------------- daemon -> rank


class Welcome(_Wire, frozen=True, tag="welcome"):
    version: int
    run_id: str
    attempt: int
    stored_seq: int  # everything up to here is safe: stored, or recorded as a gap
    url: str
    may_act: bool  # False while ranks are missing
    mode: Mode


class Stored(_Wire, frozen=True, tag="stored"):
    """Cumulative: every message up to `seq` is on disk or recorded as a gap."""

    seq: int


class Command(_Wire, frozen=True, tag="command"):
    """Prepare: what all ranks shall do at one step, if the word is commit."""

    id: str
    run_id: str
    attempt: int
    generation: int
    sequence: int  # grows per run; a lower one than the last seen is refused as replayed
    not_after: float  # CLOCK_MONOTONIC seconds of this node
    action: Action
    apply_at: int  # carried out when run.step (update attempts) reaches this number
    reason: str
    target_step: int | None = None  # rollback: asked for by a person; None = the dispatcher chooses at commit
    onset_step: int | None = None  # rollback: the target must be older than this
    pending_ok: bool = False  # rollback: the onset is exact, a finite PENDING snapshot will do
    data: str = "skip"  # rollback: "skip" the bad window or "replay" it
    skip_batches: int | None = None  # rollback: leave out this many batches after the target, None = the window
    limit_seconds: float | None = None  # pause
    factor: float | None = None
    size: int | None = None


class Word(_Wire, frozen=True, tag="word"):
    """Commit or abort of a prepared command."""

    command_id: str
    commit: bool
    reason: Reason
    target_step: int | None = None


class Mark(_Wire, frozen=True, tag="mark"):
    """An incident opened: snapshots of finished steps >= `since_step` become SUSPECT, the newest GOOD is pinned.

    With `clear=True` the incident ended without harm: SUSPECT goes back to PENDING, the pin is taken off.
    """

    generation: int
    since_step: int
    clear: bool = False


class Roster(_Wire, frozen=True, tag="roster"):
    """How many ranks of the world are connected; `may_act` once all are."""

    connected: int
    world_size: int
    may_act: bool


# ---------------------------------------------------------------- control socket: one request, one reply


class ControlRequest(_Wire, frozen=True, tag="ctl"):
    """From `sentinel ctl` over the Unix socket."""

    version: int
    verb: str  # status | pause | resume | rollback | stop | checkpoint | ...
    run: str  # latest, an id, a unique prefix or a name
    arguments: dict[str, Any] = {}


class ControlReply(_Wire, frozen=True, tag="reply"):
    ok: bool
    reason: str
    body: dict[str, Any] = {}


Numbered = StepRecord | RunStart | RunEnd | Reflex | SnapshotNote | PhaseNote | Trouble | Ack
FromRank = Hello | Gap | Heartbeat | ControlRequest | Numbered
FromDaemon = Welcome | Stored | Command | Word | Mark | Roster | ControlReply
Observation = StepRecord | Reflex | SnapshotNote  # what detectors see


# ---------------------------------------------------------------- inside the daemon, and in replay


class Finding(msgspec.Struct, frozen=True):
    """A detector's statement about one observation."""

    kind: Kind
    severity: Severity
    tier: Tier
    step: int
    onset_step: int  # estimated first affected step
    detector: str
    summary: str  # one sentence for a person
    value: float | None = None  # what was seen; may be non-finite
    expected: float | None = None
    evidence: dict[str, Any] = {}
    ranks: tuple[int, ...] = ()


class Incident(msgspec.Struct, frozen=True):
    """One trouble of one run, however many steps it lasts and findings it gathers."""

    id: str
    run_id: str
    attempt: int
    generation: int
    kind: Kind
    severity: Severity
    tier: Tier
    ranks: tuple[int, ...]
    first_step: int
    onset_step: int
    last_step: int
    status: IncidentStatus
    summary: str
    cause: str
    evidence: dict[str, Any]
    opened_at: float  # unix seconds; RFC 3339 in every output
    resolved_at: float | None = None


class Decision(msgspec.Struct, frozen=True):
    """What to do about an incident, and why; `none` is a decision too."""

    action: Action
    reason: Reason
    text: str  # one sentence for a person
    incident_id: str = ""
    step: int = 0
    onset_step: int | None = None
    target_step: int | None = None
    pending_ok: bool = False
    data: str = "skip"
    skip_batches: int | None = None
    limit_seconds: float | None = None
    factor: float | None = None
    size: int | None = None
