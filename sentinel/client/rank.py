"""Find out which rank of the world this process is, without a collective and without importing torch."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple


class Rank(NamedTuple):
    """One process of the job. A process that is alone is rank 0 of 1."""

    rank: int
    local_rank: int  # among the processes of this node
    world_size: int
    local_world_size: int  # processes on this node


ALONE = Rank(0, 0, 1, 1)


def current(environ: Mapping[str, str]) -> Rank:
    """This process as torch.distributed knows it once it is initialised, else as the launcher's variables say.

    May change between two calls, when the loop initialises its process group after `attach`.
    """
    announced = _announced(environ)
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return announced
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if world_size == announced.world_size:
        return announced._replace(rank=rank)
    # Started without a launcher: nothing tells the nodes apart, so all ranks are taken to be on this one.
    local_rank = _number(environ, "LOCAL_RANK", rank)
    return Rank(rank, local_rank, world_size, max(_number(environ, "LOCAL_WORLD_SIZE", world_size), local_rank + 1))


def _announced(environ: Mapping[str, str]) -> Rank:
    world_size = _number(environ, "WORLD_SIZE", 1)
    rank = _number(environ, "RANK", 0)
    if world_size < 1 or not 0 <= rank < world_size:
        return ALONE
    local_rank = _number(environ, "LOCAL_RANK", rank)
    return Rank(rank, local_rank, world_size, max(_number(environ, "LOCAL_WORLD_SIZE", world_size), local_rank + 1))


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else otherwise
