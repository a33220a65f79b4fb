"""What is too dear to be told of every step: the part of a StepRecord that ranks sample now and then."""

import msgspec


class Sample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What is too dear for every step (`client/sampling`). Ranks sample at the same steps. Absent is None, never 0.

    Under sharding every norm is of this rank's shards: squares add up over the ranks. `group` is a layer group of
    the model, the same on every rank.
    """

    group_norms: dict[str, float] | None = None  # group -> L2 of its gradients, before clipping, unscaled
    histogram: list[int] | None = None  # how many |gradient| values lie in each bucket of `HISTOGRAM_EDGES`
    zeros: int | None = None  # gradient values that are exactly 0; in no bucket
    update_norm: float | None = None  # L2 of what the update changed
    weight_norm: float | None = None  # L2 of the weights before it; update-to-weight ratio = the quotient
    local_grad_norm: float | None = None  # before the ranks' gradients were averaged: for the gradient noise scale
    fingerprint: dict[str, int] | None = None  # group -> sum of the bits of its parameters, modulo 2**63
    expert_load: dict[str, list[float]] | None = None  # router -> share of the choices per expert; sums to 1
    seconds: float = 0.0  # what taking this sample cost the loop


# Upper edges of the buckets of |gradient|, half a decade each; the last bucket, beyond them, is open.
HISTOGRAM_EDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-24, 9))
