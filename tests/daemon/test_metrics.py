"""What a scraper sees."""

import math
import shutil
import subprocess
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sentinel.daemon.metrics import Metrics
from sentinel.records import Gap, Heartbeat, Incident, Reflex, StepRecord
from sentinel.vocabulary import (
    Action,
    DropReason,
    IncidentStatus,
    Kind,
    Outcome,
    RunStatus,
    Severity,
    Tier,
    UpdateResult,
)

NAN, INF = math.nan, math.inf


def record(step: int = 1, **values) -> StepRecord:
    base = {"seq": step, "generation": 0, "step": step, "time": 1.0, "result": UpdateResult.APPLIED}
    return StepRecord(**{**base, **values})


def reflex(step: int) -> Reflex:
    return Reflex(step, 1.0, 0, step, Kind.NONFINITE_GRADIENT, Action.SKIP_UPDATE, Outcome.APPLIED, 1)


def scrape(metrics: Metrics) -> dict[tuple, float]:
    """(name, sorted labels) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels) -> float | None:
    return scrape(metrics).get((name, tuple(sorted(labels.items()))))


OF_RANK = {"run_id": "r", "rank": "0"}


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    made.run("r").info = {"name": "n", "mode": "protect", "world_size": "1"}
    made.rank("r", 0).begin()
    return made


def test_counters_exist_at_zero_before_their_first_event(metrics):
    found = scrape(metrics)
    for result in UpdateResult:
        assert found["sentinel_updates_total", (("rank", "0"), ("result", result), ("run_id", "r"))] == 0
    for what in ("loss", "gradient", "state", "other"):
        assert value(metrics, "sentinel_nonfinite_total", **OF_RANK, what=what) == 0
    for reason in DropReason:
        assert value(metrics, "sentinel_records_dropped_total", **OF_RANK, reason=reason) == 0
    for kind in Kind:
        for severity in Severity:
            assert value(metrics, "sentinel_incidents_total", run_id="r", kind=kind, severity=severity) == 0
        assert value(metrics, "sentinel_critical_incidents_open", run_id="r", kind=kind) == 0
    assert value(metrics, "sentinel_actions_total", run_id="r", action="rollback", outcome="applied") == 0
    ended = {labels: count for (name, labels), count in found.items() if name == "sentinel_runs_ended_total"}
    assert ended == {(("status", status),): 0 for status in ("completed", "failed", "lost")}


def test_gauges_show_the_latest_finite_value_and_nothing_else(metrics):
    series = metrics.rank("r", 0)
    series.take(record(1, loss=2.5, grad_norm=1.5, lr=0.1))
    assert value(metrics, "sentinel_loss", **OF_RANK) == 2.5
    series.take(record(2, loss=NAN, grad_norm=INF, lr=0.1))
    found = scrape(metrics)
    assert not [name for name, _ in found if name in ("sentinel_loss", "sentinel_grad_norm")]
    assert all(math.isfinite(number) for number in found.values())
    assert value(metrics, "sentinel_nonfinite_total", **OF_RANK, what="loss") == 1
    assert value(metrics, "sentinel_nonfinite_total", **OF_RANK, what="gradient") == 1
    assert value(metrics, "sentinel_learning_rate", **OF_RANK) == 0.1


def test_a_reflex_and_the_record_of_its_step_count_one_gradient(metrics):
    series = metrics.rank("r", 0)
    series.take(reflex(5))
    series.take(record(5, grad_norm=NAN, result=UpdateResult.REFLEX))
    assert value(metrics, "sentinel_nonfinite_total", **OF_RANK, what="gradient") == 1
    assert value(metrics, "sentinel_updates_total", **OF_RANK, result="reflex") == 1


def test_counters_never_fall_when_a_rollback_repeats_steps(metrics):
    series = metrics.rank("r", 0)
    for step in range(1, 11):
        series.take(record(step))
    for step in range(6, 9):
        series.take(record(step, generation=1))
    assert value(metrics, "sentinel_updates_total", **OF_RANK, result="applied") == 13
    assert value(metrics, "sentinel_step", **OF_RANK) == 8
    assert value(metrics, "sentinel_generation", **OF_RANK) == 1


def test_step_times_fill_a_histogram(metrics):
    series = metrics.rank("r", 0)
    for seconds in (0.001, 0.03, 0.03, 1000.0, NAN):
        series.take(record(step_seconds=seconds))
    assert value(metrics, "sentinel_step_seconds_count", **OF_RANK) == 4
    assert value(metrics, "sentinel_step_seconds_bucket", **OF_RANK, le="0.05") == 3
    assert value(metrics, "sentinel_step_seconds_bucket", **OF_RANK, le="+Inf") == 4
    assert value(metrics, "sentinel_step_seconds_sum", **OF_RANK) == pytest.approx(1000.061)


def test_parts_of_a_step_and_device_memory_have_their_labels(metrics):
    series = metrics.rank("r", 0)
    series.new_attempt("GPU-1")
    series.take(record(step_seconds=1.0, backward_seconds=0.4, optimizer_seconds=0.1, memory_allocated_bytes=7))
    assert value(metrics, "sentinel_step_part_seconds", **OF_RANK, part="other") == pytest.approx(0.5)
    assert value(metrics, "sentinel_memory_bytes", **OF_RANK, gpu="GPU-1", kind="allocated") == 7


def test_drops_and_hook_time_are_totals(metrics):
    series = metrics.rank("r", 0)
    series.take(Gap(1, 10, DropReason.OUTBOX_FULL))
    series.take(Heartbeat(1.0, 5, "train", 10, {}, 0.5))
    series.take(Heartbeat(2.0, 6, "train", 10, {}, 0.75))
    assert value(metrics, "sentinel_records_dropped_total", **OF_RANK, reason="outbox_full") == 10
    assert value(metrics, "sentinel_hook_seconds_total", **OF_RANK) == 0.75
    series.new_attempt("")
    series.take(Heartbeat(3.0, 1, "train", 10, {}, 0.25))
    assert value(metrics, "sentinel_hook_seconds_total", **OF_RANK) == 1.0


def test_the_series_of_a_rank_that_ended_are_gone_by_the_second_scrape(metrics):
    metrics.rank("r", 0).take(record(loss=1.0))
    metrics.rank("r", 0).end()
    first = scrape(metrics)
    assert first["sentinel_rank_up", (("rank", "0"), ("run_id", "r"))] == 0
    assert not [name for name, _ in first if name == "sentinel_loss"]
    assert not [labels for _, labels in scrape(metrics) if ("run_id", "r") in labels]


def test_a_rank_that_comes_back_goes_on_counting_where_it_was(metrics):
    series = metrics.rank("r", 0)
    series.take(record(1))
    series.end()
    scrape(metrics)
    scrape(metrics)
    metrics.rank("r", 0).begin()
    metrics.rank("r", 0).take(record(1))
    assert value(metrics, "sentinel_updates_total", **OF_RANK, result="applied") == 2


def test_a_hundred_restarts_make_no_more_series(metrics):
    before = len(scrape(metrics))
    for _ in range(100):
        metrics.rank("r", 0).end()
        metrics.rank("r", 0).begin()
    assert len(scrape(metrics)) == before


def incident(
    status: IncidentStatus = IncidentStatus.OPEN,
    severity: Severity = Severity.CRITICAL,
    kind: Kind = Kind.LOSS_SPIKE,
    name: str = "i",
) -> Incident:
    return Incident(name, "r", 1, 0, kind, severity, Tier.T2, (0,), 1, 1, 1, status, "", "", {}, 0.0)


def open_and_critical(metrics: Metrics, kind: str = "loss_spike") -> tuple[float | None, float | None]:
    return tuple(
        value(metrics, f"sentinel_{name}", run_id="r", kind=kind)
        for name in ("incidents_open", "critical_incidents_open")
    )


def test_an_incident_counts_once_however_often_it_changes(metrics):
    for _ in range(3):
        metrics.incident(incident())
    labels = {"run_id": "r", "kind": "loss_spike", "severity": "critical"}
    assert value(metrics, "sentinel_incidents_total", **labels) == 1
    assert open_and_critical(metrics) == (1, 1)
    metrics.incident(incident(IncidentStatus.RESOLVED))
    assert open_and_critical(metrics) == (0, 0)


def test_an_open_incident_is_critical_from_when_its_severity_rises_until_it_ends(metrics):
    metrics.incident(incident(severity=Severity.WARNING))
    assert open_and_critical(metrics) == (1, 0)
    metrics.incident(incident(severity=Severity.CRITICAL))
    assert open_and_critical(metrics) == (1, 1)
    metrics.incident(incident(IncidentStatus.GAVE_UP))
    assert open_and_critical(metrics) == (0, 0)


def test_a_warning_of_a_kind_that_was_critical_once_is_not_critical(metrics):
    metrics.incident(incident(name="first"))
    metrics.incident(incident(IncidentStatus.RESOLVED, name="first"))
    metrics.incident(incident(severity=Severity.WARNING, name="second"))
    assert open_and_critical(metrics) == (1, 0)


def test_an_open_incident_that_gets_another_kind_is_open_under_that_kind_only(metrics):
    metrics.incident(incident(kind=Kind.NONFINITE_GRADIENT))
    metrics.incident(incident(kind=Kind.NONFINITE_LOSS))
    assert open_and_critical(metrics, "nonfinite_gradient") == (0, 0)
    assert open_and_critical(metrics, "nonfinite_loss") == (1, 1)


def test_ends_of_runs_are_counted_by_status_and_outlive_the_series_of_the_run(metrics):
    for status in (RunStatus.LOST, RunStatus.COMPLETED, RunStatus.LOST):
        metrics.run_ended(status)
    metrics.rank("r", 0).end()
    scrape(metrics)
    found = scrape(metrics)
    assert not [labels for _, labels in found if ("run_id", "r") in labels]
    counts = {status: found["sentinel_runs_ended_total", (("status", status),)] for status in ("completed", "lost")}
    assert counts == {"completed": 1, "lost": 2}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(metrics):
    metrics.rank("r", 0).take(record(loss=1.0, grad_norm=2.0, lr=0.1, loss_scale=8.0, step_seconds=0.1))
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_taking_a_record_costs_a_few_microseconds(metrics):
    series = metrics.rank("r", 0)
    seen = record(loss=1.0, grad_norm=2.0, lr=0.1, step_seconds=0.1, backward_seconds=0.05)
    best = min(_seconds_of(series.take, seen) for _ in range(5))
    assert best < 50e-6


def _seconds_of(call, argument) -> float:
    began = time.perf_counter()
    for _ in range(1000):
        call(argument)
    return (time.perf_counter() - began) / 1000
