"""Tell the floating point operations of a step, and which share of the device's peak they are (MFU).

Model FLOPs utilisation as in PaLM (Chowdhery et al. 2022, appendix B): the operations that the model's mathematics
needs for a step, without what is computed again, over what the device could have done in the step's time.
"""

from collections.abc import Mapping
from typing import Any

import torch

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.peaks import peak_named
from sentinel.client.probes.probe import Probe
from sentinel.client.subject import Subject
from sentinel.config import Settings, ThroughputSettings


def throughput(_subject: Subject, watched: list[WatchedOptimizer], settings: Settings) -> "Throughput":
    return Throughput(watched, settings.throughput)


class Throughput(Probe):
    """Sets `flops` and `mfu_ratio` of an attempt when its other numbers are known."""

    def __init__(self, watched: list[WatchedOptimizer], settings: ThroughputSettings) -> None:
        self._watched = watched
        self._settings = settings
        self._peak = settings.peak_flops_per_second or None
        self._asked = self._peak is not None  # where the parameters live is known when the first step has been

    def fields(self, attempt: Attempt, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        del numbers
        settled: Any = attempt  # no tensors any more
        flops = settled.flops
        if flops is None and settled.tokens is not None and self._settings.flops_per_token:
            flops = settled.tokens * self._settings.flops_per_token
        if flops is None and settled.samples is not None and self._settings.flops_per_sample:
            flops = settled.samples * self._settings.flops_per_sample
        if flops is None:
            return {}
        attempt.flops = flops
        if not self._asked:
            self._asked, self._peak = True, peak_of(self._watched)
        if self._peak is not None and attempt.whole and attempt.step_seconds:
            attempt.mfu_ratio = flops / attempt.step_seconds / self._peak
        return {}


def peak_of(watched: list[WatchedOptimizer]) -> float | None:
    """Of the device that holds the first parameter, by its name; None for a CPU and a GPU that is not listed.

    The name comes from what torch read when it opened the device: no driver call, no sync.
    """
    device = next((one.device for each in watched for one in each.parameters), None)
    if device is None or device.type != "cuda":
        return None
    return peak_named(torch.cuda.get_device_properties(device).name)
