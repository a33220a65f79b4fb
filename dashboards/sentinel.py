"""The dashboard of sentinel itself: does it keep up, does it lose anything, what does it cost."""

from grafana_foundation_sdk.models.common import BigValueTextMode
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.parts import (
    ANY_IS_BAD,
    COUNT,
    NONE_IS_BAD,
    RANKS,
    Look,
    Panel,
    Query,
    Section,
    finished,
    lines,
    number,
    page,
)

UID = "sentinel-itself"
_OFTEN = "[$__rate_interval]"


def page_of_sentinel() -> Dashboard:
    sections = [
        Section("Daemons", _daemons()),
        Section("Record", _record()),
        Section("Degraded", _degraded()),
        Section("Alerts", _alerts()),
        Section("Cost", _cost()),
    ]
    text = "Sentinel's own health: queues, drops, lag, troubles and what it costs the loop."
    return finished(page("sentinel: itself", UID, text, sections))


def _daemons() -> list[Panel]:
    runs = Query("count(count by (run_id) (sentinel_rank_up == 1))", "runs")
    kept = Query("min(sentinel_record_kept)", "kept")
    dropped = Query("sum(sentinel_records_dropped_total)", "dropped")
    disabled = Query("sum(sentinel_parts_disabled_total)", "disabled")
    going = "count by (instance) (count by (instance, run_id) (sentinel_rank_up == 1))"
    ended = f"sum by (status) (increase(sentinel_runs_ended_total{_OFTEN}))"
    versions = Query("count by (version) (sentinel_build_info)", "{{version}}")
    return [
        number("Daemons", "That answer a scrape.", Query("count(sentinel_build_info)", "daemons"), NONE_IS_BAD),
        number("Runs", "With a rank that has not ended.", runs),
        number("Record kept", "1 while every database takes writes.", kept, NONE_IS_BAD),
        number("Records dropped", "By ranks, counted.", dropped, ANY_IS_BAD),
        number("Parts disabled", "Detectors, sinks, probes.", disabled, ANY_IS_BAD),
        number("Versions", "Of the daemons.", versions).text_mode(BigValueTextMode.NAME),
        lines("Runs going", "With a rank that has not ended.", [Query(going, "{{instance}}")], COUNT),
        lines("Runs ended", "A run that is started again ends again.", [Query(ended, "{{status}}")], COUNT),
    ]


def _record() -> list[Panel]:
    dropped = f"sum by (rank, reason) (increase(sentinel_records_dropped_total{RANKS}{_OFTEN}))"
    return [
        lines(
            "Queue",
            "Messages waiting for the database.",
            [Query("sentinel_queue_entries", "{{instance}}")],
            COUNT,
        ),
        lines(
            "Lag",
            "Age of the oldest of them.",
            [Query("sentinel_store_lag_seconds", "{{instance}}")],
            Look("s", least=0),
        ),
        lines(
            "Record kept",
            "1 while the database takes writes.",
            [Query("sentinel_record_kept", "{{instance}}")],
            COUNT,
        ),
        lines("Records dropped", "By reason.", [Query(dropped, "rank {{rank}}: {{reason}}")], COUNT),
    ]


def _degraded() -> list[Panel]:
    troubles = f"sum by (rank, what) (increase(sentinel_troubles_total{RANKS}{_OFTEN}))"
    rejected = f"sum by (reason) (increase(sentinel_rejected_connections_total{_OFTEN}))"
    disabled = "sentinel_parts_disabled_total"
    return [
        lines("Troubles", "What ranks said was degraded.", [Query(troubles, "rank {{rank}}: {{what}}")], COUNT),
        lines("Rejected connections", "By reason.", [Query(rejected, "{{reason}}")], COUNT),
        lines("Parts disabled", "Since the daemon started.", [Query(disabled, "{{instance}}")], COUNT),
        lines("Ranks up", "1 while the rank has not ended.", [Query(f"sentinel_rank_up{RANKS}")], COUNT),
    ]


def _alerts() -> list[Panel]:
    attempts = f"sum by (channel, outcome) (increase(sentinel_alerts_total{_OFTEN}))"
    due = "sum by (channel) (sentinel_alerts_due)"
    return [
        lines("Alerts due", "Not yet delivered.", [Query(due, "{{channel}}")], COUNT),
        lines("Attempts to send", "By outcome.", [Query(attempts, "{{channel}} {{outcome}}")], COUNT),
    ]


def _cost() -> list[Panel]:
    share = f"rate(sentinel_hook_seconds_total{RANKS}{_OFTEN})"
    return [
        lines(
            "Share of the loop's time",
            "Seconds in our hooks per second.",
            [Query(share)],
            Look("percentunit", least=0),
        ),
        lines(
            "Time in the loop",
            "Seconds in our hooks, total.",
            [Query(f"sentinel_hook_seconds_total{RANKS}")],
            Look("s", least=0),
        ),
    ]
