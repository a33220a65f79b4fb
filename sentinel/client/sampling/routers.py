"""Find the routers of mixture-of-experts layers by what they look like, and read which experts they chose."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sentinel.client.sampling.groups import plain

# How models name the number of experts, the number of choices per token, and the module that chooses.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts")
CHOICES = ("top_k", "num_experts_per_tok", "num_selected_experts", "topk", "k")
GATES = ("gate", "router", "wg")
MOST_EXPERTS = 1024
MOST_ROUTERS = 64
CHUNK = 2**14  # choices compared with all experts at once on a device


class Router(NamedTuple):
    """A module whose output tells the choice. `top_k` of `experts` per token."""

    name: str
    module: nn.Module
    experts: int
    top_k: int


def find(model: nn.Module) -> list[Router]:
    """In the model's order, at most 64. A layer (Mixtral, Qwen-MoE) is recognised by its number of experts or its
    list of them, and by a gate in it; a module with a number of experts but none in it (Switch) is a router itself.
    """
    found: dict[int, Router] = {}
    for path, module in model.named_modules():
        for name, router, experts, top_k in _inside(path, module):
            if 2 <= experts <= MOST_EXPERTS and 1 <= top_k <= experts and id(router) not in found:
                found[id(router)] = Router(plain(f"{name}.").removesuffix("."), router, experts, top_k)
    return list(found.values())[:MOST_ROUTERS]


def chosen(output: Any, experts: int, top_k: int) -> Tensor | None:
    """How often each expert was chosen, shape (experts,), on the output's device, no sync. None: it does not say.

    The choice itself where the output holds it (indices, or a mask of zeros and ones), else the largest logits.
    """
    several = output if isinstance(output, tuple | list) else (output,)
    tensors = [one.detach() for one in several if isinstance(one, Tensor) and one.dim() >= 2 and one.numel()]
    whole = [one for one in tensors if not one.is_floating_point() and not one.is_complex()]
    for one in whole:
        if one.shape[-1] == experts != top_k:
            return one.reshape(-1, experts).sum(0, dtype=torch.int64)
        if one.shape[-1] == top_k:
            return _counted(one.reshape(-1), experts)
    logits = next((one for one in tensors if one.is_floating_point() and one.shape[-1] == experts), None)
    return None if logits is None else _counted(logits.topk(top_k, dim=-1).indices.reshape(-1), experts)


def _inside(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    children = dict(module.named_children())
    listed = children.get("experts")
    held = len(listed) if isinstance(listed, nn.ModuleList) else 0
    experts = _number(module, EXPERTS) or held
    gates = [(name, children[name]) for name in GATES if name in children]
    for name, gate in gates:
        own = _number(gate, EXPERTS)
        width = own or getattr(gate, "out_features", 0)
        # A layer that picks within groups of experts does not take the largest logits.
        if experts and width == experts and (own or _number(module, ("n_group",)) <= 1):
            yield f"{path}.{name}".strip("."), gate, experts, _number(gate, CHOICES) or _number(module, CHOICES) or 1
    if experts and not gates and listed is None and _looks_like_router(path, module):
        yield path, module, experts, _number(module, CHOICES) or 1


def _looks_like_router(path: str, module: nn.Module) -> bool:
    names = (path.rpartition(".")[2].lower(), type(module).__name__.lower())
    return any(word in name for name in names for word in ("router", "gate"))


def _number(module: nn.Module, names: tuple[str, ...]) -> int:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)


@torch.no_grad()
def _counted(choices: Tensor, experts: int) -> Tensor:
    if choices.device.type == "cpu":
        return torch.bincount(choices, minlength=experts)[:experts]
    # bincount would ask the device for the largest choice.
    numbers = torch.arange(experts, device=choices.device)
    return torch.stack([(part[:, None] == numbers).sum(0) for part in choices.split(CHUNK)]).sum(0)
