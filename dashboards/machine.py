"""The dashboard of machines: are GPUs, network, disks and the data workers fit to train?"""

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.parts import (
    ANY_IS_BAD,
    ANY_IS_GOOD,
    COUNT,
    MACHINE,
    Look,
    Panel,
    Query,
    Section,
    finished,
    lines,
    number,
    of_machines,
    page,
)

UID = "sentinel-machine"
_OFTEN = "[$__rate_interval]"
_SHARE = Look("percentunit", least=0)
_BYTES = Look("bytes", least=0)
_PER_SECOND = Look("Bps", least=0)
_GPU = "{{instance}} {{gpu}}"


def page_of_machines() -> Dashboard:
    sections = [
        Section("Now", _now()),
        Section("GPUs", _gpus()),
        Section("GPU faults", _faults()),
        Section("Network", _network()),
        Section("RDMA", _rdma()),
        Section("Disks", _disks()),
        Section("Host", _host()),
        Section("Data workers", _workers()),
    ]
    text = (
        "The machines that runs train on, as their sentinel daemons see them. One instance is one daemon's machine."
    )
    return finished(page("sentinel: machine", UID, text, sections, of_machines()))


def _now() -> list[Panel]:
    present = Query(_with("sum(sentinel_gpus{})", 'state="present"'), "GPUs")
    lost = Query(_with("sum(sentinel_gpus{})", 'state="lost"'), "lost")
    hottest = Query(f"max(sentinel_gpu_temperature_celsius{MACHINE})", "hottest")
    watts = Query(f"sum(sentinel_gpu_power_watts{MACHINE})", "power")
    fullest = Query(f"min(sentinel_disk_free_bytes{MACHINE})", "free")
    least = Query(_with("min(sentinel_machine_memory_bytes{})", 'kind="available"'), "available")
    return [
        number("GPUs", "That answer.", present, ANY_IS_GOOD),
        number("GPUs lost", "That were there and do not answer.", lost, ANY_IS_BAD),
        number("Hottest GPU", "Of all.", hottest).unit("celsius"),
        number("Power", "Of all GPUs together.", watts).unit("watt"),
        number("Least free disk", "Of all places.", fullest).unit("bytes"),
        number("Least memory", "Available on a machine.", least).unit("bytes"),
    ]


def _gpus() -> list[Panel]:
    busy = Query(f"sentinel_gpu_memory_busy_ratio{MACHINE}", _GPU)
    limit = Query(f"sentinel_gpu_power_limit_watts{MACHINE}", f"{_GPU} limit")
    held = f"sum by (instance, gpu, reason) (sentinel_gpu_throttled{MACHINE}) > 0"
    nvlink = f"sum by (instance, gpu, direction) (rate(sentinel_gpu_nvlink_bytes_total{MACHINE}{_OFTEN}))"
    pcie = f"sum by (instance, gpu, direction) (rate(sentinel_gpu_pcie_bytes_total{MACHINE}{_OFTEN}))"
    both_ways = f"{_GPU} {{{{direction}}}}"
    return [
        lines(
            "GPU utilisation",
            "Time with a kernel.",
            [Query(f"sentinel_gpu_utilization_ratio{MACHINE}", _GPU)],
            _SHARE,
        ),
        lines("GPU memory in use", "Time with a read or a write of device memory.", [busy], _SHARE),
        lines(
            "GPU memory",
            "Whoever holds it, used and total.",
            [Query(f"sentinel_gpu_memory_bytes{MACHINE}", f"{_GPU} {{{{kind}}}}")],
            _BYTES,
        ),
        lines(
            "GPU power",
            "And the limit.",
            [Query(f"sentinel_gpu_power_watts{MACHINE}", _GPU), limit],
            Look("watt", least=0),
        ),
        lines(
            "GPU temperature",
            "Of the die.",
            [Query(f"sentinel_gpu_temperature_celsius{MACHINE}", _GPU)],
            Look("celsius"),
        ),
        lines("GPU throttled", "1 while clocks are held back.", [Query(held, f"{_GPU} {{{{reason}}}}")], COUNT),
        lines("NVLink", "Per second, over all links.", [Query(nvlink, both_ways)], _PER_SECOND),
        lines("PCIe", "Per second.", [Query(pcie, both_ways)], _PER_SECOND),
    ]


def _faults() -> list[Panel]:
    ecc = f"sum by (instance, gpu, kind) (increase(sentinel_gpu_ecc_errors_total{MACHINE}{_OFTEN}))"
    xid = f"sum by (instance, gpu) (increase(sentinel_gpu_xid_total{MACHINE}{_OFTEN}))"
    latest = Query(f"sentinel_gpu_last_xid{MACHINE}", _GPU)
    links = f"sum by (instance, gpu, kind) (increase(sentinel_gpu_nvlink_errors_total{MACHINE}{_OFTEN}))"
    replays = f"sum by (instance, gpu) (increase(sentinel_gpu_pcie_replays_total{MACHINE}{_OFTEN}))"
    return [
        lines("ECC errors", "Corrected and not.", [Query(ecc, f"{_GPU} {{{{kind}}}}")], COUNT),
        lines("Xid errors", "As the driver reports them.", [Query(xid, _GPU)], COUNT),
        lines("Latest Xid", "Its number in NVIDIA's table; absent before the first.", [latest], COUNT),
        lines("NVLink errors", "By kind.", [Query(links, f"{_GPU} {{{{kind}}}}")], COUNT),
        lines("PCIe replays", "Packets sent again.", [Query(replays, _GPU)], COUNT),
    ]


def _network() -> list[Panel]:
    carried = f"sum by (instance, device, direction) (rate(sentinel_network_bytes_total{MACHINE}{_OFTEN}))"
    lost = f"sum by (instance, device, what) (increase(sentinel_network_errors_total{MACHINE}{_OFTEN}))"
    again = (
        f"sum by (instance) (rate(sentinel_tcp_retransmits_total{MACHINE}{_OFTEN}))"
        f" / sum by (instance) (rate(sentinel_tcp_sent_segments_total{MACHINE}{_OFTEN}))"
    )
    late = f"sum by (instance) (increase(sentinel_tcp_timeouts_total{MACHINE}{_OFTEN}))"
    return [
        lines("Network", "Per second.", [Query(carried, "{{instance}} {{device}} {{direction}}")], _PER_SECOND),
        lines("Network errors", "Lost or broken.", [Query(lost, "{{instance}} {{device}} {{what}}")], COUNT),
        lines("TCP retransmits", "Share of the segments that were sent.", [Query(again, "{{instance}}")], _SHARE),
        lines("TCP timeouts", "Segments that nobody confirmed in time.", [Query(late, "{{instance}}")], COUNT),
    ]


def _rdma() -> list[Panel]:
    port = "{{instance}} {{device}}/{{port}}"
    carried = f"sum by (instance, device, port, direction) (rate(sentinel_rdma_bytes_total{MACHINE}{_OFTEN}))"
    counted = f"sum by (instance, device, port, counter) (increase(sentinel_rdma_counter_total{MACHINE}{_OFTEN}))"
    text = "Errors of the link, and signs of a congested fabric."
    return [
        lines("RDMA", "Per second.", [Query(carried, f"{port} {{{{direction}}}}")], _PER_SECOND),
        lines("RDMA counters", text, [Query(counted, f"{port} {{{{counter}}}}")], Look(least=0)),
    ]


def _disks() -> list[Panel]:
    place = "{{instance}} {{place}}"
    share = f"sentinel_disk_free_bytes{MACHINE} / sentinel_disk_size_bytes{MACHINE}"
    inodes = Query(f"sentinel_disk_free_inodes{MACHINE}", place)
    return [
        lines("Disk free", "By place.", [Query(f"sentinel_disk_free_bytes{MACHINE}", place)], _BYTES),
        lines("Disk free, share", "Of its size.", [Query(share, place)], _SHARE),
        lines("Inodes free", "Files that can still be made.", [inodes], Look(least=0)),
    ]


def _host() -> list[Panel]:
    kind = "{{instance}} {{kind}}"
    held = f"sum by (instance) (rate(sentinel_cgroup_cpu_throttled_seconds_total{MACHINE}{_OFTEN}))"
    waits = Query(f"sentinel_pressure_ratio{MACHINE}", "{{instance}} {{resource}}")
    group = Query(f"sentinel_cgroup_memory_bytes{MACHINE}", kind)
    return [
        lines(
            "CPU", "Share of all cores.", [Query(f"sentinel_cpu_utilization_ratio{MACHINE}", "{{instance}}")], _SHARE
        ),
        lines("Load", "Mean of a minute.", [Query(f"sentinel_load_average{MACHINE}", "{{instance}}")], Look(least=0)),
        lines("Memory", "Of the machine.", [Query(f"sentinel_machine_memory_bytes{MACHINE}", kind)], _BYTES),
        lines("Control group", "Memory of the run's, and its limit.", [group], _BYTES),
        lines("Pressure", "Time in which some process waited for it.", [waits], _SHARE),
        lines(
            "Kept from its cores",
            "Seconds per second, by the control group.",
            [Query(held, "{{instance}}")],
            Look(least=0),
        ),
    ]


def _workers() -> list[Panel]:
    rank = "{{run_id}} rank {{rank}}"
    held = Query(f"sentinel_data_worker_memory_bytes{MACHINE}", rank)
    there = Query(f"sentinel_data_workers{MACHINE}", rank)
    return [
        lines("Data workers' memory", "Unique memory, of all of a rank. One that only grows leaks.", [held], _BYTES),
        lines("Data workers", "Processes that load data.", [there], COUNT),
    ]


def _with(expr: str, matcher: str) -> str:
    """The machines that are chosen, and one more matcher in place of the empty braces."""
    return expr.replace("{}", f"{MACHINE[:-1]}, {matcher}}}")
