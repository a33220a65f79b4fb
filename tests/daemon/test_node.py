"""The machine as a scraper and the database see it, in a real daemon; and how counters behave."""

import json
import urllib.request
from pathlib import Path

import sqlalchemy
from prometheus_client.parser import text_string_to_metric_families

from sentinel.daemon.metrics import Metrics
from sentinel.daemon.node import MOST_VALUES, _flat
from sentinel.daemon.node_metrics import COUNTERS, GAUGES, MOST_COUNTERS, Counts, Workers
from sentinel.daemon.probes.disk import Disk
from sentinel.daemon.probes.host import Host
from sentinel.daemon.probes.network import Network
from sentinel.daemon.probes.nvml import Nvml
from sentinel.daemon.probes.probe import Reading
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.probes.nvml_fake import FakeNvml, gpu
from tests.daemon.wire_client import WireClient
from tests.waiting import until

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(text: str) -> Series:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def shown(metrics: Metrics) -> Series:
    return scraped(metrics.render().decode())


def of(found: Series, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric by its labels' values, in the order of their names."""
    return {tuple(value for _, value in labels): value for (key, labels), value in found.items() if key == name}


def test_every_reading_of_every_probe_is_a_metric_with_as_many_labels() -> None:
    here = Path.cwd()
    probes = (Nvml(lambda: FakeNvml(gpu())), Network(), Disk(lambda: {"home": [here]}), Host())
    told = GAUGES | COUNTERS
    readings = [reading for probe in probes for reading in probe.read()]
    assert len({reading.name for reading in readings}) > 20
    for reading in readings:
        assert len(reading.labels) == len(told[reading.name].labels), reading


def test_a_scraper_sees_a_gpu_and_no_longer_when_it_is_gone() -> None:
    metrics = Metrics()
    doomed = gpu()
    now = [0.0]
    probe = Nvml(lambda: FakeNvml(doomed), lambda: now[0])
    metrics.machine.readings = probe.read
    found = shown(metrics)
    assert of(found, "sentinel_gpu_power_watts") == {("GPU-a",): 654.321}
    assert of(found, "sentinel_gpu_ecc_errors_total")["GPU-a", "corrected"] == 3
    assert of(found, "sentinel_gpu_xid_total") == {("GPU-a",): 0}
    doomed.lost = True
    now[0] += 1.0
    found = shown(metrics)
    assert of(found, "sentinel_gpu_power_watts") == of(found, "sentinel_gpu_ecc_errors_total") == {}
    assert of(found, "sentinel_gpus") == {("lost",): 1, ("present",): 0}


def test_a_counter_does_not_fall_when_its_device_comes_back_with_zero() -> None:
    counts = Counts()
    said = [counts.total(Reading("network_bytes", ("eth0", "sent"), value)) for value in (100, 150, 20, 30)]
    assert said == [100, 150, 170, 180]


def test_the_memory_of_counters_is_bounded() -> None:
    counts = Counts()
    for number in range(MOST_COUNTERS + 100):
        counts.total(Reading("network_bytes", (f"eth{number}", "sent"), 1))
    assert len(counts._known) == MOST_COUNTERS


def test_data_workers_have_the_rank_that_they_load_for() -> None:
    metrics = Metrics()
    metrics.machine.workers = lambda: {("r1", 3): Workers(2, 1000)}
    found = shown(metrics)
    assert of(found, "sentinel_data_workers") == {("3", "r1"): 2}
    assert of(found, "sentinel_data_worker_memory_bytes") == {("3", "r1"): 1000}


def test_a_sample_for_the_database_is_bounded_and_finite_in_its_names() -> None:
    many = [Reading("gpu_power_watts", (f"GPU-{number}",), 1.0) for number in range(2 * MOST_VALUES)]
    flat = _flat([Reading("load_average", (), 2), *many])
    assert len(flat) == MOST_VALUES
    assert flat["load_average"] == 2
    assert "gpu_power_watts{GPU-0}" in flat


def test_a_daemon_tells_of_its_machine_to_scraper_and_database(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "home") as daemon, WireClient(daemon.places.socket, "r1") as rank:
        rank.start()

        def found() -> Series:
            with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=10) as answer:
                return scraped(answer.read().decode())

        until(lambda: of(found(), "sentinel_disk_free_bytes").keys() == {("home",), ("cwd",)}, 20.0, "disks are told")
        seen = found()
        assert of(seen, "sentinel_machine_memory_bytes")["available",] > 0
        assert of(seen, "sentinel_network_bytes_total")["lo", "sent"] > 0
        assert of(seen, "sentinel_data_workers").keys() == {("0", "r1")}
        assert of(seen, "sentinel_parts_disabled_total") == {(): 0}
        until(lambda: bool(_whole(daemon)), 20.0, "a sample of the whole machine is stored")
        (first, *_) = _whole(daemon)
        assert first["host_memory_bytes"] > 0
        assert first["disk_free_bytes{home}"] > 0
        assert first["network_bytes{lo,sent}"] > 0
        assert len(json.dumps(first)) < 32_000
        rank.end(0)


def _whole(daemon: DaemonProcess) -> list[dict[str, float]]:
    """Samples that hold the whole machine."""
    engine = sqlalchemy.create_engine(f"sqlite:///{daemon.places.home / 'sentinel.db'}")
    with engine.connect() as connection:
        rows = connection.execute(sqlalchemy.text("SELECT sample FROM system_samples ORDER BY time")).scalars()
        return [sample for row in rows if "load_average" in (sample := json.loads(row))]
