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
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Tier(StrEnum):
    """How sure a finding is, and so whether it may act."""

    T0 = "T0"  # certain
    T1 = "T1"  # notice, warns only
    T2 = "T2"  # confirmed abrupt
    T3 = "T3"  # confirmed slow


class Action(StrEnum):
    NONE = "none"
    SKIP_UPDATE = "skip_update"
    ROLLBACK = "rollback"
    RETRY = "retry"
    RESIZE = "resize"
    SCALE_LR = "scale_lr"
    RAISE_PRECISION = "raise_precision"
    ACCUMULATE = "accumulate"
    COMPRESS = "compress"
    SHRINK = "shrink"
    RESTART = "restart"
    PAUSE = "pause"
    STOP = "stop"


class Outcome(StrEnum):
    PENDING = "pending"
    APPLIED = "applied"
    REFUSED = "refused"
    FAILED = "failed"
    ABORTED = "aborted"


class Quality(StrEnum):
    PENDING = "PENDING"
    GOOD = "GOOD"
    SUSPECT = "SUSPECT"
    BAD = "BAD"


class Mode(StrEnum):
    """In falling order of power; SENTINEL_MODE can only go down this list."""

    PROTECT = "protect"
    OBSERVE = "observe"
    OFF = "off"


class UpdateResult(StrEnum):
    """What became of one update attempt."""

    APPLIED = "applied"
    OVERFLOW = "overflow"  # GradScaler skipped it: normal under AMP
    REFLEX = "reflex"  # sentinel skipped it: a non-finite gradient
    TURN = "turn"  # the attempt in whose place a turn was carried out


class DropReason(StrEnum):
    OUTBOX_FULL = "outbox_full"  # the client's queue was full, its oldest telemetry went
    PROCESS_DIED = "process_died"  # the process ended before it could send them
    TOO_LARGE = "too_large"  # the message would not fit a frame
    UNEXPLAINED = "unexplained"  # a hole in the numbers that no gap marker explains


class RunStatus(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
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
    OBSERVE_MODE = "observe_mode"
    NOT_ALLOWED = "not_allowed"  # respond.allow leaves it out
    COOLDOWN = "cooldown"
    BUDGET_SPENT = "budget_spent"
    RANKS_MISSING = "ranks_missing"  # not every rank of the world is connected
    SEVERAL_RANKS = "several_ranks"  # turns on more than one rank are not available in this version
    IN_FLIGHT = "in_flight"  # another command has not ended yet
    NO_SNAPSHOT = "no_snapshot"  # nothing verified and older than the onset to return to
    NO_RECORD = "no_record"  # the action could not be written down first
    SELF_HEALED = "self_healed"
    NO_ACTION_FOR_KIND = "no_action_for_kind"
    LOOP_CANNOT = "loop_cannot"  # the loop does not offer what the action needs
    NO_DISK_TIER = "no_disk_tier"  # checkpoints on disk are not available in this version
    RUN_ENDED = "run_ended"
    # verdicts and acks
    OK = "ok"
    STALE_GENERATION = "stale_generation"
    WRONG_RUN = "wrong_run"
    REPLAYED = "replayed"
    EXPIRED = "expired"
    TOO_LATE = "too_late"  # the rank's step had passed apply_at
    BUSY = "busy"  # another command is pending on the rank
    WRONG_PHASE = "wrong_phase"
    NO_WORD = "no_word"  # neither commit nor abort came in time
    DETACHED = "detached"
    NOT_VERIFIED = "not_verified"  # the restored state failed its check
    UNKNOWN_VERB = "unknown_verb"
    LIMIT_REACHED = "limit_reached"  # a pause reached its limit
    ERROR = "error"
