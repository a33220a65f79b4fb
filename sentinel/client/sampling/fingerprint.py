"""A number per layer group that is the same on every rank as long as its parameters are, to the last bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.gradients import is_sharded
from sentinel.client.sampling.groups import Groups
from sentinel.client.sampling.replicas import Replicas
from sentinel.client.sampling.signal import Signal, Take

MODULUS = 2**63
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a value in bytes


class Fingerprint(Signal):
    """The sum over the bits of the parameters as integers, modulo 2**63: exact, and in any order.

    Taken after the update, of the trainable parameters that DDP keeps alike on all ranks; a group that holds others
    too is left out, and so are buffers (each rank's batch norm sees its own data). Which ranks differ is judged by
    whoever sees the records of all.
    """

    name = "fingerprint"

    def __init__(self, groups: Groups, replicas: Replicas, watched: list[WatchedOptimizer]) -> None:
        self._groups = groups
        self._replicas = replicas
        self._watched = watched

    def applies(self) -> bool:
        return bool(self._replicas.ids())

    @torch.no_grad()
    def after_update(self, take: Take, watched: WatchedOptimizer, attempt: Attempt) -> None:
        del attempt
        alike = self._replicas.ids()
        mine = [one for one in watched.parameters if id(one) in alike and not is_sharded(one)]
        if not mine:
            return
        sums = torch.stack([bits(one) for one in mine])
        # A float64 carries 53 bits on the way to the host.
        take.values[f"high.{watched.name}"] = (sums >> 32) & 0x7FFFFFFF
        take.values[f"low.{watched.name}"] = sums & 0xFFFFFFFF
        take.notes[watched.name] = self._groups.of(mine)
        others = [one for each in self._watched for one in each.parameters if one.requires_grad]
        mixed = self._groups.of([one for one in others if id(one) not in alike])
        take.notes[watched.name] = [None if group in mixed else group for group in take.notes[watched.name]]

    def fields(self, take: Take, numbers: Mapping[str, Any], attempt: Attempt) -> Mapping[str, Any]:
        del attempt
        found: dict[str, int] = {}
        for name, groups in take.notes.items():
            for group, high, low in zip(groups, numbers[f"high.{name}"], numbers[f"low.{name}"], strict=True):
                if group is not None:
                    found[group] = (found.get(group, 0) + (int(high) << 32) + int(low)) % MODULUS
        return {"fingerprint": found} if found else {}

    def close(self) -> None:
        self._groups.close()


def bits(parameter: Tensor) -> Tensor:
    """The sum of its values' bits, shape (), int64 (modulo 2**64), on its device."""
    values = parameter.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(WORDS[values.element_size()]).sum(dtype=torch.int64)
