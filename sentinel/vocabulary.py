"""The closed sets of words: kinds, actions, reasons and the rest. The same word everywhere, from ack to report."""

from enum import StrEnum


class Kind(StrEnum):
    """Everything that can go wrong, by name (design section 6)."""

    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_GRADIENT = "nonfinite_gradient"
    NONFINITE_STATE = "nonfinite_state"
    SCALE_COLLAPSE = "scale_collapse"
    LOSS_SPIKE = "loss_spike"
    LOSS_DIVERGENCE = "loss_divergence"
    LOSS_PLATEAU = "loss_plateau"
    LOSS_CONSTANT = "loss_constant"
    NO_DESCENT = "no_descent"
    LOSS_OSCILLATION = "loss_oscillation"
    GRADIENT_EXPLOSION = "gradient_explosion"
    GRADIENT_VANISHING = "gradient_vanishing"
    GRADIENT_SIGMA = "gradient_sigma"
    CLIP_SATURATION = "clip_saturation"
    RANK_DESYNC = "rank_desync"
    LR_DISCONTINUITY = "lr_discontinuity"
    SCHEDULER_DRIFT = "scheduler_drift"
    RESUME_DISCONTINUITY = "resume_discontinuity"
    MEMORY_LEAK = "memory_leak"
    MEMORY_FRAGMENTATION = "memory_fragmentation"
    HOST_MEMORY_LEAK = "host_memory_leak"
    OOM = "oom"
    LOW_UTILIZATION = "low_utilization"
    DATA_STALL = "data_stall"
    COMMUNICATION_SHARE = "communication_share"
    NETWORK_JITTER = "network_jitter"
    STRAGGLER = "straggler"
    STALL = "stall"
    DEAD_RANK = "dead_rank"
    EXPERT_IMBALANCE = "expert_imbalance"
    THROUGHPUT_REGRESSION = "throughput_regression"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    CHECKPOINT_STALE = "checkpoint_stale"
    DISK_LOW = "disk_low"
    COMMUNICATION_ERROR = "communication_error"
    GPU_FAULT = "gpu_fault"
    UNEVEN_DATA = "uneven_data"
    CRASH = "crash"
    PREEMPTION = "preemption"
    SENTINEL_DEGRADED = "sentinel_degraded"


class Severity(StrEnum):
    INFO = "info"  # good to know
    WARNING = "warning"  # look at it
    CRITICAL = "critical"  # the run is in danger


class Tier(StrEnum):
    """How sure a finding is, and so whether it may act."""

    T0 = "T0"  # certain
    T1 = "T1"  # notice, warns only
    T2 = "T2"  # confirmed abrupt
    T3 = "T3"  # confirmed slow


class Action(StrEnum):
    NONE = "none"  # recorded only
    SKIP_UPDATE = "skip_update"  # this update is not applied
    ROLLBACK = "rollback"  # back to a verified snapshot, same process
    RETRY = "retry"  # the same step again
    RESIZE = "resize"  # another micro-batch, the same global batch
    SCALE_LR = "scale_lr"  # the learning rate times a factor, for a while
    RAISE_PRECISION = "raise_precision"  # a wider number format
    ACCUMULATE = "accumulate"  # synchronise less often
    COMPRESS = "compress"  # smaller messages between ranks
    SHRINK = "shrink"  # go on with fewer data-parallel replicas
    RESTART = "restart"  # a new process from a checkpoint
    PAUSE = "pause"  # wait for a person
    STOP = "stop"  # end the run in order


class Outcome(StrEnum):
    PENDING = "pending"  # in flight
    APPLIED = "applied"  # carried out and verified
    REFUSED = "refused"  # the rank said no, with a reason
    FAILED = "failed"  # tried, and not verified
    ABORTED = "aborted"  # prepared, then not committed


class Quality(StrEnum):
    PENDING = "PENDING"  # finite, not proven yet
    GOOD = "GOOD"  # finite, and followed by enough clean steps
    SUSPECT = "SUSPECT"  # taken at or shortly before the onset of an incident
    BAD = "BAD"  # not finite, changed in memory, or of another state


class Mode(StrEnum):
    """In falling order of power; SENTINEL_MODE can only go down this list."""

    PROTECT = "protect"  # watches and acts
    OBSERVE = "observe"  # watches, never acts
    OFF = "off"  # does nothing


class UpdateResult(StrEnum):
    """What became of one update attempt."""

    APPLIED = "applied"  # the weights changed
    OVERFLOW = "overflow"  # GradScaler skipped it: normal under AMP
    REFLEX = "reflex"  # sentinel skipped it: a non-finite gradient
    TURN = "turn"  # the attempt in whose place a turn was carried out


class DropReason(StrEnum):
    OUTBOX_FULL = "outbox_full"  # the client's queue was full, its oldest telemetry went
    PROCESS_DIED = "process_died"  # the process ended before it could send them
    TOO_LARGE = "too_large"  # the message would not fit a frame
    UNEXPLAINED = "unexplained"  # a hole in the numbers that no gap marker explains


class AlertChannel(StrEnum):
    """Where alerts can go."""

    WEBHOOK = "webhook"  # any receiver of Standard Webhooks
    ALERTMANAGER = "alertmanager"  # Prometheus Alertmanager
    SLACK = "slack"  # an incoming webhook of Slack


class AlertCondition(StrEnum):
    """What an alert says."""

    FIRING = "firing"  # an incident opened, or its severity rose
    RESOLVED = "resolved"  # it has ended


class AlertState(StrEnum):
    """What became of an alert."""

    DUE = "due"  # to be sent, for the first time or again
    SENT = "sent"  # the receiver said that it has it
    FAILED = "failed"  # given up: refused for good, or not delivered within notify.give_up_seconds


class AlertOutcome(StrEnum):
    """How one attempt to send an alert ended."""

    SENT = "sent"  # delivered
    RETRIED = "retried"  # not delivered; tried again later
    FAILED = "failed"  # not delivered; given up


class RunStatus(StrEnum):
    RUNNING = "running"  # a rank is connected, or may come back
    COMPLETED = "completed"  # every rank said that it is done
    FAILED = "failed"  # ended by an exception
    LOST = "lost"  # the process vanished without a word


class Reason(StrEnum):
    """Why something was done or not done. One set for decisions, acks, logs, the database and the report."""

    # decisions that act
    CONFIRMED = "confirmed"  # the finding is confirmed and within its budget
    RECURRED = "recurred"  # it came back after an earlier action; the next rung of the ladder
    REQUESTED = "requested"  # a person asked for it
    REFLEX = "reflex"  # decided in the loop, before the update
    # decisions that do not
    NOTICE_ONLY = "notice_only"  # tier T1 never acts
    HARMLESS = "harmless"  # e.g. a NaN loss with finite gradients and weights
    UNCONFIRMED = "unconfirmed"  # still within its confirmation window
    OBSERVE_MODE = "observe_mode"  # the run only watches
    NOT_ALLOWED = "not_allowed"  # respond.allow leaves it out
    COOLDOWN = "cooldown"  # too soon after the last action for this kind
    BUDGET_SPENT = "budget_spent"  # respond.budget actions within respond.window_steps already
    RANKS_MISSING = "ranks_missing"  # not every rank of the world is connected
    SEVERAL_RANKS = "several_ranks"  # turns on more than one rank are not available in this version
    IN_FLIGHT = "in_flight"  # another command has not ended yet
    NO_SNAPSHOT = "no_snapshot"  # nothing verified and older than the onset to return to
    NO_RECORD = "no_record"  # the action could not be written down first
    SELF_HEALED = "self_healed"  # it ended by itself before anything was due
    NO_ACTION_FOR_KIND = "no_action_for_kind"  # recorded only; see docs/kinds.md
    LOOP_CANNOT = "loop_cannot"  # the loop does not offer what the action needs
    NO_DISK_TIER = "no_disk_tier"  # checkpoints on disk are not available in this version
    RUN_ENDED = "run_ended"  # nobody is left to act on
    # verdicts and acks
    OK = "ok"  # done as asked
    STALE_GENERATION = "stale_generation"  # history was rewritten since the command was made
    WRONG_RUN = "wrong_run"  # the command names another run or attempt
    REPLAYED = "replayed"  # its sequence number is not above the last one seen
    EXPIRED = "expired"  # it came after not_after
    TOO_LATE = "too_late"  # the rank's step had passed apply_at
    BUSY = "busy"  # another command is pending on the rank
    WRONG_PHASE = "wrong_phase"  # the loop is not training, for instance in `run.phase("eval")`
    NO_WORD = "no_word"  # neither commit nor abort came in time
    DETACHED = "detached"  # the Run has ended on this rank
    NOT_VERIFIED = "not_verified"  # the restored state failed its check
    UNKNOWN_VERB = "unknown_verb"  # `sentinel ctl` was asked for something that it does not know
    LIMIT_REACHED = "limit_reached"  # a pause reached its limit
    ERROR = "error"  # something of ours failed; the text says what


# How the norm was had. "clip": the loop's own clipping computed it; "own": sentinel did; "changed": sentinel did, but
# the loop had written to the gradients after its backward, so it is perhaps the norm after clipping; "local": of this
# rank's shards, squares add up over the ranks; "part": of its shards, and how they add up is not known.
GRAD_NORM_SOURCES = ("clip", "own", "changed", "local", "part")


class Delivery(StrEnum):
    """What sentinel promises about a message (design section 5)."""

    TELEMETRY = "telemetry"  # may be dropped, always counted
    LASTING = "lasting"  # may be late, never dropped by us
    CRITICAL = "critical"  # spooled by the client until acknowledged, FULL-synced by the daemon before that


class IncidentStatus(StrEnum):
    """Where an incident stands."""

    OPEN = "open"  # it holds, or has not been quiet for long enough
    RESOLVED = "resolved"  # it is over
    GAVE_UP = "gave_up"  # the run ended before it was over
