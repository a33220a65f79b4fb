"""May a tensor's number be read here and now? Only where that costs nothing: on the host. Elsewhere it would sync."""

from torch import Tensor


def is_free(tensor: Tensor) -> bool:
    """Everything in the loop that turns a tensor into a number asks here first; what is not free is read later."""
    return tensor.is_cpu
