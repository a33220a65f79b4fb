"""Copy the whole training state out of its objects, and put it back in place.

Nothing here allocates on a device, syncs it, or hands torch a tensor that it could later write to:
`Optimizer.load_state_dict` keeps the tensors it is given (pytorch/pytorch#196083), so it is never called.
"""

import copy
import random
import sys
from collections import defaultdict
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sentinel.client.subject import Subject


class Slot(NamedTuple):
    """Stands for a tensor inside a copied structure; the bytes are in `State.tensors` under this name."""

    name: str
    device: torch.device  # where the tensor lived, should it have to be made anew


class Wrapped(NamedTuple):
    """Stands for a tensor that is made of others, as those of few bits are (torchao)."""

    kind: Any
    parts: dict[str, Any]  # Slots, or Wrapped again
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


class State(NamedTuple):
    """One copy. Tensors are on the CPU (pinned for a CUDA model), everything else is plain Python."""

    tensors: dict[str, Tensor]
    optimizers: list[tuple[list[dict[str, Any]], dict[Any, Any]]]  # param groups; state by place or name, see `_keys`
    extras: dict[str, Any]
    scaler: bool  # the GradScaler had a scale (they are made at its first use)
    rng: dict[str, Any]
    subject_names: frozenset[str]  # those of model, EMA and optimized parameters among `tensors`

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Pool:
    """Buffers of dropped snapshots, used again for the next: a steady ring allocates nothing."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)

    def take(self, live: Tensor) -> Tensor:
        pinned = live.device.type == "cuda"
        spare = self._free[tuple(live.shape), live.dtype, pinned]
        return spare.pop() if spare else torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=pinned)

    def give(self, state: State) -> None:
        for tensor in state.tensors.values():
            self._free[tuple(tensor.shape), tensor.dtype, tensor.is_pinned()].append(tensor)

    def clear(self) -> None:
        self._free.clear()


def live_tensors(subject: Subject) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state by name, as they are now: this rank's part of sharded ones."""
    found = _subject_tensors(subject)
    for number, optimizer in enumerate(subject.optimizers):
        for name, key in _keys(optimizer):
            _flatten(optimizer.state.get(key, {}), f"optimizer.{number}.{name}", found)
    return found


@torch.no_grad()
def capture(subject: Subject, scaler: Any, pool: Pool) -> State:
    """Copy everything. On CUDA the copies are queued on the current stream and the host does not wait."""
    live = _subject_tensors(subject)
    subject_names = frozenset(live)
    optimizers = []
    for number, optimizer in enumerate(subject.optimizers):
        groups = [
            _flatten(_hyperparameters(group), f"groups.{number}.{at}", live)
            for at, group in enumerate(optimizer.param_groups)
        ]
        states = {
            name: _flatten(optimizer.state[key], f"optimizer.{number}.{name}", live)
            for name, key in _keys(optimizer)
            if key in optimizer.state
        }
        optimizers.append((groups, states))
    extras = {
        extra.name: _flatten(target.state_dict(), extra.name, live)
        for extra in subject.extras
        if (target := extra.handle()) is not None and not isinstance(target, nn.Module)
    }
    has_scale = scaler is not None and scaler._scale is not None
    if has_scale:
        live |= {"scaler.scale": scaler._scale, "scaler.growth": scaler._growth_tracker}
    tensors = {}
    for name, tensor in live.items():
        tensors[name] = pool.take(tensor)
        tensors[name].copy_(tensor.detach(), non_blocking=True)
    return State(tensors, optimizers, extras, has_scale, rng_state(), subject_names)


def foreign(state: State, subject: Subject) -> str:
    """The name of the first tensor that the state does not fit: gone, or of another shape or type; "" if none.

    Asked before a restore, which would otherwise stop half way.
    """
    live = _subject_tensors(subject)
    for name, tensor in live.items():
        copied = state.tensors.get(name)
        if copied is not None and (copied.shape != tensor.shape or copied.dtype != tensor.dtype):
            return name
    return next((name for name in state.subject_names if name not in live), "")


@torch.no_grad()
def restore(state: State, subject: Subject, scaler: Any) -> None:
    """Write everything back into the same objects. The state itself is not aliased and can be restored again.

    What the user's own `load_state_dict` raises comes out of here, before any tensor was written.
    """
    for extra in subject.extras:
        target = extra.handle()
        if target is not None and extra.name in state.extras:
            target.load_state_dict(_rebuilt(state.extras[extra.name], None, state.tensors))
    for name, tensor in _subject_tensors(subject).items():
        if name in state.tensors:
            _write(tensor, state.tensors[name])
    for optimizer, saved in zip(subject.optimizers, state.optimizers, strict=True):
        _restore_optimizer(optimizer, *saved, state.tensors)
    if scaler is not None:
        _restore_scaler(scaler, state)
    set_rng_state(state.rng)


def rng_state() -> dict[str, Any]:
    """Python's, NumPy's if it is in use, torch's CPU generator and that of every CUDA device in use."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        found["numpy"] = numpy.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_rng_state(saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if "numpy" in saved and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(saved["numpy"])
    if "cuda" in saved:
        torch.cuda.set_rng_state_all(saved["cuda"])


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    states: dict[Any, Any],
    tensors: dict[str, Tensor],
) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for key, value in saved.items():
            group[key] = _rebuilt(value, group.get(key), tensors)
    own: Any = optimizer.state
    for name, key in {**dict(_keys(optimizer)), **{name: name for name in states if isinstance(name, str)}}.items():
        if name in states:
            own[key] = _rebuilt(states[name], own.get(key), tensors)
        else:  # created after the snapshot
            own.pop(key, None)


def _restore_scaler(scaler: Any, state: State) -> None:
    if scaler._scale is not None:
        if state.scaler:
            scaler._scale.copy_(state.tensors["scaler.scale"])
            scaler._growth_tracker.copy_(state.tensors["scaler.growth"])
        else:  # the snapshot is older than the scaler's first use
            scaler._scale.fill_(scaler._init_scale)
            scaler._growth_tracker.fill_(scaler._init_growth_tracker)
    # The `update` that follows must not punish the overflow that was rolled back.
    for per_optimizer in scaler._per_optimizer_states.values():
        for found in per_optimizer["found_inf_per_device"].values():
            found.zero_()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _keys(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any]]:
    """(name, key) of what may be in `optimizer.state`: a parameter goes by its place, all else by its own name."""
    keys: list[Any] = list(optimizer.state)
    return [*enumerate(_parameters(optimizer)), *((key, key) for key in keys if isinstance(key, str))]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _subject_tensors(subject: Subject) -> dict[str, Tensor]:
    return {name: part for whole, tensor in subject.tensors() for name, part in _parts(whole, _mine(tensor))}


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """What of a tensor can be copied in place: the dense parts of a sparse one, the one row of an expanded one."""
    if _is_wrapper(tensor):
        names, _ = cast("Any", tensor).__tensor_flatten__()
        return [part for inner in names for part in _parts(f"{name}.{inner}", getattr(tensor, inner))]
    if tensor.layout is torch.sparse_coo:
        return [(f"{name}.indices", tensor._indices()), (f"{name}.values", tensor._values())]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        outer, inner = tensor.crow_indices(), tensor.col_indices()
    elif tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        outer, inner = tensor.ccol_indices(), tensor.row_indices()
    else:
        return [(name, _unexpanded(tensor))]
    return [(f"{name}.outer", outer), (f"{name}.inner", inner), (f"{name}.values", tensor.values())]


def _unexpanded(tensor: Tensor) -> Tensor:
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _write(live: Tensor, copied: Tensor) -> None:
    # A buffer that was made under inference_mode may be written only there.
    with torch.inference_mode(live.is_inference()):
        live.copy_(copied)


def _mine(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor if _is_wrapper(tensor) else tensor.detach()


def _is_wrapper(tensor: Any) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The structure with a Slot for each tensor, which goes into `tensors`; the rest is copied."""
    if isinstance(value, Tensor):
        return _flatten_tensor(_mine(value), path, tensors)
    if isinstance(value, dict):
        return {key: _flatten(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_flatten(item, f"{path}.{place}", tensors) for place, item in enumerate(value))
    return value if _is_plain(value) else copy.deepcopy(value)


def _flatten_tensor(mine: Any, path: str, tensors: dict[str, Tensor]) -> Slot | Wrapped:
    if not _is_wrapper(mine):
        tensors[path] = mine
        return Slot(path, mine.device)
    names, context = mine.__tensor_flatten__()
    parts = {name: _flatten(getattr(mine, name), f"{path}.{name}", tensors) for name in names}
    return Wrapped(type(mine), parts, context, mine.shape, mine.stride())


def _rebuilt(saved: Any, current: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `_flatten`; tensors are written into `current`'s where they fit, so that no alias breaks."""
    if isinstance(saved, Slot):
        return _rebuilt_tensor(tensors[saved.name], current, saved.device)
    if isinstance(saved, Wrapped):
        return _rebuilt_wrapper(saved, current, tensors)
    if isinstance(saved, dict):
        inner = current if isinstance(current, dict) else {}
        return {key: _rebuilt(item, inner.get(key), tensors) for key, item in saved.items()}
    if type(saved) in {list, tuple}:
        # Lists (LBFGS history) grow and shift: their tensors are not matched by place.
        return type(saved)(_rebuilt(item, None, tensors) for item in saved)
    return saved if _is_plain(saved) else copy.deepcopy(saved)


def _rebuilt_tensor(copied: Tensor, current: Any, device: torch.device) -> Tensor:
    if not isinstance(current, Tensor):
        return copied.to(device, copy=True)
    mine = _mine(current)
    if mine.shape != copied.shape or mine.dtype != copied.dtype:
        return copied.to(mine.device, copy=True)
    _write(mine, copied)
    return current


def _rebuilt_wrapper(saved: Wrapped, current: Any, tensors: dict[str, Tensor]) -> Any:
    mine = _mine(current) if isinstance(current, Tensor) else None
    old = {name: getattr(mine, name, None) for name in saved.parts} if type(mine) is saved.kind else {}
    parts = {name: _rebuilt(part, old.get(name), tensors) for name, part in saved.parts.items()}
    if old and all(parts[name] is old[name] for name in parts):
        return current
    return saved.kind.__tensor_unflatten__(parts, saved.context, saved.shape, saved.stride)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str, bytes)) or callable(value)
