"""What the daemon measured of the machine stands where the run was at that time."""

import math
from pathlib import Path
from typing import Any

import pytest

from sentinel.postmortem.machine import MACHINE, columns_of
from sentinel.postmortem.series import series_of
from sentinel.store.history import History
from tests.postmortem.pages import full_run
from tests.postmortem.test_html_page import Found, page_of
from tests.store.building import RUN, START, url_in

TIMES = [float(second) for second in range(100, 200)]


def sample(time: float, attempt: int = 1, **values: float) -> dict[str, Any]:
    return {"attempt": attempt, "rank": 0, "time": time, "sample": values}


def known(samples: list[dict[str, Any]], name: str) -> dict[int, float]:
    column = columns_of(samples, TIMES)[name]
    return {place: value for place, value in enumerate(column) if not math.isnan(value)}


def test_a_sample_belongs_to_the_first_record_that_ended_after_it():
    samples = [sample(time, cpu_utilization_ratio=0.5) for time in (20.0, 110.0, 120.5, 999.0)]
    assert known(samples, "cpu_utilization") == {0: 0.5, 10: 0.5, 21: 0.5, 99: 0.5}


def test_of_several_gpus_the_hottest_counts_and_the_power_is_the_sum():
    values = {f"gpu_temperature_celsius{{GPU-{n}}}": 60.0 + n for n in range(3)}
    values |= {f"gpu_power_watts{{GPU-{n}}}": 300.0 for n in range(3)}
    values |= {f"gpu_utilization_ratio{{GPU-{n}}}": n / 4 for n in range(3)}
    samples = [{**sample(110.0), "sample": values}]
    names = ("gpu_temperature", "gpu_power", "gpu_utilization_lowest", "gpu_utilization_highest")
    assert [known(samples, name) for name in names] == [{10: 62.0}, {10: 900.0}, {10: 0.0}, {10: 0.5}]


def network(time: float, sent: float, attempt: int = 1) -> dict[str, Any]:
    values = {
        "network_bytes{eth0,sent}": sent,
        "network_bytes{eth1,sent}": sent,
        "network_bytes{lo,sent}": 1e12 * time,
    }
    return {**sample(time, attempt), "sample": values}


def test_counters_are_rates_of_all_interfaces_but_the_loopback():
    samples = [network(110.0, 0.0), network(120.0, 50.0), network(130.0, 40.0), network(140.0, 60.0)]
    assert known(samples, "network_sent") == {20: 10.0, 40: 4.0}, "one that fell has begun again"


def test_nothing_is_known_of_the_time_between_two_attempts():
    samples = [network(110.0, 0.0), network(120.0, 50.0, attempt=2), network(130.0, 55.0, attempt=2)]
    assert known(samples, "network_sent") == {30: 1.0}


def test_room_is_the_least_of_what_falls_on_one_place():
    values = [
        {"machine_memory_bytes{available}": gigabytes * 1e9, "disk_free_bytes{home}": 1e9} for gigabytes in (4, 2, 3)
    ]
    samples = [{**sample(110.0 - number / 10), "sample": one} for number, one in enumerate(values)]
    assert known(samples, "machine_memory_available") == {10: 2e9}
    assert known(samples, "disk_free_home") == {10: 1e9}


@pytest.mark.parametrize("samples", [[], [sample(110.0, cpu_utilization_ratio=math.nan, unheard_of=1.0)]])
def test_what_was_not_measured_is_absent(samples: list[dict[str, Any]]):
    assert all(not known(samples, name) for name in MACHINE)
    assert {name: len(column) for name, column in columns_of(samples, []).items()} == dict.fromkeys(MACHINE, 0)


def test_the_page_shows_what_the_database_has_and_no_more(tmp_path: Path):
    full_run(tmp_path)
    found = Found(page_of(tmp_path))
    drawn = {figure["name"]: figure for figure in found.data["figures"]}
    assert drawn.keys() >= {"gpu", "heat", "power", "cpu", "room", "network"}
    assert "retransmits" not in drawn
    with History(url_in(tmp_path)) as history:
        samples = list(history.machine_samples(RUN))
        column = series_of(history, RUN).columns["cpu_utilization"]
    assert [row["time"] for row in samples] == sorted(row["time"] for row in samples)
    assert all("cpu_utilization_ratio" in row["sample"] for row in samples), "a rank's own samples stay behind"
    assert sum(not math.isnan(value) for value in column.values) == len(samples) == 20
    assert samples[0]["time"] == START + 20
