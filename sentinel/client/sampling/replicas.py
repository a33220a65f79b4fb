"""Which parameters every rank of the world holds alike: those that DDP averages over all of them, at every update."""

import weakref

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sentinel.client import collectives
from sentinel.client.subject import Subject

# Of DDP communication hooks that let the ranks drift apart between averages (torch's post_localSGD_hook).
LOCAL_STATES = ("PostLocalSGDState",)


class Replicas:
    """Of one Run. Hears of models that are wrapped later, in any thread; all else happens on the loop's."""

    def __init__(self, subject: Subject) -> None:
        self._models: list[weakref.ref[DistributedDataParallel]] = []
        self._unsynced: list[weakref.ref[DistributedDataParallel]] = []  # their last backward was not averaged
        self._apart: list[weakref.ref[DistributedDataParallel]] = []  # have applied such gradients, so differ
        if dist.is_available():
            for model in collectives.wrappers_of(subject.model):
                self.wrapped(model)
            collectives.listen(self)

    def waited(self, seconds: float) -> None:
        """For `collectives.Listener`; of no interest here."""

    def wrapped(self, model: DistributedDataParallel) -> None:
        self._models.append(weakref.ref(model))

    def close(self) -> None:
        collectives.ignore(self)
        self._models.clear()

    def after_backward(self) -> None:
        """Asked after every backward: which of them was not averaged (`no_sync`)? Their forward left word."""
        if self._models:
            self._unsynced = [one for one in self._models if not getattr(one(), "require_forward_param_sync", True)]

    def before_update(self) -> None:
        """Gradients of this rank alone are applied now: from here on it differs from the others."""
        if self._unsynced:
            self._apart += [one for one in self._unsynced if one not in self._apart]

    def ids(self) -> frozenset[int]:
        """Of all such parameters. Asked at sampled steps only."""
        if not self._models or not dist.is_initialized() or dist.get_world_size() < 2:
            return frozenset()
        models = [one() for one in self._models if one not in self._apart]
        return frozenset(
            id(parameter)
            for model in models
            if model is not None and _over_all(model)
            for parameter in _averaged(model)
        )


def _over_all(model: DistributedDataParallel) -> bool:
    local = any(type(state).__name__ in LOCAL_STATES for _, state in getattr(model, "_comm_hooks", ()))
    return not local and dist.get_world_size(model.process_group) == dist.get_world_size()


def _averaged(model: DistributedDataParallel) -> list[Tensor]:
    parameters: list[Tensor] = getattr(model, "_module_parameters", [])
    return [one for one in parameters if one.requires_grad]
