"""What Prometheus sees: a custom collector over plain numbers, on a registry of its own."""

import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import sentinel
from sentinel.daemon.connection import Rejected
from sentinel.daemon.node_metrics import MachineMetrics
from sentinel.daemon.sample_metrics import of_samples
from sentinel.daemon.samples import Samples
from sentinel.daemon.series import STEP_BUCKETS_SECONDS, RankSeries
from sentinel.records import Incident
from sentinel.vocabulary import Action, AlertChannel, AlertOutcome, IncidentStatus, Kind, Outcome, RunStatus, Severity

_RANK = ("run_id", "rank")
_ENDED: tuple[RunStatus, ...] = tuple(status for status in RunStatus if status is not RunStatus.RUNNING)
_REMEMBERED = 1024  # ranks whose counters go on where they were if they come back
_GAUGES = {
    "loss": "Loss of the latest step.",
    "grad_norm": "Global L2 norm of the gradients of the latest step, before clipping.",
    "learning_rate": "Learning rate of the latest step.",
    "loss_scale": "Scale of the gradient scaler.",
    "step": "Number of the latest update attempt; falls when a run is rolled back.",
    "generation": "How often the run's history was rewritten.",
    "host_memory_bytes": "Unique memory of the process tree.",
    "communication_wait_seconds": "Time the latest step waited for other ranks; absent where it is not known.",
    "clip_fraction_ratio": "Share of the last 100 clipped updates whose gradients were made smaller.",
    "scheduler_lead_steps": "Steps of the lr scheduler less updates applied, both since the start of the attempt.",
    "gradients_absent": "Trainable parameters without a gradient in the latest step.",
    "tokens_per_second": "Tokens of the latest step on this rank, over its time.",
    "samples_per_second": "Samples of the latest step on this rank, over its time.",
    "mfu_ratio": "Model FLOPs utilisation of the latest step: flops per second over the device's peak.",
}


class RunSeries:
    """Counts of one run. Children exist at 0 before their first event, so that increase() sees it."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.info: dict[str, str] = {}
        self.incidents = dict.fromkeys(itertools.product(Kind, Severity), 0)
        self.open: dict[str, tuple[Kind, Severity]] = {}  # as each incident is now: both may change while it is open
        self.actions = dict.fromkeys(itertools.product(Action, Outcome), 0)
        self.samples = Samples(lambda: int(self.info.get("world_size", 0)))

    @property
    def open_kinds(self) -> list[Kind]:
        """Of the incidents now open, each kind once."""
        return sorted({kind for kind, _ in self.open.values()})


class Metrics(Collector):
    """Cheap to write from the event loop; rendered in another thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.rejected = dict.fromkeys(Rejected, 0)
        self._runs_ended = dict.fromkeys(_ENDED, 0)
        self.parts_disabled = 0
        self.alerts_due = dict.fromkeys(AlertChannel, 0)
        self._alerts = dict.fromkeys(itertools.product(AlertChannel, AlertOutcome), 0)
        self.queued: Callable[[], int] = int
        self.lag_seconds: Callable[[], float] = float
        self.record_kept: Callable[[], bool] = lambda: True
        self.machine = MachineMetrics()
        self._ranks: dict[tuple[str, int], RankSeries] = {}
        self._runs: dict[str, RunSeries] = {}

    def rank(self, run_id: str, rank: int) -> RankSeries:
        series = self._ranks.get((run_id, rank))
        if series is None:
            self._forget_oldest()
            series = self._ranks[run_id, rank] = RankSeries(run_id, rank, self.run(run_id).samples)
        return series

    def run(self, run_id: str) -> RunSeries:
        series = self._runs.get(run_id)
        if series is None:
            series = self._runs[run_id] = RunSeries(run_id)
        return series

    def incident(self, incident: Incident) -> bool:
        """Count it once, however often it changes. Whether it has just opened or closed."""
        run = self.run(incident.run_id)
        if incident.status is not IncidentStatus.OPEN:
            return run.open.pop(incident.id, None) is not None
        known = incident.id in run.open
        run.open[incident.id] = (incident.kind, incident.severity)
        run.incidents[incident.kind, incident.severity] += not known
        return not known

    def run_ended(self, status: RunStatus) -> None:
        """A run is over. A launcher may start it again, and then it ends once more."""
        self._runs_ended[status] += 1

    def action(self, run_id: str, action: Action, outcome: Outcome) -> None:
        self.run(run_id).actions[action, outcome] += 1

    def alert(self, channel: AlertChannel, outcome: AlertOutcome, count: int = 1) -> None:
        """So many attempts to send alerts ended like this."""
        self._alerts[channel, outcome] += count

    def reject(self, reason: Rejected) -> None:
        self.rejected[reason] += 1

    def render(self) -> bytes:
        """The text of /metrics."""
        return prometheus_client.generate_latest(self.registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing to say before the first scrape; also keeps the registry from counting this as one."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One scrape. A rank that has ended is shown once more, as down, and then no longer."""
        ranks = [series for series in list(self._ranks.values()) if series.up or series.scrapes_since_end < 1]
        shown = {series.labels[0] for series in ranks}
        runs = [run for run in list(self._runs.values()) if run.run_id in shown]
        yield from _of_ranks(ranks)
        yield from _of_runs(runs)
        yield from of_samples({run.run_id: run.samples for run in runs})
        yield from self._of_daemon()
        yield from self.machine.collect()
        for series in ranks:
            if not series.up:
                series.scrapes_since_end += 1

    def _of_daemon(self) -> Iterator[Metric]:
        rejected = CounterMetricFamily(
            "sentinel_rejected_connections", "Connections closed by us.", labels=["reason"]
        )
        for reason, count in self.rejected.items():
            rejected.add_metric([reason], count)
        ended = CounterMetricFamily("sentinel_runs_ended", "Runs that ended, by status.", labels=["status"])
        for status, count in self._runs_ended.items():
            ended.add_metric([status], count)
        yield from self._of_alerts()
        build = GaugeMetricFamily("sentinel_build_info", "This daemon.", labels=["version", "python"])
        build.add_metric([sentinel.__version__, platform.python_version()], 1)
        yield from (rejected, ended, build)
        disabled = "Detectors, sinks and probes of the machine that failed and were switched off."
        yield CounterMetricFamily("sentinel_parts_disabled", disabled, self.parts_disabled)
        yield GaugeMetricFamily("sentinel_queue_entries", "Messages waiting for the database.", self.queued())
        yield GaugeMetricFamily("sentinel_store_lag_seconds", "Age of the oldest of them.", self.lag_seconds())
        yield GaugeMetricFamily("sentinel_record_kept", "1 while the database takes writes.", self.record_kept())

    def _of_alerts(self) -> Iterator[Metric]:
        text = "Attempts to send alerts: sent, retried (tried again later), failed (given up)."
        sent = CounterMetricFamily("sentinel_alerts", text, labels=["channel", "outcome"])
        for (channel, outcome), count in self._alerts.items():
            sent.add_metric([channel, outcome], count)
        due = GaugeMetricFamily("sentinel_alerts_due", "Alerts not yet delivered.", labels=["channel"])
        for channel, waiting in self.alerts_due.items():
            due.add_metric([channel], waiting)
        yield from (sent, due)

    def _forget_oldest(self) -> None:
        if len(self._ranks) < _REMEMBERED:
            return
        gone = next((key for key, series in self._ranks.items() if not series.up), None)
        if gone is not None:
            del self._ranks[gone]
            if all(run_id != gone[0] for run_id, _ in self._ranks):
                self._runs.pop(gone[0], None)


def _of_ranks(ranks: list[RankSeries]) -> Iterator[Metric]:
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"sentinel_{name}", text, labels=_RANK)
        for series in ranks:
            value = series.gauges.get(name)
            if value is not None:
                gauge.add_metric(series.labels, value)
        yield gauge
    up = GaugeMetricFamily("sentinel_rank_up", "1 while the rank has not ended.", labels=_RANK)
    hooks = CounterMetricFamily("sentinel_hook_seconds", "Time sentinel itself took in the loop.", labels=_RANK)
    for series in ranks:
        up.add_metric(series.labels, series.up)
        hooks.add_metric(series.labels, series.hook_seconds)
    yield from (up, hooks, _step_seconds(ranks))
    text = "Parts of the latest step; they add up to it, what was waited for other ranks is in no other part."
    parts = GaugeMetricFamily("sentinel_step_part_seconds", text, labels=(*_RANK, "part"))
    text = "1: how the time waited for other ranks is had."
    sources = GaugeMetricFamily("sentinel_communication_source", text, labels=(*_RANK, "source"))
    updates = CounterMetricFamily("sentinel_updates", "Update attempts by result.", labels=(*_RANK, "result"))
    nonfinite = CounterMetricFamily("sentinel_nonfinite", "NaN and infinite values seen.", labels=(*_RANK, "what"))
    dropped = CounterMetricFamily("sentinel_records_dropped", "Records lost, counted.", labels=(*_RANK, "reason"))
    troubles = CounterMetricFamily("sentinel_troubles", "What a rank said was degraded.", labels=(*_RANK, "what"))
    for series in ranks:
        _add(parts, series, series.parts)
        _add(sources, series, {series.communication_source: 1} if series.communication_source else {})
        _add(updates, series, series.updates)
        _add(nonfinite, series, series.nonfinite)
        _add(dropped, series, series.dropped)
        _add(troubles, series, series.troubles)
    yield from (parts, sources, _memory(ranks), updates, nonfinite, dropped, troubles)


def _add(family: GaugeMetricFamily | CounterMetricFamily, series: RankSeries, values: Mapping[Any, float]) -> None:
    for label, value in list(values.items()):
        family.add_metric((*series.labels, str(label)), value)


def _step_seconds(ranks: list[RankSeries]) -> Metric:
    histogram = HistogramMetricFamily("sentinel_step_seconds", "Time from update to update.", labels=_RANK)
    bounds = [*(str(bound) for bound in STEP_BUCKETS_SECONDS), "+Inf"]
    for series in ranks:
        totals = itertools.accumulate(series.buckets)
        histogram.add_metric(series.labels, list(zip(bounds, totals, strict=True)), series.step_seconds_sum)
    return histogram


def _memory(ranks: list[RankSeries]) -> Metric:
    memory = GaugeMetricFamily("sentinel_memory_bytes", "Device memory.", labels=(*_RANK, "gpu", "kind"))
    for series in ranks:
        for kind, value in series.memory.items():
            memory.add_metric((*series.labels, series.gpu, kind), value)
    return memory


def _of_runs(runs: list[RunSeries]) -> Iterator[Metric]:
    total = CounterMetricFamily("sentinel_incidents", "Incidents opened.", labels=("run_id", "kind", "severity"))
    held = GaugeMetricFamily("sentinel_incidents_open", "Incidents now open.", labels=("run_id", "kind"))
    critical = "Incidents now open whose severity now is critical."
    grave = GaugeMetricFamily("sentinel_critical_incidents_open", critical, labels=("run_id", "kind"))
    actions = CounterMetricFamily("sentinel_actions", "Decisions by outcome.", labels=("run_id", "action", "outcome"))
    info = GaugeMetricFamily("sentinel_run_info", "What the run is.", labels=("run_id", "name", "mode", "world_size"))
    for run in runs:
        for (kind, severity), count in run.incidents.items():
            total.add_metric((run.run_id, kind, severity), count)
        open_now = Counter(list(run.open.values()))
        for kind in Kind:
            held.add_metric((run.run_id, kind), sum(open_now[kind, severity] for severity in Severity))
            grave.add_metric((run.run_id, kind), open_now[kind, Severity.CRITICAL])
        for (action, outcome), count in run.actions.items():
            actions.add_metric((run.run_id, action, outcome), count)
        if run.info:
            info.add_metric((run.run_id, run.info["name"], run.info["mode"], run.info["world_size"]), 1)
    yield from (total, held, grave, actions, info)
