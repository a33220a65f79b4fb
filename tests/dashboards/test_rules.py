"""The alert rules in promtool's own judgement: each fires when it should, is silent when it should, also on NaN."""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.conftest import require_service
from tests.dashboards import expressions

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[2]
RULES = expressions.FOLDER / "rules.yml"
UP = 'sentinel_rank_up{run_id="r", rank="0"}'
UP_1 = 'sentinel_rank_up{run_id="r", rank="1"}'
OPEN = 'sentinel_incidents_open{run_id="r", kind="loss_spike"}'
CRITICAL = 'sentinel_critical_incidents_open{run_id="r", kind="loss_spike"}'
ONCE_CRITICAL = 'sentinel_incidents_total{run_id="r", kind="loss_spike", severity="critical"}'
WARNING = 'sentinel_incidents_total{run_id="r", kind="loss_spike", severity="warning"}'
NONFINITE = 'sentinel_nonfinite_total{run_id="r", rank="0", what="loss"}'
LOSS = 'sentinel_loss{run_id="r", rank="0"}'
APPLIED = 'sentinel_updates_total{run_id="r", rank="0", result="applied"}'
REFLEX = 'sentinel_updates_total{run_id="r", rank="0", result="reflex"}'
DROPPED = 'sentinel_records_dropped_total{run_id="r", rank="0", reason="outbox_full"}'
LOST = 'sentinel_runs_ended_total{instance="a:1", status="lost"}'
RUN_FAILED = 'sentinel_runs_ended_total{instance="a:1", status="failed"}'
COMPLETED = 'sentinel_runs_ended_total{instance="a:1", status="completed"}'
DAEMON = 'up{job="sentinel", instance="a:1"}'
KEPT = 'sentinel_record_kept{instance="a:1"}'
DISABLED = 'sentinel_parts_disabled_total{instance="a:1"}'
DUE = 'sentinel_alerts_due{instance="a:1", channel="slack"}'
FAILED = 'sentinel_alerts_total{instance="a:1", channel="slack", outcome="failed"}'
RETRIED = 'sentinel_alerts_total{instance="a:1", channel="slack", outcome="retried"}'
FREE = 'sentinel_disk_free_bytes{instance="a:1", place="home"}'
SIZE = 'sentinel_disk_size_bytes{instance="a:1", place="home"}'
INODES = 'sentinel_disk_free_inodes{instance="a:1", place="home"}'
HOT = 'sentinel_gpu_throttled{instance="a:1", gpu="GPU-a", reason="hw_thermal"}'
SLOWED = 'sentinel_gpu_throttled{instance="a:1", gpu="GPU-a", reason="hw_slowdown"}'
CAPPED = 'sentinel_gpu_throttled{instance="a:1", gpu="GPU-a", reason="sw_power_cap"}'
UNCORRECTED = 'sentinel_gpu_ecc_errors_total{instance="a:1", gpu="GPU-a", kind="uncorrected"}'
CORRECTED = 'sentinel_gpu_ecc_errors_total{instance="a:1", gpu="GPU-a", kind="corrected"}'
XID = 'sentinel_gpu_xid_total{instance="a:1", gpu="GPU-a"}'
GPUS_LOST = 'sentinel_gpus{instance="a:1", state="lost"}'
GPUS = 'sentinel_gpus{instance="a:1", state="present"}'
AGAIN = 'sentinel_tcp_retransmits_total{instance="a:1"}'
SENT = 'sentinel_tcp_sent_segments_total{instance="a:1"}'
NAN = "NaN+0x40"  # forty samples that are NaN, as a scrape may deliver


class Case(NamedTuple):
    """Samples of one a minute (promtool's notation), and whether the alert fires at that minute."""

    alert: str
    says: str
    series: dict[str, str]
    minute: int
    fires: bool


def firing(alert: str, says: str, series: dict[str, str], minute: int = 30) -> Case:
    return Case(alert, says, series, minute, fires=True)


def silent(alert: str, says: str, series: dict[str, str], minute: int = 30) -> Case:
    return Case(alert, says, series, minute, fires=False)


INCIDENT = "SentinelIncidentCritical"
NO_UPDATES = "SentinelNoUpdates"
RANK_DOWN = "SentinelRankDown"
RUN_LOST = "SentinelRunLost"
DISK_LOW = "SentinelDiskLow"
THROTTLED = "SentinelGpuThrottled"
ECC = "SentinelGpuEccUncorrected"
GPU_LOST = "SentinelGpuLost"
RETRANSMITS = "SentinelTcpRetransmits"
_SAWTOOTH = "90e9x4 " + "60e9x4 90e9x4 " * 7  # of a disk where a checkpoint of 30 GB replaces another
CASES = [
    firing(INCIDENT, "a critical incident is open", {OPEN: "0x10 1x30", CRITICAL: "0x10 1x30"}),
    firing(INCIDENT, "while the loss is NaN", {OPEN: "0x10 1x30", CRITICAL: "0x10 1x30", LOSS: NAN}),
    firing(INCIDENT, "a warning became critical", {OPEN: "1x40", WARNING: "1x40", CRITICAL: "0x20 1x20"}),
    silent(INCIDENT, "it is over", {OPEN: "0x10 1x5 0x30", CRITICAL: "0x10 1x5 0x30"}),
    silent(INCIDENT, "it is only a warning", {OPEN: "1x40", WARNING: "1x40", CRITICAL: "0x40"}),
    silent(
        INCIDENT,
        "it is a warning of a kind once critical",
        {OPEN: "1x5 0x5 1x30", ONCE_CRITICAL: "1x40", WARNING: "0x10 1x30", CRITICAL: "1x5 0x35"},
    ),
    silent(INCIDENT, "the numbers are NaN", {OPEN: NAN, CRITICAL: NAN}),
    firing("SentinelNonfinite", "the loss was NaN once", {NONFINITE: "0x28 1x10"}),
    firing("SentinelNonfinite", "and is shown as NaN", {NONFINITE: "0x28 1x10", LOSS: NAN}),
    silent("SentinelNonfinite", "nothing new since", {NONFINITE: "0x10 3x30", LOSS: NAN}),
    silent("SentinelNonfinite", "the counter is NaN", {NONFINITE: NAN}),
    firing(NO_UPDATES, "every update is skipped", {UP: "1x60", APPLIED: "0+9x20 180x40", REFLEX: "0x20 0+9x40"}, 45),
    firing(NO_UPDATES, "and the loss is NaN", {UP: "1x60", APPLIED: "0+9x20 180x40", LOSS: "NaN+0x60"}, 45),
    silent(NO_UPDATES, "updates are applied", {UP: "1x60", APPLIED: "0+9x60", REFLEX: "0+1x60"}, 45),
    silent(NO_UPDATES, "the run has just begun", {UP: "_x40 1x20", APPLIED: "_x40 0x20"}, 48),
    silent(NO_UPDATES, "the run has ended", {UP: "1x20 0 _x40", APPLIED: "0+9x20 180 _x40"}, 45),
    silent(NO_UPDATES, "the numbers are NaN", {UP: "1x60", APPLIED: "NaN+0x60"}, 45),
    firing(RANK_DOWN, "one rank ended", {UP: "1x60", UP_1: "1x24 0 _x40"}),
    firing(RANK_DOWN, "one rank's series is stale", {UP: "1x60", UP_1: "1x24 stale"}),
    silent(RANK_DOWN, "both ended", {UP: "1x24 0 _x40", UP_1: "1x24 0 _x40"}),
    silent(RANK_DOWN, "both are up", {UP: "1x60", UP_1: "1x60", LOSS: NAN}),
    silent(RANK_DOWN, "another run ended", {UP: "1x60", UP_1.replace('"r"', '"old"'): "1x24 0 _x40"}),
    silent(
        RANK_DOWN,
        "it came back on another daemon",
        {UP: "1x60", UP_1: "1x24 stale", UP_1[:-1] + ', job="b"}': "1x60"},
    ),
    firing(RUN_LOST, "a run was lost", {LOST: "0x25 1x20", COMPLETED: "3x45"}),
    firing(RUN_LOST, "a run failed while the loss is NaN", {RUN_FAILED: "0x25 1x20", LOSS: NAN}),
    firing(RUN_LOST, "its daemon has left since", {LOST: "0x20 1x3 stale"}),
    firing(RUN_LOST, "its daemon came only to find it lost", {LOST: "_x25 1x20", RUN_FAILED: "_x25 0x20"}),
    silent(RUN_LOST, "all complete", {LOST: "0x45", RUN_FAILED: "0x45", COMPLETED: "0+1x45"}),
    silent(RUN_LOST, "long ago", {LOST: "0x5 1x40"}),
    silent(RUN_LOST, "a daemon found it lost long ago", {LOST: "_x5 1x40"}),
    silent(RUN_LOST, "nothing new since Prometheus was down", {LOST: "1x5 _x20 1x20"}),
    silent(RUN_LOST, "the counter is NaN", {LOST: NAN, RUN_FAILED: NAN}),
    firing("SentinelRecordsDropped", "some were", {DROPPED: "0x28 40x10", LOSS: NAN}),
    silent("SentinelRecordsDropped", "long ago", {DROPPED: "0x10 40x40"}),
    silent("SentinelRecordsDropped", "the counter is NaN", {DROPPED: NAN}),
    firing("SentinelDaemonDown", "it does not answer", {DAEMON: "1x20 0x20"}),
    silent("SentinelDaemonDown", "it missed one scrape", {DAEMON: "1x29 0 1x20"}),
    silent("SentinelDaemonDown", "it left in order", {DAEMON: "1x20 _x40"}),
    silent("SentinelDaemonDown", "another job is down", {DAEMON.replace("sentinel", "node"): "0x40"}),
    silent("SentinelDaemonDown", "the number is NaN", {DAEMON: NAN}),
    firing("SentinelRecordNotKept", "the disk is full", {KEPT: "1x20 0x20", LOSS: NAN}),
    silent("SentinelRecordNotKept", "all is written", {KEPT: "1x40", LOSS: NAN}),
    silent("SentinelRecordNotKept", "the number is NaN", {KEPT: NAN}),
    firing("SentinelPartsDisabled", "a detector failed", {DISABLED: "0x20 1x20", LOSS: NAN}),
    silent("SentinelPartsDisabled", "none did", {DISABLED: "0x40", LOSS: NAN}),
    silent("SentinelPartsDisabled", "the number is NaN", {DISABLED: NAN}),
    firing("SentinelAlertsDue", "the receiver is down", {DUE: "0x10 3x30", LOSS: NAN}),
    silent("SentinelAlertsDue", "the receiver is slow", {DUE: "0x10 3x5 0x3 3x5 0x3 3x5"}),
    silent("SentinelAlertsDue", "the number is NaN", {DUE: NAN}),
    firing("SentinelAlertsFailed", "the receiver refuses", {FAILED: "0x25 2x20", LOSS: NAN}),
    silent("SentinelAlertsFailed", "they are tried again", {FAILED: "0x40", RETRIED: "0+1x40"}),
    silent("SentinelAlertsFailed", "the counter is NaN", {FAILED: NAN}),
    firing(DISK_LOW, "bytes run out", {FREE: "400e9x20 5e9x20", SIZE: "500e9x40", INODES: "1e6x40", LOSS: NAN}),
    firing(DISK_LOW, "files run out", {FREE: "400e9x40", SIZE: "500e9x40", INODES: "1e6x20 500x20"}),
    firing(DISK_LOW, "it fills fast", {FREE: "430e9-10e9x43", SIZE: "500e9x60"}, 39),
    silent(DISK_LOW, "it fills slowly", {FREE: "90e9-1e8x60", SIZE: "500e9x60"}, 39),
    silent(DISK_LOW, "old checkpoints go as new ones come", {FREE: _SAWTOOTH, SIZE: "500e9x60"}, 39),
    silent(DISK_LOW, "a tenth of a large disk is left", {FREE: "30e9x40", SIZE: "500e9x40", INODES: "1e6x40"}),
    silent(DISK_LOW, "a small disk is half empty", {FREE: "4e9x40", SIZE: "8e9x40"}),
    silent(DISK_LOW, "it was full for a moment", {FREE: "400e9x25 1e9x3 400e9x20", SIZE: "500e9x40"}),
    silent(DISK_LOW, "the numbers are NaN", {FREE: NAN, SIZE: NAN, INODES: NAN}),
    firing(THROTTLED, "it is too hot", {HOT: "0x5 1x35", CAPPED: "0x40", LOSS: NAN}),
    firing(THROTTLED, "it is let go now and then", {HOT: "0x5 1x3 0 1x3 0 1x3 0 1x3 0 1x3 0 1x3 0 1x20"}),
    firing(THROTTLED, "it draws too much", {HOT: "0x40", SLOWED: "0x5 1x35"}),
    firing(THROTTLED, "once for one cause", {HOT: "0x5 1x35", SLOWED: "0x5 1x35"}),
    silent(THROTTLED, "it was hot for a while", {HOT: "0x20 1x4 0x20"}),
    silent(THROTTLED, "it works at its power limit", {HOT: "0x40", CAPPED: "1x40"}),
    silent(THROTTLED, "the number is NaN", {HOT: NAN}),
    firing(ECC, "one was not corrected", {UNCORRECTED: "0x25 1x15", CORRECTED: "0+1x40", LOSS: NAN}),
    firing(ECC, "a new daemon found one", {UNCORRECTED: "_x25 1x15"}),
    silent(ECC, "a new daemon found none", {UNCORRECTED: "_x25 0x15", CORRECTED: "_x25 9x15"}),
    silent(ECC, "all were corrected", {UNCORRECTED: "0x40", CORRECTED: "0+1x40"}),
    silent(ECC, "it is of before", {UNCORRECTED: "2x40"}),
    silent(ECC, "the counter is NaN", {UNCORRECTED: NAN}),
    firing("SentinelGpuXid", "the driver reports one", {XID: "0x25 1x15", LOSS: NAN}),
    firing("SentinelGpuXid", "its daemon was scraped after it", {XID: "_x25 1x15"}),
    firing("SentinelGpuXid", "its daemon has left since", {XID: "0x24 1 stale"}),
    silent("SentinelGpuXid", "nothing new since Prometheus was down", {XID: "1x5 _x20 1x20"}),
    silent("SentinelGpuXid", "long ago", {XID: "0x5 1x35"}),
    silent("SentinelGpuXid", "the counter is NaN", {XID: NAN}),
    firing(GPU_LOST, "one fell off the bus", {GPUS_LOST: "0x25 1x15", GPUS: "8x25 7x15", LOSS: NAN}),
    silent(GPU_LOST, "all answer", {GPUS_LOST: "0x40", GPUS: "8x40"}),
    silent(GPU_LOST, "the number is NaN", {GPUS_LOST: NAN}),
    firing(RETRANSMITS, "one of ten is sent again", {AGAIN: "0x15 0+6000x25", SENT: "0+60000x40", LOSS: NAN}),
    silent(RETRANSMITS, "one of a thousand is", {AGAIN: "0+1200x40", SENT: "0+1200000x40"}),
    silent(RETRANSMITS, "next to nothing is sent", {AGAIN: "0+6x40", SENT: "0+60x40"}),
    silent(RETRANSMITS, "nothing is sent", {AGAIN: "5x40", SENT: "70x40"}),
    silent(RETRANSMITS, "it was a burst of a minute", {AGAIN: "0x15 6000x30", SENT: "0+60000x45"}),
    silent(RETRANSMITS, "the counters are NaN", {AGAIN: NAN, SENT: NAN}),
]


def test_promtool_finds_every_rule_and_nothing_wrong() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stderr
    assert f"{len(expressions.rules())} rules found" in checked.stdout
    assert len(expressions.rules()) == 17


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.says}")
def test_a_rule(case: Case, tmp_path: Path) -> None:
    checked = judged(tmp_path, case.series, promql_expr_test=[firing_alerts(case.alert, case.minute, case.fires)])
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("series", [{}, {OPEN: "1x40", CRITICAL: "1x40"}])
def test_the_judgement_can_fail(series: dict[str, str], tmp_path: Path) -> None:
    """The opposite of what holds is refused, so that `test_a_rule` means something."""
    checked = judged(tmp_path, series, promql_expr_test=[firing_alerts(INCIDENT, 30, not series)])
    assert checked.returncode != 0


def test_every_rule_has_a_case_that_fires_one_that_does_not_and_one_with_nan() -> None:
    for rule in expressions.rules():
        cases = [case for case in CASES if case.alert == rule["alert"]]
        assert {case.fires for case in cases} == {True, False}, rule["alert"]
        assert any("NaN" in samples for case in cases for samples in case.series.values()), rule["alert"]
    assert {case.alert for case in CASES} == {rule["alert"] for rule in expressions.rules()}


def test_an_alert_names_its_run_and_rank(tmp_path: Path) -> None:
    (rule,) = [rule for rule in expressions.rules() if rule["alert"] == RANK_DOWN]
    said = {**rule["annotations"], "summary": "Run r: rank 1 is gone while others go on"}
    expected = {"exp_labels": {"run_id": "r", "rank": "1", "severity": "critical"}, "exp_annotations": said}
    asked = {"alertname": RANK_DOWN, "eval_time": "30m", "exp_alerts": [expected]}
    checked = judged(tmp_path, {UP: "1x60", UP_1: "1x24 0 _x40"}, alert_rule_test=[asked])
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_rule_says_how_bad_what_and_where_to_read_on() -> None:
    for rule in expressions.rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, rule["alert"]


def firing_alerts(alert: str, minute: int, fires: bool) -> dict[str, Any]:
    """The question whether an alert fires at that minute, with the answer that is expected."""
    expr = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}


def judged(folder: Path, series: dict[str, str], **questions: list[Any]) -> subprocess.CompletedProcess[str]:
    """What `promtool test rules` says of these samples."""
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                **questions,
            }
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(test), encoding="utf-8")
    return promtool("test", "rules", str(path))


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([require_service("promtool"), *words], capture_output=True, text=True, check=False)
