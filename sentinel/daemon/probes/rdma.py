"""What do the RDMA ports (InfiniBand, RoCE) of this machine carry, and what goes wrong on them?"""

from collections.abc import Iterator
from pathlib import Path

from sentinel.daemon.probes.probe import Reading

EVERY_SECONDS = 2.0
MOST_PORTS = 32
UNIT_BYTES = 4  # of the two data counters: "data octets, divided by 4" (InfiniBand spec 16.1.3.5)
DATA = {"port_rcv_data": "received", "port_xmit_data": "sent"}
# A closed list, by folder: errors of the link (the kernel's ABI/stable/sysfs-class-infiniband), and what
# tells of a congested or lossy fabric (NVIDIA, "Understanding mlx5 Linux Counters").
COUNTERS = {
    "counters": (
        *("symbol_error", "link_error_recovery", "link_downed", "local_link_integrity_errors"),
        *("port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards", "port_xmit_wait"),
        *("excessive_buffer_overrun_errors", "VL15_dropped"),
    ),
    "hw_counters": (
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err"),
        *("rnr_nak_retry_err", "out_of_buffer", "duplicate_request", "roce_adp_retrans", "roce_slow_restart"),
        *("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rx_icrc_encapsulated"),
    ),
}


class Rdma:
    """The probe. `sys`: where /sys is mounted."""

    name = "rdma"
    every_seconds = EVERY_SECONDS

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._devices = sys / "class" / "infiniband"

    def read(self) -> list[Reading]:
        ports = sorted(self._devices.glob("*/ports/*"))
        return [reading for port in ports[:MOST_PORTS] for reading in _of_port(port)]


def _of_port(port: Path) -> Iterator[Reading]:
    labels = (port.parents[1].name, port.name)
    for counter, direction in DATA.items():
        value = _number(port / "counters" / counter)
        if value is not None:
            yield Reading("rdma_bytes", (*labels, direction), value * UNIT_BYTES)
    for folder, names in COUNTERS.items():
        for counter in names:
            value = _number(port / folder / counter)
            if value is not None:
                yield Reading("rdma_counter", (*labels, counter), value)


def _number(path: Path) -> int | None:
    """None where the driver does not have it: no such file, or a text as "N/A (no PMA)"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
