"""The dashboard of one training run: is it learning, how fast, what went wrong, what was done about it."""

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.distributions import experts, gradients
from dashboards.parts import (
    ANY_IS_BAD,
    ANY_IS_GOOD,
    COUNT,
    COUNTS,
    EXACT,
    GRAFANA,
    PROMETHEUS,
    RANKS,
    RUN,
    Look,
    Panel,
    Query,
    Section,
    buckets,
    finished,
    lines,
    number,
    page,
    rows,
)

UID = "sentinel-run"
_OFTEN = "[$__rate_interval]"


def page_of_run() -> Dashboard:
    sections = [
        Section("Now", _now()),
        Section("Learning", _learning()),
        Section("Gradients", gradients()),
        Section("Incidents and actions", _incidents()),
        Section("Speed", _speed()),
        Section("Throughput", _throughput()),
        Section("Memory", _memory()),
        Section("Experts", experts()),
    ]
    text = "One training run as its sentinel daemon sees it. Marks are incidents."
    built = page("sentinel: run", UID, text, sections)
    return finished(built.annotation(_from_grafana()).annotation(_from_prometheus()))


def _now() -> list[Panel]:
    step = Query(f"max(sentinel_step{RANKS})", "step")
    up = Query(f"sum(sentinel_rank_up{RUN})", "ranks")
    open_now = Query(f"sum(sentinel_incidents_open{RUN})", "open")
    in_total = Query(f"sum(sentinel_incidents_total{RUN})", "in total")
    applied = Query('sum(sentinel_actions_total{run_id="$run_id", outcome="applied"})', "applied")
    return [
        number("Step", "Number of the latest update attempt.", step).unit(EXACT),
        number("Ranks up", "Ranks that have not ended.", up, ANY_IS_GOOD),
        number("Loss", "Mean of the chosen ranks.", Query(f"avg(sentinel_loss{RANKS})", "loss")),
        number("Incidents open", "Of every kind.", open_now, ANY_IS_BAD),
        number("Incidents in total", "Since the daemon started.", in_total),
        number("Actions applied", "Reflexes and turns.", applied),
    ]


def _learning() -> list[Panel]:
    nonfinite = f"sum by (what) (increase(sentinel_nonfinite_total{RANKS}{_OFTEN}))"
    results = f"sum by (result) (increase(sentinel_updates_total{RANKS}{_OFTEN}))"
    magnitude = Look(log_base=10)
    lead = "Steps of the lr scheduler less updates applied."
    powers_of_two = Look(EXACT, log_base=2)  # the scaler halves and doubles
    return [
        lines("Loss", "A gap is a value that was not finite.", [Query(f"sentinel_loss{RANKS}")]),
        lines("Gradient norm", "Global L2, before clipping.", [Query(f"sentinel_grad_norm{RANKS}")], magnitude),
        lines("Learning rate", "Of the latest step.", [Query(f"sentinel_learning_rate{RANKS}")]),
        lines("Scheduler's lead", lead, [Query(f"sentinel_scheduler_lead_steps{RANKS}")], Look(whole=True)),
        lines("Loss scale", "Of the gradient scaler.", [Query(f"sentinel_loss_scale{RANKS}")], powers_of_two),
        lines("Not finite", "NaN and infinite values seen.", [Query(nonfinite, "{{what}}")], COUNT),
        lines("Updates", "Applied, or not and why.", [Query(results, "{{result}}")], COUNTS),
        lines("Steps", "One that falls is a rollback.", [Query(f"sentinel_step{RANKS}")], Look(EXACT)),
        lines("Generation", "Grows with every rollback.", [Query(f"sentinel_generation{RANKS}")], COUNT),
    ]


def _incidents() -> list[Panel]:
    # Only kinds that the run has met: a line at 0 for each kind of the catalogue would hide them.
    met = f"sum by (kind) (sentinel_incidents_total{RUN}) > 0"
    open_by_kind = f"sum by (kind) (sentinel_incidents_open{RUN}) and on (kind) ({met})"
    critical = f"sum by (kind) (sentinel_critical_incidents_open{RUN}) and on (kind) ({met})"
    total = f"sum by (kind, severity) (sentinel_incidents_total{RUN}) > 0"
    actions = f"sum by (action, outcome) (sentinel_actions_total{RUN}) > 0"
    return [
        lines("Incidents open", "By kind.", [Query(open_by_kind, "{{kind}}")], COUNTS),
        lines("Critical incidents open", "By kind.", [Query(critical, "{{kind}}")], COUNTS),
        lines("Incidents in total", "By kind and severity.", [Query(total, "{{kind}} ({{severity}})")], COUNTS),
        lines("Actions", "By outcome.", [Query(actions, "{{action}} {{outcome}}")], COUNTS),
    ]


def _speed() -> list[Panel]:
    by_bucket = f"sum by (le) (rate(sentinel_step_seconds_bucket{RANKS}{_OFTEN}))"
    own = (
        f"sum by (rank) (rate(sentinel_hook_seconds_total{RANKS}{_OFTEN}))"
        f" / sum by (rank) (rate(sentinel_step_seconds_sum{RANKS}{_OFTEN}))"
    )
    sources = f"sum by (source) (sentinel_communication_source{RANKS})"
    parts = f"avg by (part) (sentinel_step_part_seconds{RANKS})"
    return [
        lines(
            "Step time",
            "From update to update.",
            [
                Query(f"histogram_quantile(0.5, {by_bucket})", "median"),
                Query(f"histogram_quantile(0.99, {by_bucket})", "99 of 100"),
            ],
            Look(unit="s", least=0),
        ),
        lines(
            "Parts of a step",
            "Mean of the chosen ranks; what was waited for other ranks is in no other part.",
            [Query(parts, "{{part}}")],
            Look("s", stacked=True, least=0),
        ),
        buckets(
            "Step times",
            "How many steps took how long.",
            f"sum by (le) (increase(sentinel_step_seconds_bucket{RANKS}{_OFTEN}))",
            "s",
        ),
        rows(
            "Waiting for other ranks",
            "Seconds of the latest step, by rank. The rank that the others wait for waits least.",
            Query(f"sentinel_communication_wait_seconds{RANKS}"),
            "s",
        ),
        lines(
            "Sentinel's own time",
            "Share of the steps' time that was spent in our hooks.",
            [Query(own)],
            Look("percentunit", least=0),
        ),
        lines(
            "How waiting is measured",
            "ddp: after the last gradient of a backward; work: in the loop's own collectives.",
            [Query(sources, "{{source}}")],
            COUNTS,
        ),
    ]


def _throughput() -> list[Panel]:
    applied = 'sentinel_updates_total{run_id="$run_id", rank=~"$rank", result="applied"}'
    tokens = f"sum(sentinel_tokens_per_second{RANKS})"
    samples = f"sum(sentinel_samples_per_second{RANKS})"
    return [
        lines("Updates", "Applied, per second.", [Query(f"sum by (rank) (rate({applied}{_OFTEN}))")], Look(least=0)),
        lines("Tokens", "Per second, of all chosen ranks.", [Query(tokens, "tokens")], Look(least=0)),
        lines("Samples", "Per second, of all chosen ranks.", [Query(samples, "samples")], Look(least=0)),
        lines(
            "Model FLOPs utilisation",
            "Flops per second over what the device could do.",
            [Query(f"sentinel_mfu_ratio{RANKS}")],
            Look("percentunit", least=0),
        ),
    ]


def _memory() -> list[Panel]:
    device = Query(f"sentinel_memory_bytes{RANKS}", "{{kind}}, rank {{rank}} {{gpu}}")
    host = Query(f"sentinel_host_memory_bytes{RANKS}")
    return [
        lines("Device memory", "Allocated, reserved, peak.", [device], Look(unit="bytes", least=0)),
        lines("Host memory", "Unique memory of each rank's process tree.", [host], Look(unit="bytes", least=0)),
    ]


def _from_grafana() -> builders.AnnotationQuery:
    """What `sentinel dashboards annotate` wrote: from opening to end, with a sentence."""
    tagged = builders.AnnotationTarget().type("tags").tags(["sentinel", "$run_id"]).match_any(False).limit(1000)
    query = builders.AnnotationQuery().name("Incidents, annotated").datasource(GRAFANA).enable(True)
    return query.icon_color("red").type("tags").target(tagged)  # type: ignore[arg-type]  # the SDK wants a query; this source takes tags


def _from_prometheus() -> builders.AnnotationQuery:
    """What Prometheus counted: works without a token, says the kind only.

    The window follows the step, of which "5s" is only the least: over long times Grafana takes longer ones (a
    hundredth of the whole), and a fixed window would miss what happened between two of them.
    """
    counted = f"sum by (kind, severity) (increase(sentinel_incidents_total{RUN}{_OFTEN})) > 0"
    query = builders.AnnotationQuery().name("Incidents, counted").datasource(PROMETHEUS).enable(True)
    return query.icon_color("orange").expr(counted).title_format("{{kind}}").tag_keys("severity").step("5s")
