"""Lay what the daemon measured of the machine beside the run's records, as columns. Pure.

A sample of the whole machine comes about every ten seconds; it belongs to the first record that ended after it. Of
several GPUs the hottest counts, the power is the sum. Counters become rates between two samples of one attempt.
"""

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MACHINE = (
    *("gpu_utilization_lowest", "gpu_utilization_highest", "gpu_temperature", "gpu_power", "cpu_utilization"),
    *("machine_memory_available", "disk_free_home", "disk_free_cwd"),
    *("network_received", "network_sent", "tcp_retransmits"),
)

_LOOPBACK = "lo"
_LEAST = frozenset({"gpu_utilization_lowest", "machine_memory_available", "disk_free_home", "disk_free_cwd"})
_COUNTERS = frozenset({"network_received", "network_sent", "tcp_retransmits"})

Values = dict[str, float]


def columns_of(samples: Iterable[Mapping[str, Any]], times: Sequence[float]) -> dict[str, "array[float]"]:
    """Values by name of MACHINE, NaN where nothing was measured. `times`: when each record ended, rising."""
    columns = {name: array("d", [math.nan]) * len(times) for name in MACHINE}
    before: dict[tuple[int, int], tuple[float, Values]] = {}  # attempt and rank -> its latest counters
    for row in samples if times else ():
        found = _signals(row["sample"])
        counted = {name: found.pop(name) for name in _COUNTERS & found.keys()}
        whose = (row["attempt"], row["rank"])
        if counted:
            found |= _rates(before.get(whose), row["time"], counted)
            before[whose] = (row["time"], counted)
        place = min(bisect_left(times, row["time"]), len(times) - 1)
        for name, value in found.items():
            _fold(columns[name], place, value, min if name in _LEAST else max)
    return columns


def _signals(sample: Mapping[str, Any]) -> Values:
    """What a sample tells of each name of MACHINE, counters as they are."""
    by_name: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for key, value in sample.items():
        name, _, labels = key.rstrip("}").partition("{")
        if isinstance(value, int | float) and math.isfinite(value):
            by_name[name][tuple(labels.split(","))] = float(value)
    busy = list(by_name["gpu_utilization_ratio"].values())
    network = {labels: value for labels, value in by_name["network_bytes"].items() if labels[0] != _LOOPBACK}
    told = {
        "gpu_utilization_lowest": [min(busy)] if busy else [],
        "gpu_utilization_highest": [max(busy)] if len(busy) > 1 else [],
        "gpu_temperature": sorted(by_name["gpu_temperature_celsius"].values())[-1:],
        "gpu_power": _sum(by_name["gpu_power_watts"].values()),
        "cpu_utilization": list(by_name["cpu_utilization_ratio"].values()),
        "machine_memory_available": _of(by_name["machine_memory_bytes"], "available"),
        "disk_free_home": _of(by_name["disk_free_bytes"], "home"),
        "disk_free_cwd": _of(by_name["disk_free_bytes"], "cwd"),
        "network_received": _sum(value for labels, value in network.items() if labels[-1] == "received"),
        "network_sent": _sum(value for labels, value in network.items() if labels[-1] == "sent"),
        "tcp_retransmits": list(by_name["tcp_retransmits"].values()),
    }
    return {name: values[0] for name, values in told.items() if values}


def _of(values: Mapping[tuple[str, ...], float], label: str) -> list[float]:
    return [value for labels, value in values.items() if labels == (label,)]


def _sum(values: Iterable[float]) -> list[float]:
    given = list(values)
    return [sum(given)] if given else []


def _rates(before: tuple[float, Values] | None, now: float, counted: Values) -> Values:
    """Per second. A counter that fell has begun again, so nothing is known of it."""
    if before is None or not now > before[0]:
        return {}
    grown = {name: value - before[1][name] for name, value in counted.items() if name in before[1]}
    return {name: growth / (now - before[0]) for name, growth in grown.items() if growth >= 0.0}


def _fold(column: "array[float]", place: int, value: float, fold: Callable[[float, float], float]) -> None:
    column[place] = value if math.isnan(column[place]) else fold(column[place], value)
