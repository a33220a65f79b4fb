"""Tell whether FSDP2 keeps a backward's gradients to itself for now, so that no hook of a parameter runs in it."""

from typing import Any

from torch import nn


def gathers_apart(model: nn.Module) -> bool:
    """True while the loop accumulates without synchronising (`set_requires_gradient_sync(False)`).

    Asked only after a backward that no parameter has told of; it walks the modules.
    """
    return any(not group.reduce_grads for module in model.modules() for group in _groups(module))


def _groups(module: nn.Module) -> list[Any]:
    find = getattr(module, "_get_fsdp_state", None)
    if find is None:
        return []
    state = find()
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13; before, one or none
    return list(several) if several is not None else [one for one in (state._fsdp_param_group,) if one is not None]
