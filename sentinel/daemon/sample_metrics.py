"""What Prometheus sees of the signals that are sampled: one value for a run, the latest of each."""

import itertools
import math
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from sentinel.daemon.samples import Samples
from sentinel.detect.combining import imbalance
from sentinel.sample import HISTOGRAM_EDGES

MOST_EXPERTS = 512  # over all routers of a run: each is a series
_BOUNDS = (*(f"{edge:.3g}" for edge in HISTOGRAM_EDGES), "+Inf")


def of_samples(samples: Mapping[str, Samples]) -> Iterator[Metric]:
    """`samples`: by run_id."""
    shown = {run_id: of_run.shown() for run_id, of_run in samples.items()}
    groups = _gauge("gradient_group_norm", "L2 norm of a layer group's gradients, before clipping.", "group")
    zeros = _gauge("gradient_zeros_ratio", "Share of the gradient's values that are exactly 0.")
    update = _gauge("update_ratio", "L2 norm of what an update changed over that of the weights before it.")
    text = "Batch size from which on larger ones help less; in samples where the loop reports them, else in tokens."
    noise = _gauge("gradient_noise_scale", text)
    uneven = _gauge(
        "expert_imbalance", "Variance of an expert's load relative to a uniform one; 0 is even.", "router"
    )
    load = _gauge("expert_load_ratio", "Share of a router's choices that fell on an expert.", "router", "expert")
    for run_id, latest in shown.items():
        _add(groups, run_id, {(group,): norm for group, norm in latest.group_norms.items()})
        _add(zeros, run_id, {(): latest.zeros_ratio})
        _add(update, run_id, {(): latest.update_ratio})
        _add(noise, run_id, {(): samples[run_id].noise_scale})
        _add(uneven, run_id, {(router,): imbalance(shares) for router, shares in latest.expert_load.items()})
        _add(load, run_id, _by_expert(latest.expert_load))
    values = {run_id: latest.histogram for run_id, latest in shown.items() if latest.histogram is not None}
    yield from (groups, _values(values), zeros, update, noise, uneven, load)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"sentinel_{name}", text, labels=("run_id", *labels))


def _add(family: GaugeMetricFamily, run_id: str, values: Mapping[tuple[str, ...], float | None]) -> None:
    for labels, value in values.items():
        if value is not None and math.isfinite(value):
            family.add_metric((run_id, *labels), value)


def _by_expert(loads: Mapping[str, tuple[float, ...]]) -> dict[tuple[str, ...], float | None]:
    """Whole routers, the first ones, as many as there is room for."""
    found: dict[tuple[str, ...], float | None] = {}
    for router, shares in loads.items():
        if len(found) + len(shares) <= MOST_EXPERTS:
            found |= {(router, str(expert)): share for expert, share in enumerate(shares)}
    return found


def _values(histograms: Mapping[str, tuple[int, ...]]) -> Metric:
    """Buckets as Grafana's heat map wants them. A histogram by its form, a gauge by what it says: ask no rate."""
    text = "Values of the latest sampled gradient that are not 0, by magnitude, all ranks together. Not a counter."
    family = HistogramMetricFamily("sentinel_gradient_values", text, labels=("run_id",))
    for run_id, counts in histograms.items():
        totals = itertools.accumulate(counts)
        family.add_metric((run_id,), list(zip(_BOUNDS, totals, strict=True)), sum_value=None)
    return family
