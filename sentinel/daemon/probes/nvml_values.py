"""What is asked of one GPU. Each question stands alone: a device that cannot answer one answers the others."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from sentinel.daemon.probes.probe import Reading

# Constants of nvml.h. They are part of its binary interface; a test compares them with the installed nvidia-ml-py.
TEMPERATURE_GPU = 0
ECC_KINDS = {"corrected": 0, "uncorrected": 1}
VOLATILE_ECC = 0  # since the driver was loaded
THROTTLE_REASONS = {
    "applications_clocks": 0x002,
    "sw_power_cap": 0x004,
    "hw_slowdown": 0x008,
    "sync_boost": 0x010,
    "sw_thermal": 0x020,
    "hw_thermal": 0x040,
    "power_brake": 0x080,
    "display_clocks": 0x100,
}  # idle is none: nothing is held back then
ALL_LINKS = 0xFFFFFFFF  # as the scope of a field: the sum over all NVLinks
KIB = 1024
VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


class Field(NamedTuple):
    """A number that is had by `nvmlDeviceGetFieldValues`."""

    name: str  # of the reading
    label: str
    unit: int = 1  # what one of it means
    scope: int = 0


FIELDS = {
    138: Field("gpu_nvlink_bytes", "sent", KIB, ALL_LINKS),
    139: Field("gpu_nvlink_bytes", "received", KIB, ALL_LINKS),
    38: Field("gpu_nvlink_errors", "crc_flit"),
    45: Field("gpu_nvlink_errors", "crc_data"),
    52: Field("gpu_nvlink_errors", "replay"),
    59: Field("gpu_nvlink_errors", "recovery"),
    197: Field("gpu_pcie_bytes", "sent"),
    198: Field("gpu_pcie_bytes", "received"),
}


class NvmlLike(Protocol):
    """What we use of the module pynvml, by its own names. A device is an opaque handle."""

    NVMLError: type[Exception]  # with the code of nvml.h as `value`

    def nvmlInit(self) -> None: ...  # noqa: N802 - pynvml's name, as all below
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...  # noqa: N802
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...  # noqa: N802
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int: ...  # noqa: N802, N803
    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: Any) -> Any: ...  # noqa: N802, N803
    def nvmlDeviceGetPcieReplayCounter(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlEventSetCreate(self) -> Any: ...  # noqa: N802
    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None: ...  # noqa: N802, N803
    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any: ...  # noqa: N802, N803
    def nvmlEventSetFree(self, eventSet: Any) -> None: ...  # noqa: N802, N803


Question = Callable[[NvmlLike, Any, str], Iterable[Reading]]  # (nvml, device, gpu)


def utilization(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    rates = nvml.nvmlDeviceGetUtilizationRates(device)  # percent of the time of the last sample period
    yield Reading("gpu_utilization_ratio", (gpu,), rates.gpu / 100)
    yield Reading("gpu_memory_busy_ratio", (gpu,), rates.memory / 100)


def memory(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    found = nvml.nvmlDeviceGetMemoryInfo(device)
    yield Reading("gpu_memory_bytes", (gpu, "used"), found.used)
    yield Reading("gpu_memory_bytes", (gpu, "total"), found.total)


def power(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    yield Reading("gpu_power_watts", (gpu,), nvml.nvmlDeviceGetPowerUsage(device) / 1000)


def power_limit(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    yield Reading("gpu_power_limit_watts", (gpu,), nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000)


def temperature(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    yield Reading("gpu_temperature_celsius", (gpu,), nvml.nvmlDeviceGetTemperature(device, TEMPERATURE_GPU))


def throttling(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    # The older of two names for one call: drivers before 535 do not know "ClocksEventReasons", all know this one.
    bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
    for reason, bit in THROTTLE_REASONS.items():
        yield Reading("gpu_throttled", (gpu, reason), bool(bits & bit))


def ecc(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    for kind, number in ECC_KINDS.items():
        count = nvml.nvmlDeviceGetTotalEccErrors(device, number, VOLATILE_ECC)
        yield Reading("gpu_ecc_errors", (gpu, kind), count)


def links(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    """NVLink and PCIe. Bytes of PCIe by field, because the call for its throughput blocks for 20 ms (nvml.h)."""
    wanted = [(number, field.scope) for number, field in FIELDS.items()]
    for value in nvml.nvmlDeviceGetFieldValues(device, wanted):
        known = FIELDS.get(value.fieldId)
        if known is not None and value.nvmlReturn == 0 and value.valueType < len(VALUE_FIELDS):
            count = getattr(value.value, VALUE_FIELDS[value.valueType])
            yield Reading(known.name, (gpu, known.label), count * known.unit)


def pcie_replays(nvml: NvmlLike, device: Any, gpu: str) -> Iterable[Reading]:
    yield Reading("gpu_pcie_replays", (gpu,), nvml.nvmlDeviceGetPcieReplayCounter(device))


OFTEN: dict[str, Question] = {
    "utilisation": utilization,
    "memory": memory,
    "power": power,
    "power limit": power_limit,
    "temperature": temperature,
    "throttling": throttling,
}
SELDOM: dict[str, Question] = {"ECC": ecc, "NVLink and PCIe": links, "PCIe replays": pcie_replays}
