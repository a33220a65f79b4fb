"""What do the NVIDIA GPUs of this machine say of themselves, by UUID?

Without a driver, its library or nvidia-ml-py nothing is said, after one line in the log. A GPU that falls off the bus
takes its own values along and is counted as lost; the others go on.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import structlog

from sentinel.daemon.probes.nvml_values import OFTEN, SELDOM, NvmlLike, Question
from sentinel.daemon.probes.probe import Reading

EVERY_SECONDS = 1.0
SELDOM_SECONDS = 10.0  # for what changes rarely, and for looking which GPUs are there
RETRY_SECONDS = 60.0  # for a driver that is not loaded yet, or was unloaded
MOST_EVENTS = 64  # taken in one reading; the rest waits for the next

# Codes of nvml.h; a test compares them with the installed nvidia-ml-py.
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED = 1, 3, 4, 9
FUNCTION_NOT_FOUND, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH = 13, 15, 18
_NEVER = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND}  # such a question need not be asked again
_WITHOUT_DRIVER = {UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH}
XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError

_log = structlog.get_logger()


def installed() -> NvmlLike:
    """The module of nvidia-ml-py. Raises ImportError without it; needs no GPU and no driver."""
    import pynvml

    return cast("NvmlLike", pynvml)


class Device:
    """One GPU: how to ask it, and what it does not know."""

    def __init__(self, gpu: str, handle: Any) -> None:
        self.gpu = gpu
        self.handle = handle
        self.refused: dict[str, str] = {}  # question -> why it is not asked again
        self.seldom: list[Reading] = []


class Xid(NamedTuple):
    """Of one GPU: critical errors that its driver reported since we look."""

    reported: int = 0
    latest: int | None = None  # see NVIDIA's table "Xid Errors"


class Nvml:
    """The probe. Everything but `read` happens inside it, lazily."""

    name = "nvml"
    every_seconds = EVERY_SECONDS

    def __init__(self, load: Callable[[], NvmlLike] = installed, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._clock = clock
        self._nvml: NvmlLike | None = None
        self._devices: dict[str, Device] = {}
        self._xids: dict[str, Xid] = {}
        self._lost: set[str] = set()
        self._mute = 0  # GPUs that are counted but cannot be asked for their name
        self._nameless: list[int] = []  # Xids of a GPU that no longer tells its name
        self._events: Any = None
        self._next_try = self._next_seldom = float("-inf")
        self.absent = ""  # why there is nothing, "" while there is something

    def read(self) -> list[Reading]:
        now = self._clock()
        if self._nvml is None and now >= self._next_try:
            self._next_try = now + RETRY_SECONDS
            self._open()
        if self._nvml is None:
            return []
        seldom = now >= self._next_seldom
        if seldom:
            self._next_seldom = now + SELDOM_SECONDS
        try:
            if seldom:
                self._look_for_devices(self._nvml)
            self._take_events(self._nvml)
            found = [each for device in list(self._devices.values()) for each in self._ask(device, seldom)]
        except self._nvml.NVMLError as error:
            self._give_up(error)
            return []
        return [*found, *self._of_all()]

    def answers(self) -> dict[str, str]:
        """Of each question "" where the first GPU answers it, else why not. After a `read`; empty without a GPU."""
        device = next(iter(self._devices.values()), None)
        return {} if device is None else {name: device.refused.get(name, "") for name in OFTEN | SELDOM}

    # ------------------------------------------------------------------ opening and closing

    def _open(self) -> None:
        try:
            nvml = self._load()
        except ImportError:
            self._without("nvidia-ml-py is not installed")
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._without(f"NVML does not start: {error}")
            return
        self._nvml, self.absent, self._next_seldom = nvml, "", float("-inf")

    def _without(self, reason: str) -> None:
        if reason != self.absent:
            _log.info("no values of NVIDIA GPUs", reason=reason)
        self.absent = reason

    def _give_up(self, error: Exception) -> None:
        """The driver is gone, or all of NVML fails: close it, and try again later."""
        self._without(f"NVML failed: {error}")
        nvml, self._nvml = self._nvml, None
        self._devices, self._events = {}, None
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return  # nothing is left to be closed

    # ------------------------------------------------------------------ which GPUs are there

    def _look_for_devices(self, nvml: NvmlLike) -> None:
        found: dict[str, Device] = {}
        self._mute = 0
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = nvml.nvmlDeviceGetUUID(handle)
            except nvml.NVMLError as error:
                self._check(error)
                self._mute += 1
                continue
            known = self._devices.get(gpu)
            if known is None:
                known = Device(gpu, handle)
            known.handle = handle
            found[gpu] = known
        for gpu in self._devices.keys() - found.keys():
            self._lose(gpu)
        come = found.keys() - self._devices.keys()
        self._devices = found
        self._lost -= found.keys()
        if come:
            self._listen(nvml)

    def _lose(self, gpu: str) -> None:
        self._devices = {other: device for other, device in self._devices.items() if other != gpu}
        if gpu not in self._lost:
            self._lost.add(gpu)
            _log.error("a GPU is lost: it does not answer on the bus", gpu=gpu)
        nameless, self._nameless = self._nameless, []
        for xid in nameless:
            self._note(gpu, xid)

    def _of_all(self) -> Iterator[Reading]:
        yield Reading("gpus", ("present",), len(self._devices))
        yield Reading("gpus", ("lost",), max(len(self._lost), self._mute))
        for gpu in self._devices.keys() | self._lost:  # the Xid of the loss itself must not vanish with the GPU
            xid = self._xids.get(gpu)
            if xid is not None:
                yield Reading("gpu_xid", (gpu,), xid.reported)
            if xid is not None and xid.latest is not None:
                yield Reading("gpu_last_xid", (gpu,), xid.latest)

    # ------------------------------------------------------------------ what one GPU says

    def _ask(self, device: Device, seldom: bool) -> list[Reading]:
        found = self._answers(device, OFTEN)
        if seldom:
            device.seldom = self._answers(device, SELDOM)
        return found + device.seldom if device.gpu in self._devices else []

    def _answers(self, device: Device, questions: dict[str, Question]) -> list[Reading]:
        nvml = self._nvml
        assert nvml is not None
        found: list[Reading] = []
        for name, ask in questions.items():
            if name in device.refused or device.gpu not in self._devices:
                continue
            try:
                found.extend(ask(nvml, device.handle, device.gpu))
            except nvml.NVMLError as error:
                self._check(error)
                if _code(error) == GPU_IS_LOST:
                    self._lose(device.gpu)
                elif _code(error) in _NEVER:
                    device.refused[name] = str(error)
        return found

    @staticmethod
    def _check(error: Exception) -> None:
        """What means the end of the whole library is not one device's matter."""
        if _code(error) in _WITHOUT_DRIVER:
            raise error

    # ------------------------------------------------------------------ events

    def _listen(self, nvml: NvmlLike) -> None:
        """Anew for all: a handle of before may be of a GPU that was lost since."""
        try:
            if self._events is not None:
                nvml.nvmlEventSetFree(self._events)
                self._events = None
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._check(error)
            return
        self._events = events
        for device in self._devices.values():
            try:
                if nvml.nvmlDeviceGetSupportedEventTypes(device.handle) & XID_EVENT:
                    nvml.nvmlDeviceRegisterEvents(device.handle, XID_EVENT, events)
                    self._xids.setdefault(device.gpu, Xid())  # none so far; where nobody listens nothing is known
            except nvml.NVMLError as error:
                self._check(error)

    def _take_events(self, nvml: NvmlLike) -> None:
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                self._check(error)
                return  # nearly always because nothing has happened
            try:
                self._note(nvml.nvmlDeviceGetUUID(event.device), int(event.eventData))
            except nvml.NVMLError as error:
                self._check(error)
                self._nameless.append(int(event.eventData))

    def _note(self, gpu: str, xid: int) -> None:
        self._xids[gpu] = Xid(self._xids.get(gpu, Xid()).reported + 1, xid)
        _log.warning("a GPU's driver reports a critical error", gpu=gpu, xid=xid)


def _code(error: Exception) -> int:
    return int(getattr(error, "value", 0))
