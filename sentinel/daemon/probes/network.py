"""What does the network of this machine do and lose: per interface, and TCP as a whole?

Counted in the network namespace of the daemon. NCCL over RDMA is not seen here but in `rdma.py`.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

from sentinel.daemon.probes.probe import Reading

EVERY_SECONDS = 1.0
MOST_DEVICES = 32  # each is six series
# Ends of the cables of containers and virtual machines, and what the kernel makes by itself: what they carry passes
# a real interface, too, and a node may have hundreds of them.
VIRTUAL = ("veth", "cali", "docker", "br-", "virbr", "cni", "flannel", "lxc", "ifb", "dummy", "gre", "sit", "tunl")
ERRORS = {
    "receive_errors": "errin",
    "send_errors": "errout",
    "receive_drops": "dropin",
    "send_drops": "dropout",
}
# Reading -> (file, protocol, field), as in the kernel's Documentation/networking/snmp_counter.rst.
TCP = {
    "tcp_retransmits": ("snmp", "Tcp", "RetransSegs"),
    "tcp_sent_segments": ("snmp", "Tcp", "OutSegs"),
    "tcp_timeouts": ("netstat", "TcpExt", "TCPTimeouts"),
}


class Network:
    """The probe. `proc`: where /proc is mounted."""

    name = "network"
    every_seconds = EVERY_SECONDS

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def read(self) -> list[Reading]:
        return [*_of_interfaces(), *self._of_tcp()]

    def _of_tcp(self) -> Iterator[Reading]:
        tables = {name: _table(self._proc / "net" / name) for name in ("snmp", "netstat")}
        for reading, (table, protocol, field) in TCP.items():
            value = tables[table].get(protocol, {}).get(field)
            if value is not None:
                yield Reading(reading, (), value)


def _of_interfaces() -> Iterator[Reading]:
    # nowrap would remember every interface that ever was; whoever exports the counters looks after that.
    found = psutil.net_io_counters(pernic=True, nowrap=False)
    shown = [name for name in sorted(found) if not name.startswith(VIRTUAL)]
    for name in shown[:MOST_DEVICES]:
        counted = found[name]
        yield Reading("network_bytes", (name, "received"), counted.bytes_recv)
        yield Reading("network_bytes", (name, "sent"), counted.bytes_sent)
        for what, field in ERRORS.items():
            yield Reading("network_errors", (name, what), getattr(counted, field))


def _table(path: Path) -> dict[str, dict[str, int]]:
    """By protocol: a line of names, then a line of values. Empty where the kernel does not have it."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    found: dict[str, dict[str, int]] = {}
    for names, numbers in zip(lines[::2], lines[1::2], strict=False):
        protocol, _, fields = names.partition(":")
        other, _, values = numbers.partition(":")
        if protocol == other:
            pairs = zip(fields.split(), map(int, values.split()), strict=False)
            found[protocol] = dict(pairs)
    return found
