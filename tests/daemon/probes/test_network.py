"""Interfaces, TCP and RDMA ports, read from recorded files; and this machine's own."""

from pathlib import Path

import psutil
import pytest

from sentinel.daemon.probes import network
from sentinel.daemon.probes.network import Network
from sentinel.daemon.probes.rdma import COUNTERS, Rdma
from tests.daemon.probes.conftest import plant
from tests.daemon.probes.test_nvml import values

PORT = "class/infiniband/mlx5_0/ports/1"


def test_interfaces_are_read_with_their_drops_and_errors(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    found = values(Network(proc).read())
    fields = {line.split()[0]: line.split()[1:] for line in (proc / "net" / "dev").read_text().splitlines()[2:]}
    assert found["network_bytes", "eth0", "received"] == int(fields["eth0:"][0]) > 0
    assert found["network_bytes", "eth0", "sent"] == int(fields["eth0:"][8]) > 0
    assert {what for name, _, what in (key for key in found if len(key) == 3) if name == "network_errors"} == {
        *network.ERRORS
    }


def test_a_drop_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {"net/dev": "h\nh\n  eth0: 10 1 2 3 0 0 0 0 20 1 4 5 0 0 0 0\n"})
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    found = values(Network(tmp_path).read())
    told = {key[2]: value for key, value in found.items() if key[0] == "network_errors"}
    assert told == {"receive_errors": 2, "receive_drops": 3, "send_errors": 4, "send_drops": 5}


def test_interfaces_of_containers_are_left_out_and_their_number_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"veth{number}" for number in range(300)] + [f"eth{number}" for number in range(100)]
    plant(tmp_path, {"net/dev": "h\nh\n" + "".join(f" {name}: {'1 ' * 16}\n" for name in names)})
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    devices = {key[1] for key in values(Network(tmp_path).read())}
    assert len(devices) == network.MOST_DEVICES
    assert not any(name.startswith("veth") for name in devices)


def test_retransmits_are_read_beside_what_was_sent(proc: Path) -> None:
    found = values(Network(proc).read())
    names, numbers = [
        line.split()[1:] for line in (proc / "net" / "snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    recorded = dict(zip(names, map(int, numbers), strict=True))
    assert found["tcp_retransmits",] == recorded["RetransSegs"] > 0
    assert found["tcp_sent_segments",] == recorded["OutSegs"]
    assert ("tcp_timeouts",) in found


def test_without_the_kernels_tables_there_are_the_interfaces(tmp_path: Path) -> None:
    found = values(Network(tmp_path).read())
    assert not any(key[0].startswith("tcp") for key in found)
    assert any(key[0] == "network_bytes" for key in found)


def test_a_port_of_rdma_is_read_in_bytes_and_by_counter(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            f"{PORT}/counters/port_xmit_data": "1000\n",
            f"{PORT}/counters/port_rcv_data": "500\n",
            f"{PORT}/counters/link_downed": "2\n",
            f"{PORT}/counters/VL15_dropped": "N/A (no PMA)\n",
            f"{PORT}/hw_counters/out_of_sequence": "17\n",
            f"{PORT}/hw_counters/lifespan": "10\n",
        },
    )
    found = values(Rdma(tmp_path).read())
    assert found == {
        ("rdma_bytes", "mlx5_0", "1", "sent"): 4000,
        ("rdma_bytes", "mlx5_0", "1", "received"): 2000,
        ("rdma_counter", "mlx5_0", "1", "link_downed"): 2,
        ("rdma_counter", "mlx5_0", "1", "out_of_sequence"): 17,
    }


def test_counters_of_rdma_are_a_closed_list_without_repetition() -> None:
    names = [name for folder in COUNTERS.values() for name in folder]
    assert len(set(names)) == len(names)


def test_a_machine_without_rdma_says_nothing(tmp_path: Path) -> None:
    assert Rdma(tmp_path).read() == []
