"""The panels of what is sampled: how gradients are distributed, what updates change, where tokens go."""

from dashboards.parts import COUNT, RANKS, RUN, Look, Panel, Query, buckets, lines, rows

_MAGNITUDE = Look(log_base=10)
_SHARE = Look("percentunit", least=0)


def gradients() -> list[Panel]:
    values = f"sum by (le) (sentinel_gradient_values_bucket{RUN})"
    norms = Query(f"sentinel_gradient_group_norm{RUN}", "{{group}}")
    zeros = Query(f"sentinel_gradient_zeros_ratio{RUN}", "zeros")
    return [
        buckets("Gradient values", "How many, by magnitude; those that are 0 are beside.", values, "sci"),
        lines("Gradient norm by layer group", "L2, before clipping; sampled.", [norms], _MAGNITUDE),
        lines(
            "Update to weight",
            "L2 norm of what an update changed over that of the weights; sampled.",
            [Query(f"sentinel_update_ratio{RUN}", "update / weight")],
            _MAGNITUDE,
        ),
        lines(
            "Clipped",
            "Share of the last 100 clipped updates whose gradients were made smaller.",
            [Query(f"sentinel_clip_fraction_ratio{RANKS}")],
            _SHARE,
        ),
        lines("Gradient values that are 0", "Share of all; sampled.", [zeros], _SHARE),
        lines(
            "Parameters without a gradient",
            "Trainable ones, in the latest step.",
            [Query(f"sentinel_gradients_absent{RANKS}")],
            COUNT,
        ),
        lines(
            "Gradient noise scale",
            "Batch size from which on larger batches help less: samples, or tokens where those are not reported.",
            [Query(f"sentinel_gradient_noise_scale{RUN}", "noise scale")],
            _MAGNITUDE,
        ),
    ]


def experts() -> list[Panel]:
    return [
        lines(
            "Expert imbalance",
            "Variance of an expert's load relative to a uniform one: 0 is even.",
            [Query(f"sentinel_expert_imbalance{RUN}", "{{router}}")],
            Look(least=0),
        ),
        rows(
            "Expert load",
            "Share of a router's choices that fell on an expert.",
            Query(f"sentinel_expert_load_ratio{RUN}", "{{router}} {{expert}}"),
            "percentunit",
        ),
    ]
