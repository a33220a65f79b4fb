"""What is read of GPUs through NVML, and what happens when a GPU, a call, the driver or the library is not there."""

import inspect

import pynvml
import pytest
from structlog.testing import capture_logs

from sentinel.daemon.probes import nvml, nvml_values
from sentinel.daemon.probes.nvml import RETRY_SECONDS, SELDOM_SECONDS, Nvml
from sentinel.daemon.probes.probe import Reading
from tests.daemon.probes.nvml_fake import FIELDS, FakeNvml, gpu


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def probe_of(fake: FakeNvml, clock: Clock) -> Nvml:
    return Nvml(lambda: fake, clock)


def values(readings: list[Reading]) -> dict[tuple[str, ...], float]:
    found = {(name, *labels): value for name, labels, value in readings}
    assert len(found) == len(readings), "two readings of one series"
    return found


FUNCTIONS = [name for name in vars(FakeNvml) if name.startswith("nvml")]


def test_the_fake_has_every_function_that_is_used() -> None:
    used = {name for name in vars(nvml_values.NvmlLike) if name.startswith("nvml")}
    assert used == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_fake_is_called_as_the_installed_module_is(name: str) -> None:
    real = list(inspect.signature(getattr(pynvml, name)).parameters)
    fake = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
    assert fake == real


def test_our_constants_are_the_installed_modules() -> None:
    assert nvml.UNINITIALIZED == pynvml.NVML_ERROR_UNINITIALIZED
    assert nvml.NOT_SUPPORTED == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert nvml.NO_PERMISSION == pynvml.NVML_ERROR_NO_PERMISSION
    assert nvml.DRIVER_NOT_LOADED == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert nvml.FUNCTION_NOT_FOUND == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert nvml.GPU_IS_LOST == pynvml.NVML_ERROR_GPU_IS_LOST
    assert nvml.LIB_RM_VERSION_MISMATCH == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert pynvml.nvmlEventTypeXidCriticalError == nvml.XID_EVENT
    assert nvml_values.TEMPERATURE_GPU == pynvml.NVML_TEMPERATURE_GPU
    assert nvml_values.VOLATILE_ECC == pynvml.NVML_VOLATILE_ECC
    assert nvml_values.ECC_KINDS == {
        "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    names = [
        *("ApplicationsClocksSetting", "SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown"),
        *("HwThermalSlowdown", "HwPowerBrakeSlowdown", "DisplayClockSetting"),
    ]
    bits = [getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in names]
    assert list(nvml_values.THROTTLE_REASONS.values()) == bits
    types = [
        *("DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG"),
        *("SIGNED_LONG_LONG", "SIGNED_INT", "UNSIGNED_SHORT"),
    ]
    assert [getattr(pynvml, f"NVML_VALUE_TYPE_{name}") for name in types] == list(range(7))
    assert [name for name, _ in pynvml.c_nvmlValue_t._fields_][:7] == list(nvml_values.VALUE_FIELDS)
    assert FIELDS.keys() <= nvml_values.FIELDS.keys()


def test_everything_a_gpu_says_has_base_units(clock: Clock) -> None:
    found = values(probe_of(FakeNvml(gpu()), clock).read())
    assert found["gpu_utilization_ratio", "GPU-a"] == 0.97
    assert found["gpu_memory_busy_ratio", "GPU-a"] == 0.41
    assert found["gpu_memory_bytes", "GPU-a", "used"] == 100e9
    assert found["gpu_memory_bytes", "GPU-a", "total"] == 141e9
    assert found["gpu_power_watts", "GPU-a"] == 654.321
    assert found["gpu_power_limit_watts", "GPU-a"] == 700.0
    assert found["gpu_temperature_celsius", "GPU-a"] == 71
    assert found["gpu_ecc_errors", "GPU-a", "corrected"] == 3
    assert found["gpu_ecc_errors", "GPU-a", "uncorrected"] == 0
    assert found["gpu_xid", "GPU-a"] == 0
    assert found["gpu_nvlink_bytes", "GPU-a", "sent"] == 2048 * 1024
    assert found["gpu_nvlink_errors", "GPU-a", "replay"] == 1
    assert ("gpu_nvlink_errors", "GPU-a", "recovery") not in found, "this one the GPU does not know"
    assert found["gpu_pcie_bytes", "GPU-a", "received"] == 9e6
    assert found["gpu_pcie_replays", "GPU-a"] == 2
    assert found["gpus", "present"] == 1
    throttled = {key[2] for key, value in found.items() if key[0] == "gpu_throttled" and value}
    assert throttled == {"sw_power_cap", "hw_thermal"}


def test_a_call_that_is_not_supported_costs_its_own_value_only_and_is_not_asked_again(clock: Clock) -> None:
    old = gpu()
    old.failing["nvmlDeviceGetPowerUsage"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    fake = FakeNvml(old)
    probe = probe_of(fake, clock)
    found = values(probe.read())
    assert ("gpu_power_watts", "GPU-a") not in found
    assert ("gpu_power_limit_watts", "GPU-a") in found
    assert probe.answers()["power"] == "Not Supported"
    assert probe.answers()["temperature"] == ""
    probe.read()
    assert fake.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_a_call_that_fails_once_is_asked_again(clock: Clock) -> None:
    shaky = gpu()
    shaky.failing["nvmlDeviceGetTemperature"] = pynvml.NVML_ERROR_UNKNOWN
    probe = probe_of(FakeNvml(shaky), clock)
    assert ("gpu_temperature_celsius", "GPU-a") not in values(probe.read())
    shaky.failing.clear()
    assert ("gpu_temperature_celsius", "GPU-a") in values(probe.read())


def test_what_changes_rarely_is_asked_rarely_and_told_always(clock: Clock) -> None:
    only = gpu()
    fake = FakeNvml(only)
    probe = probe_of(fake, clock)
    probe.read()
    only.ecc = (4, 1)
    clock.now += 1.0
    assert values(probe.read())["gpu_ecc_errors", "GPU-a", "uncorrected"] == 0
    clock.now += SELDOM_SECONDS
    assert values(probe.read())["gpu_ecc_errors", "GPU-a", "uncorrected"] == 1
    assert fake.calls.count("nvmlDeviceGetTotalEccErrors") == 4


def test_a_gpu_that_falls_off_the_bus_takes_only_its_own_values_along(clock: Clock) -> None:
    doomed = gpu("GPU-b")
    fake = FakeNvml(gpu(), doomed)
    probe = probe_of(fake, clock)
    assert values(probe.read())["gpu_power_watts", "GPU-b"]
    fake.xid(doomed, 79)  # "GPU has fallen off the bus"
    doomed.lost = True
    with capture_logs() as logs:
        found = values(probe.read())
    assert {entry["gpu"] for entry in logs if "is lost" in entry["event"]} == {"GPU-b"}
    assert not {key for key in found if "GPU-b" in key} - {("gpu_xid", "GPU-b"), ("gpu_last_xid", "GPU-b")}
    assert found["gpu_last_xid", "GPU-b"] == 79, "although it could not tell its name any more"
    assert found["gpu_power_watts", "GPU-a"]
    assert (found["gpus", "present"], found["gpus", "lost"]) == (1, 1)
    clock.now += SELDOM_SECONDS
    assert values(probe.read())["gpus", "lost"] == 1
    doomed.lost = False
    clock.now += SELDOM_SECONDS
    back = values(probe.read())
    assert (back["gpus", "present"], back["gpus", "lost"]) == (2, 0)
    assert back["gpu_power_watts", "GPU-b"]


def test_a_gpu_that_is_lost_from_the_start_is_counted(clock: Clock) -> None:
    found = values(probe_of(FakeNvml(gpu(), gpu("GPU-b", lost=True)), clock).read())
    assert (found["gpus", "present"], found["gpus", "lost"]) == (1, 1)


def test_xids_are_counted_without_waiting_for_them(clock: Clock) -> None:
    only = gpu()
    fake = FakeNvml(only)
    probe = probe_of(fake, clock)
    probe.read()
    for number in (13, 31):
        fake.xid(only, number)
    with capture_logs() as logs:
        found = values(probe.read())
    assert (found["gpu_xid", "GPU-a"], found["gpu_last_xid", "GPU-a"]) == (2, 31)
    assert [entry["xid"] for entry in logs] == [13, 31]
    assert set(fake.waited_ms) == {0}


@pytest.mark.parametrize("function", ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
def test_a_gpu_that_tells_no_events_has_no_count_of_xids(function: str, clock: Clock) -> None:
    deaf = gpu()
    deaf.failing[function] = pynvml.NVML_ERROR_NOT_SUPPORTED
    fake = FakeNvml(deaf, gpu("GPU-b"))
    found = values(probe_of(fake, clock).read())
    assert function in fake.calls
    assert ("gpu_xid", "GPU-a") not in found, "absent, and not 0"
    assert found["gpu_xid", "GPU-b"] == 0
    assert found["gpu_power_watts", "GPU-a"]


def test_a_storm_of_xids_does_not_hold_the_thread(clock: Clock) -> None:
    only = gpu()
    fake = FakeNvml(only)
    probe = probe_of(fake, clock)
    probe.read()
    for _ in range(nvml.MOST_EVENTS + 1):
        fake.xid(only, 63)
    assert values(probe.read())["gpu_xid", "GPU-a"] == nvml.MOST_EVENTS
    assert values(probe.read())["gpu_xid", "GPU-a"] == nvml.MOST_EVENTS + 1


def test_a_driver_that_is_unloaded_and_comes_back(clock: Clock) -> None:
    fake = FakeNvml(gpu())
    probe = probe_of(fake, clock)
    assert probe.read()
    fake.loaded = False
    assert probe.read() == []
    assert "Driver Not Loaded" in probe.absent
    fake.loaded = True
    assert probe.read() == [], "not before its time"
    clock.now += RETRY_SECONDS
    assert ("gpu_power_watts", "GPU-a") in values(probe.read())
    assert probe.absent == ""


def test_without_a_driver_it_says_so_once(clock: Clock) -> None:
    fake = FakeNvml()
    fake.init_code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    probe = probe_of(fake, clock)
    with capture_logs() as logs:
        for _ in range(3):
            assert probe.read() == []
            clock.now += RETRY_SECONDS
    assert len(logs) == 1
    assert "NVML Shared Library Not Found" in logs[0]["reason"]


def test_without_the_package_it_says_so_once(clock: Clock) -> None:
    def missing() -> FakeNvml:
        raise ImportError("No module named 'pynvml'")

    probe = Nvml(missing, clock)
    with capture_logs() as logs:
        assert probe.read() == probe.read() == []
    assert [entry["reason"] for entry in logs] == ["nvidia-ml-py is not installed"]


def test_this_very_machine_is_read_or_absent_with_a_reason() -> None:
    probe = Nvml()
    found = probe.read()
    assert bool(found) is (probe.absent == "")
