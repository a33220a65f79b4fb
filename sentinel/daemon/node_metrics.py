"""What Prometheus sees of this machine: its GPUs, network, disks, memory, and the data workers of its ranks."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sentinel.daemon.probes.probe import Reading

MOST_COUNTERS = 8192  # series whose counts are remembered
_RANK = ("run_id", "rank")


class Told(NamedTuple):
    """What a metric means, and by what it is told apart."""

    text: str
    labels: tuple[str, ...] = ()


GAUGES = {
    "gpus": Told("GPUs of this machine, by whether they answer.", ("state",)),
    "gpu_utilization_ratio": Told("Share of the last sample period in which a kernel ran.", ("gpu",)),
    "gpu_memory_busy_ratio": Told("Share of the last sample period in which device memory was in use.", ("gpu",)),
    "gpu_memory_bytes": Told("Device memory of the GPU, whoever holds it.", ("gpu", "kind")),
    "gpu_power_watts": Told("Power draw of the GPU.", ("gpu",)),
    "gpu_power_limit_watts": Told("Power that the GPU may draw.", ("gpu",)),
    "gpu_temperature_celsius": Told("Temperature of the GPU's die.", ("gpu",)),
    "gpu_throttled": Told("1 while the clocks are held back for this reason.", ("gpu", "reason")),
    "gpu_last_xid": Told("Number of the latest Xid; absent before the first.", ("gpu",)),
    "disk_free_bytes": Told("Free space; of several folders of a place, that of the fullest disk.", ("place",)),
    "disk_size_bytes": Told("Size of that disk.", ("place",)),
    "disk_free_inodes": Told("Files that can still be made there.", ("place",)),
    "cpu_utilization_ratio": Told("Share of the machine's cores that is busy."),
    "load_average": Told("Processes that run or wait to, mean of a minute."),
    "machine_memory_bytes": Told("Memory of the machine.", ("kind",)),
    "cgroup_memory_bytes": Told("Memory of the control group that the run is in.", ("kind",)),
    "pressure_ratio": Told("Share of the last 10 seconds in which some process waited for it.", ("resource",)),
}
COUNTERS = {
    "gpu_ecc_errors": Told("Errors of the GPU's memory since its driver was loaded.", ("gpu", "kind")),
    "gpu_xid": Told("Critical errors that the GPU's driver reported; kept for a GPU that is lost.", ("gpu",)),
    "gpu_nvlink_bytes": Told("Data over all NVLinks of the GPU.", ("gpu", "direction")),
    "gpu_nvlink_errors": Told("Errors of all NVLinks of the GPU.", ("gpu", "kind")),
    "gpu_pcie_bytes": Told("Data over PCIe.", ("gpu", "direction")),
    "gpu_pcie_replays": Told("Repeated PCIe packets.", ("gpu",)),
    "network_bytes": Told("Data over a network interface.", ("device", "direction")),
    "network_errors": Told("Packets that an interface lost or got broken.", ("device", "what")),
    "tcp_sent_segments": Told("TCP segments sent."),
    "tcp_retransmits": Told("TCP segments sent again."),
    "tcp_timeouts": Told("TCP segments that were sent again because no answer came in time."),
    "rdma_bytes": Told("Data over an RDMA port.", ("device", "port", "direction")),
    "rdma_counter": Told("What an RDMA port counts of errors and congestion.", ("device", "port", "counter")),
    "cgroup_cpu_throttled_seconds": Told("Time that the run's control group was kept from its cores."),
}
Key = tuple[str, ...]  # the reading's name, then its labels


class Workers(NamedTuple):
    """The data workers of one rank."""

    number: int
    uss_bytes: int


class MachineMetrics:
    """Where the numbers come from is set by who measures them; until then there are none."""

    def __init__(self) -> None:
        self.readings: Callable[[], list[Reading]] = list
        self.workers: Callable[[], Mapping[tuple[str, int], Workers]] = dict
        self._counts = Counts()

    def collect(self) -> Iterator[Metric]:
        """A series is there as long as its device is."""
        by_name: dict[str, list[Reading]] = {}
        for reading in self.readings():
            by_name.setdefault(reading.name, []).append(reading)
        for name, told in GAUGES.items():
            gauge = GaugeMetricFamily(f"sentinel_{name}", told.text, labels=told.labels)
            for reading in by_name.get(name, ()):
                gauge.add_metric(reading.labels, reading.value)
            yield gauge
        for name, told in COUNTERS.items():
            counter = CounterMetricFamily(f"sentinel_{name}", told.text, labels=told.labels)
            for reading in by_name.get(name, ()):
                counter.add_metric(reading.labels, self._counts.total(reading))
            yield counter
        yield from self._of_workers()

    def _of_workers(self) -> Iterator[Metric]:
        memory = "Unique memory of the rank's data workers, together."
        held = GaugeMetricFamily("sentinel_data_worker_memory_bytes", memory, labels=_RANK)
        there = GaugeMetricFamily("sentinel_data_workers", "Processes that load data for the rank.", labels=_RANK)
        for (run_id, rank), workers in self.workers().items():
            held.add_metric((run_id, str(rank)), workers.uss_bytes)
            there.add_metric((run_id, str(rank)), workers.number)
        yield from (held, there)


class Counts:
    """Totals that never fall, also over a device that went away and came back with its counters at 0."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several scrapes may be under way
        self._known: dict[Key, tuple[float, float]] = {}  # (total, what the device said)

    def total(self, reading: Reading) -> float:
        key = (reading.name, *reading.labels)
        with self._lock:
            total, before = self._known.pop(key, (0.0, 0.0))
            # A count that fell began anew at 0.
            total += reading.value - before if reading.value >= before else reading.value
            self._known[key] = (total, reading.value)  # now the youngest
            if len(self._known) > MOST_COUNTERS:
                del self._known[next(iter(self._known))]
            return total
