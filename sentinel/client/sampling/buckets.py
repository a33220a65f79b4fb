"""Count magnitudes by bucket: exactly, asking a device for nothing, and on a CPU without a search per value."""

import torch
from torch import Tensor

CHUNK = 2**17  # values compared with all edges at once on a device: 4 MB of booleans
SHIFT = 19  # leaves a float32 its exponent and four bits of its mantissa: cells at most 6 % wide
CELLS = 2 ** (31 - SHIFT)  # of numbers without a sign
NOT_FINITE = 0x7F800000 >> SHIFT  # the first cell that holds infinity or NaN


@torch.no_grad()
def bucket_counts(values: Tensor, edges: Tensor) -> Tensor:
    """How many of the non-negative `values` lie in each bucket (lower edge < value <= upper edge), how many are
    beyond the last edge, and how many are 0. Shape (edges + 2,), int64, on their device; NaN is nowhere.

    `edges` grow by more than 7 % each, and are of the values' type.
    """
    if values.device.type != "cpu":
        counts = _compared(values, edges)
    elif values.dtype == torch.float32:
        counts = _by_cells(values, edges)
    else:
        counts = torch.bincount(torch.bucketize(values, edges), minlength=len(edges) + 1)
        counts[-1] -= torch.isnan(values).sum()  # which bucketize puts behind everything
    zeros = values.numel() - torch.count_nonzero(values)
    counts[0] -= zeros
    return torch.cat([counts, zeros[None]])


def _compared(values: Tensor, edges: Tensor) -> Tensor:
    # bincount would ask the device for the largest value, and scatter_add is not deterministic.
    up_to = torch.stack([(part <= edges[:, None]).sum(1) for part in values.split(CHUNK)]).sum(0)
    return torch.diff(up_to, prepend=up_to.new_zeros(1), append=(~torch.isnan(values)).sum()[None])


def _by_cells(values: Tensor, edges: Tensor) -> Tensor:
    """The upper bits of a float32 number its cell; a cell holds at most one edge, which decides within it.

    A fourth of the time of a binary search per value (0.9 M values: 9 instead of 41 ms).
    """
    lower = (torch.arange(CELLS, dtype=torch.int32, device="cpu") << SHIFT).view(torch.float32)
    place = torch.bucketize(lower, edges)  # bucket of what lies up to the next edge
    edge = torch.cat([edges, edges.new_full((1,), torch.inf)])[place]
    cells = values.view(torch.int32) >> SHIFT
    in_cell = torch.bincount(cells, minlength=CELLS)
    above = torch.bincount(cells[values > edge.index_select(0, cells)], minlength=CELLS)
    counts = torch.zeros(len(edges) + 2, dtype=torch.int64, device="cpu")
    counts.index_add_(0, place, in_cell - above)
    counts.index_add_(0, place + 1, above)
    if any(in_cell[NOT_FINITE:].tolist()):
        counts[-2] -= torch.isnan(values).sum()  # their cells lie behind everything
    return counts[:-1]
