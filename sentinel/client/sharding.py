"""Tell of FSDP what parameters and hooks do not tell: are gradients kept back, and is a plain tensor a shard?"""

import sys
from typing import Any

from torch import nn


def gathers_apart(model: nn.Module) -> bool:
    """True while an FSDP2 loop accumulates without synchronising (`set_requires_gradient_sync(False)`): then no hook
    of a parameter runs.

    Asked only after a backward that no parameter has told of; it walks the modules.
    """
    return any(not group.reduce_grads for module in model.modules() for group in _groups(module))


def flat_shards(model: nn.Module) -> int | None:
    """Over how many ranks FSDP1 (FullyShardedDataParallel) splits parameters, 0 where that is not known (hybrid).

    None where a plain parameter is whole. FSDP1's shards are ordinary tensors, so that one rank alone could take its
    part for the whole.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None:
        return None
    for module in model.modules():
        if isinstance(module, kind):
            found: Any = module
            strategy, ranks = found.sharding_strategy.name, found.process_group.size()
            if strategy == "NO_SHARD" or ranks == 1:
                return None
            return 0 if "HYBRID" in strategy else int(ranks)
    return None


def _groups(module: nn.Module) -> list[Any]:
    find = getattr(module, "_get_fsdp_state", None)
    if find is None:
        return []
    state = find()
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13; before, one or none
    return list(several) if several is not None else [one for one in (state._fsdp_param_group,) if one is not None]
