"""What is read of the machine, of its control groups in both layouts, and of its disks."""

import shutil
from pathlib import Path

import psutil
import pytest

from sentinel.daemon.probes.disk import Disk
from sentinel.daemon.probes.host import Host
from tests.daemon.probes.conftest import plant
from tests.daemon.probes.test_nvml import values

GIB = 1 << 30
PSI = "some avg10={} avg60=0.10 avg300=0.02 total=123\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=12\n"


def of(root: Path, pid: int = 0) -> dict[tuple[str, ...], float]:
    return values(Host(lambda: pid, root).read())


def test_this_machine_says_how_much_memory_is_left() -> None:
    found = values(Host().read())
    assert (
        0
        < found["machine_memory_bytes", "available"]
        <= found["machine_memory_bytes", "total"]
        == psutil.virtual_memory().total
    )
    assert 0 <= found["cpu_utilization_ratio",] <= 1
    assert found["load_average",] >= 0
    assert found["machine_memory_bytes", "swap_used"] >= 0


def test_pressure_is_a_share_of_time(tmp_path: Path) -> None:
    plant(tmp_path, {"proc/pressure/memory": PSI.format("12.50"), "proc/pressure/io": PSI.format("0.00")})
    found = of(tmp_path)
    assert found["pressure_ratio", "memory"] == 0.125
    assert found["pressure_ratio", "io"] == 0
    assert ("pressure_ratio", "cpu") not in found


def test_a_limit_of_an_outer_control_group_holds_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1/c1"
    plant(
        tmp_path,
        {
            "proc/77/cgroup": "0::/kubepods/pod1/c1\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/cpu.stat": "usage_usec 10\nnr_throttled 4\nthrottled_usec 2500000\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/kubepods/memory.max": f"{64 * GIB}\n",
        },
    )
    found = of(tmp_path, 77)
    assert found["cgroup_memory_bytes", "limit"] == 4 * GIB
    assert found["cgroup_memory_bytes", "used"] == 3 * GIB
    assert found["cgroup_cpu_throttled_seconds",] == pytest.approx(2.5)


def test_the_first_layout_of_control_groups_is_read_too(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/job/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n",
        },
    )
    found = of(tmp_path)
    assert found["cgroup_memory_bytes", "limit"] == 2 * GIB
    assert found["cgroup_memory_bytes", "used"] == GIB
    assert found["cgroup_cpu_throttled_seconds",] == pytest.approx(1.5)


def test_inside_a_container_the_top_is_its_own_group(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../somewhere/on/the/host\n",
            "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    assert of(tmp_path)["cgroup_memory_bytes", "limit"] == 8 * GIB


def test_a_group_without_a_limit_has_none(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        },
    )
    found = of(tmp_path)
    assert found["cgroup_memory_bytes", "used"] == 5
    assert ("cgroup_memory_bytes", "limit") not in found


def test_a_disk_is_told_by_place_and_a_removed_folder_not_at_all(tmp_path: Path) -> None:
    probe = Disk(lambda: {"home": [tmp_path], "cwd": [tmp_path / "gone"]})
    found = values(probe.read())
    assert {key[1] for key in found} == {"home"}
    free = shutil.disk_usage(tmp_path).free
    assert found["disk_free_bytes", "home"] == pytest.approx(free, abs=256 << 20)
    assert found["disk_free_bytes", "home"] <= found["disk_size_bytes", "home"]


def test_of_several_folders_the_fullest_disk_is_told(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one file system only")
    fullest = min(shutil.disk_usage(folder).free for folder in (tmp_path, other))
    found = values(Disk(lambda: {"cwd": [tmp_path, other]}).read())
    assert found["disk_free_bytes", "cwd"] == pytest.approx(fullest, abs=256 << 20)
