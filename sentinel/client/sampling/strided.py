"""Take a bounded number of a model's values, the same ones on every rank and in every kind of loop."""

from collections.abc import Iterable

from torch import Tensor


def stride(elements: int, most: int) -> int:
    """The distance at which at most about `most` of so many values are taken; 1: all of them.

    A prime, so that it seldom divides the width of a matrix and then runs down a few of its columns. Every tensor
    gives at least one value, so there may be as many more as there are tensors.

    >>> stride(1000, 1000), stride(1001, 1000), stride(10_000_000, 1_000_000)
    (1, 2, 11)
    """
    least = -(-elements // most)
    return next(number for number in range(max(1, least), 2 * max(1, least) + 2) if _is_prime_or_one(number))


def taken(tensor: Tensor, distance: int) -> Tensor:
    """Every `distance`th value of a dense tensor as it lies in memory, shape (m,), a view where that is possible."""
    if not tensor.is_contiguous():
        # Convolution weights may lie channels last: turned so that they are contiguous, nothing is copied.
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return tensor.reshape(-1)[::distance]


def elements(tensors: Iterable[Tensor]) -> int:
    """How many values they hold on this rank."""
    return sum(tensor.numel() for tensor in tensors)


def _is_prime_or_one(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
