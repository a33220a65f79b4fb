"""Take a bounded number of a model's values, the same ones on every rank and in every kind of loop."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class Plan(NamedTuple):
    """Which values of each tensor are taken: all of a small one, of a large one every nth."""

    whole: int  # tensors of at most so many values are taken whole
    distance: int  # a prime, so that it seldom divides the width of a matrix and then runs down a few of its columns

    def of(self, tensor: Tensor) -> int:
        return 1 if tensor.numel() <= self.whole else self.distance


def plan(sizes: Sequence[int], most: int) -> Plan:
    """For tensors of so many values each: at most `most` are taken in all, and one more of each large tensor.

    Biases and norms are few and may move most, so up to a quarter of `most` goes to tensors that are taken whole.

    >>> plan([500, 500], 1000)
    Plan(whole=500, distance=1)
    >>> plan([10, 10, 20_000, 20_000], 1000)
    Plan(whole=62, distance=59)
    """
    if sum(sizes) <= most:
        return Plan(max(sizes, default=0), 1)
    whole = most // (4 * len(sizes))
    least = -(-sum(size for size in sizes if size > whole) // (most - most // 4))
    return Plan(whole, next(number for number in range(least, 2 * least + 2) if _is_prime_or_one(number)))


def elements(tensors: Iterable[Tensor]) -> int:
    """How many values they hold on this rank."""
    return sum(tensor.numel() for tensor in tensors)


def taken(tensor: Tensor, distance: int) -> Tensor:
    """Every `distance`th value of a dense tensor as it lies in memory, shape (m,), a view where that is possible."""
    if not tensor.is_contiguous():
        # Convolution weights may lie channels last: turned so that they are contiguous, nothing is copied.
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return tensor.reshape(-1)[::distance]


def _is_prime_or_one(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
