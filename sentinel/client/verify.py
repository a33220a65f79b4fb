"""Is a state finite, and is it still the one that was copied? One pass each, on the device where the tensors are."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

SMALL_FLOATS = (torch.float16, torch.bfloat16)


@torch.no_grad()
def first_nonfinite(tensors: Mapping[str, Tensor], exempt: Iterable[str] = ()) -> str:
    """The name of the first tensor that holds a NaN or infinity, "" if all are finite.

    `exempt` names buffers that are infinite by design (attention masks). A sum is finite whenever its parts are and
    it does not overflow; only a sum that is not finite is looked at element by element.
    """
    skip = set(exempt)
    names = [name for name, t in tensors.items() if _has_infinity(t) and t.numel() and name not in skip]
    sums = [_sum(tensors[name]) for name in names]
    if not sums:
        return ""
    device = sums[0].device
    finite = torch.isfinite(torch.stack([one.to(device, torch.float64) for one in sums])).tolist()
    for name, ok in zip(names, finite, strict=True):
        if not ok and not bool(torch.isfinite(tensors[name]).all()):
            return name
    return ""


@torch.no_grad()
def digest(tensors: Mapping[str, Tensor]) -> str:
    """A fingerprint of all bits: names, shapes and a wrapping sum of the bytes as 64-bit integers.

    Integer addition is associative, so the value does not depend on threads or devices. It finds a flipped bit or a
    wrong tensor; it is no defence against a forger (the disk tier has SHA-256 for that).
    """
    names = sorted(name for name, tensor in tensors.items() if tensor.numel())
    sums = [_bits(tensors[name]) for name in names]
    if not sums:
        return ""
    device = sums[0].device
    values = torch.stack([one.to(device) for one in sums]).tolist()
    text = "\n".join(
        f"{name} {tuple(tensors[name].shape)} {value}" for name, value in zip(names, values, strict=True)
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _has_infinity(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _sum(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj()).sum()
    if tensor.element_size() == 1:  # float8 has no sum
        return tensor.to(torch.float32).sum()
    return tensor.sum(dtype=torch.float32) if tensor.dtype in SMALL_FLOATS else tensor.sum()


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    if not whole:
        return flat.sum()
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    total = aligned.view(torch.int64).sum()
    return total + flat[whole:].sum() if whole < flat.numel() else total
