"""Which signals of the machine would a daemon find here? Asked of its own probes, once each."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sentinel.places import Places

if TYPE_CHECKING:
    from sentinel.daemon.probes.nvml import Nvml
    from sentinel.daemon.probes.probe import Probe, Reading

NO_DAEMON = "the daemon's packages are missing; pip install 'train-sentinel[daemon]'"
ANY_GPU = "GPUs"
# Group -> the readings that show it, and what it is made of.
GPU = {
    "GPU utilisation": ("gpu_utilization_ratio", "share of the time in which kernels ran"),
    "GPU memory": ("gpu_memory_bytes", "used and total, of all processes"),
    "GPU power": ("gpu_power_watts", "and its limit"),
    "GPU temperature": ("gpu_temperature_celsius", "of the chip"),
    "GPU throttling": ("gpu_throttled", "by reason"),
    "GPU ECC errors": ("gpu_ecc_errors", "corrected and uncorrected, since the driver was loaded"),
    "GPU Xid errors": ("gpu_xid", "as the driver reports them"),
    "GPU NVLink": ("gpu_nvlink_bytes", "bytes and errors"),
    "GPU PCIe": ("gpu_pcie_bytes", "bytes and replays"),
}
QUESTIONS = {  # by the names under which a GPU's probe says why it has no answer
    "GPU utilisation": "utilisation",
    "GPU memory": "memory",
    "GPU power": "power",
    "GPU temperature": "temperature",
    "GPU throttling": "throttling",
    "GPU ECC errors": "ECC",
    "GPU NVLink": "NVLink and PCIe",
    "GPU PCIe": "NVLink and PCIe",
}


class Found(NamedTuple):
    """`reason`: how it is had, or why it is not."""

    there: bool
    reason: str


def read(places: Places) -> dict[str, Found]:
    """Every group, in an order of its own. Takes what one round of the probes takes."""
    if importlib.util.find_spec("structlog") is None:  # what every daemon needs first
        return {name: Found(False, NO_DAEMON) for names in LOOKS for name in names}
    found: dict[str, Found] = {}
    for names, look in LOOKS.items():
        try:
            found |= look(places)
        except Exception as error:  # noqa: BLE001 - a probe may fail in any way; the others are asked all the same
            found |= dict.fromkeys(names, Found(False, f"the probe failed: {type(error).__name__}: {error}"))
    return found


def of_gpus(probe: "Nvml") -> dict[str, Found]:
    """What NVML tells of the GPUs; `probe` has not been read yet."""
    readings = _taken(probe)
    names = {reading.name for reading in readings}
    count = next((reading.value for reading in readings if reading[:2] == ("gpus", ("present",))), 0)
    absent = probe.absent or ("" if count else "no NVIDIA GPU here")
    answers = probe.answers()
    found = {ANY_GPU: Found(count > 0, absent or f"{count:.0f} that answer NVML")}
    for group, (name, text) in GPU.items():
        if name in names:
            found[group] = Found(True, text)
        else:
            why = absent or answers.get(QUESTIONS.get(group, ""), "")
            found[group] = Found(False, why or "no GPU here tells it")
    return found


def _gpus(places: Places) -> dict[str, Found]:
    from sentinel.daemon.probes.nvml import Nvml

    del places
    return of_gpus(Nvml())


def _host(places: Places) -> dict[str, Found]:
    from sentinel.daemon.probes.host import Host

    del places
    names = {reading.name for reading in _taken(Host())}
    group = "cgroup_memory_bytes" in names
    pressure = "pressure_ratio" in names
    return {
        "host": Found(True, "CPU, load, available memory, swap"),
        "control group": Found(
            group, "memory, limits and throttled time" if group else "no memory controller is seen"
        ),
        "pressure": Found(pressure, "of CPU, memory, I/O" if pressure else "the kernel has no /proc/pressure"),
    }


def _processes(places: Places) -> dict[str, Found]:
    import os

    from sentinel.daemon.probes.processes import tree_of

    del places
    tree = tree_of(os.getpid())
    why = "unique memory cannot be read of this user's own processes (/proc/PID/smaps)"
    return {
        "host memory of a rank": Found(tree is not None, "its process and all children" if tree else why),
        "data workers": Found(tree is not None, "children of multiprocessing, by name and memory" if tree else why),
    }


def _network(places: Places) -> dict[str, Found]:
    from sentinel.daemon.probes.network import Network

    del places
    readings = _taken(Network())
    devices = sorted({reading.labels[0] for reading in readings if reading.name == "network_bytes"})
    tcp = any(reading.name == "tcp_retransmits" for reading in readings)
    return {
        "network": Found(
            bool(devices), f"bytes, drops, errors of {', '.join(devices)}" if devices else "no interface"
        ),
        "TCP retransmits": Found(
            tcp, "in the daemon's network namespace" if tcp else "the kernel has no /proc/net/snmp"
        ),
    }


def _rdma(places: Places) -> dict[str, Found]:
    from sentinel.daemon.probes.rdma import Rdma

    del places
    ports = sorted({"/".join(reading.labels[:2]) for reading in _taken(Rdma())})
    text = f"counters of {', '.join(ports)}" if ports else "no port under /sys/class/infiniband"
    return {"RDMA": Found(bool(ports), text)}


def _disk(places: Places) -> dict[str, Found]:
    from sentinel.daemon.probes.disk import Disk

    folder = next(folder for folder in (places.home, *places.home.parents) if folder.exists())
    readings = _taken(Disk(lambda: {"home": [folder]}))
    return {"disk": Found(bool(readings), "free bytes and inodes of the home and of the run's folders")}


def _taken(probe: "Probe") -> "list[Reading]":
    """One reading; what a probe would log belongs to a daemon's log and not to this command's output."""
    from structlog.testing import capture_logs

    with capture_logs():
        return probe.read()


LOOKS: dict[tuple[str, ...], Callable[[Places], dict[str, Found]]] = {
    (ANY_GPU, *GPU): _gpus,
    ("host", "control group", "pressure"): _host,
    ("host memory of a rank", "data workers"): _processes,
    ("network", "TCP retransmits"): _network,
    ("RDMA",): _rdma,
    ("disk",): _disk,
}
