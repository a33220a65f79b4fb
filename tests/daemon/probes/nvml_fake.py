"""An NVML without a GPU: pynvml's functions, by their names and with pynvml's own errors and structures.

`test_nvml.py` compares every function with the installed module's. What a GPU says is set as attributes; the numbers
of `H200` are in the ranges of NVIDIA's data sheet (141 GB, 700 W), not a recording.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """One GPU. `failing`: by function, the code with which it fails."""

    uuid: str
    utilization_percent: int = 97
    memory_busy_percent: int = 41
    used_bytes: int = 100 * 10**9
    total_bytes: int = 141 * 10**9
    power_milliwatts: int = 654_321
    limit_milliwatts: int = 700_000
    temperature: int = 71
    throttle_bits: int = pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    ecc: tuple[int, int] = (3, 0)  # corrected, uncorrected
    pcie_replays: int = 2
    fields: dict[int, int] = field(default_factory=dict)
    failing: dict[str, int] = field(default_factory=dict)
    lost: bool = False


FIELDS = {
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: 2048,  # KiB
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: 1024,
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: 5,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: 1,
    pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: 7_000_000,
    pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: 9_000_000,
}
H200 = FakeGpu("GPU-a", fields=FIELDS)


def gpu(uuid: str = "GPU-a", **different: Any) -> FakeGpu:
    return replace(H200, uuid=uuid, fields=dict(FIELDS), failing={}, **different)


class FakeNvml:
    """Handles are the GPUs themselves. `calls` tells what was asked; `init_code` is how `nvmlInit` fails."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.init_code = 0
        self.loaded = True  # False: the driver was unloaded
        self.started = 0
        self.calls: list[str] = []
        self.waited_ms: list[int] = []
        self._events: deque[tuple[FakeGpu, int]] = deque()
        self._listening: list[FakeGpu] = []

    def xid(self, gpu: FakeGpu, number: int) -> None:
        """The driver reports it to whoever has registered."""
        if any(gpu is listening for listening in self._listening):
            self._events.append((gpu, number))

    def nvmlInit(self) -> None:
        if self.init_code:
            raise pynvml.NVMLError(self.init_code)
        self.started += 1

    def nvmlShutdown(self) -> None:
        self._global("nvmlShutdown")
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._global("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._of(self.gpus[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return self._of(handle, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        found = self._of(handle, "nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=found.utilization_percent, memory=found.memory_busy_percent)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, version: Any = None) -> Any:
        del version
        found = self._of(handle, "nvmlDeviceGetMemoryInfo")
        return pynvml.c_nvmlMemory_t(found.total_bytes, found.total_bytes - found.used_bytes, found.used_bytes)

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return self._of(handle, "nvmlDeviceGetPowerUsage").power_milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeGpu) -> int:
        return self._of(handle, "nvmlDeviceGetEnforcedPowerLimit").limit_milliwatts

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._of(handle, "nvmlDeviceGetTemperature").temperature

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: FakeGpu) -> int:
        return self._of(handle, "nvmlDeviceGetCurrentClocksThrottleReasons").throttle_bits

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeGpu, errorType: int, counterType: int) -> int:
        assert counterType == pynvml.NVML_VOLATILE_ECC
        return self._of(handle, "nvmlDeviceGetTotalEccErrors").ecc[errorType]

    def nvmlDeviceGetFieldValues(self, handle: FakeGpu, fieldIds: Any) -> Any:
        known = self._of(handle, "nvmlDeviceGetFieldValues").fields
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, (number, scope) in zip(values, fieldIds, strict=True):
            value.fieldId, value.scopeId = number, scope
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.nvmlReturn = 0 if number in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.value.ullVal = known.get(number, 0)
        return values

    def nvmlDeviceGetPcieReplayCounter(self, handle: FakeGpu) -> int:
        return self._of(handle, "nvmlDeviceGetPcieReplayCounter").pcie_replays

    def nvmlDeviceGetSupportedEventTypes(self, handle: FakeGpu) -> int:
        self._of(handle, "nvmlDeviceGetSupportedEventTypes")
        return int(pynvml.nvmlEventTypeXidCriticalError)

    def nvmlEventSetCreate(self) -> Any:
        self._global("nvmlEventSetCreate")
        self._listening = []
        return self

    def nvmlDeviceRegisterEvents(self, handle: FakeGpu, eventTypes: int, eventSet: Any) -> None:
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError
        assert eventSet is self
        self._listening.append(self._of(handle, "nvmlDeviceRegisterEvents"))

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        assert eventSet is self
        self._global("nvmlEventSetWait_v2")
        self.waited_ms.append(timeoutms)
        if not self._events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        found, number = self._events.popleft()
        return SimpleNamespace(device=found, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=number)

    def nvmlEventSetFree(self, eventSet: Any) -> None:
        assert eventSet is self
        self._listening = []

    def _global(self, function: str) -> None:
        self.calls.append(function)
        if not self.loaded:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def _of(self, handle: FakeGpu, function: str) -> FakeGpu:
        self._global(function)
        if handle.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        code = handle.failing.get(function, 0)
        if code:
            raise pynvml.NVMLError(code)
        return handle
