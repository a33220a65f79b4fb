"""What ranks sampled at one step becomes one value for the run."""

import math

from sentinel.detect.combining import (
    Told,
    are_shards,
    expert_load,
    group_norms,
    histogram,
    imbalance,
    is_finite,
    update_ratio,
    zeros_ratio,
)
from sentinel.sample import HISTOGRAM_EDGES, Sample

BUCKETS = len(HISTOGRAM_EDGES) + 1
NAN = math.nan


def test_norms_of_replicas_are_one_and_squares_of_shards_add_up():
    samples = [Sample(group_norms={"a": 3.0, "b": 1.0}), Sample(group_norms={"a": 4.0, "b": 0.0})]
    assert group_norms(samples, Told(2, False, None)) == {"a": 4.0, "b": 1.0}
    assert group_norms(samples, Told(2, True, None)) == {"a": 5.0, "b": 1.0}


def test_shards_are_known_by_what_a_rank_told_or_by_the_global_norm():
    halves = [Sample(group_norms={"a": 3.0, "b": 0.0}), Sample(group_norms={"a": 0.0, "b": 4.0})]
    replicas = [Sample(group_norms={"a": 3.0, "b": 4.0})] * 2
    assert are_shards(halves, Told(2, False, 5.0))
    assert not are_shards(replicas, Told(2, False, 5.0))
    assert are_shards(halves[:1], Told(2, False, 5.0))
    assert not are_shards(replicas[:1], Told(2, False, 5.01))
    assert are_shards(replicas, Told(2, True, None))
    assert not are_shards(halves, Told(2, False, NAN))
    assert not are_shards(halves[:1], Told(1, False, 5.0)), "of one rank there are no shards, whatever it clips"


def test_shards_that_do_not_add_up_to_the_global_norm_miss_a_rank():
    halves = [Sample(group_norms={"a": 3.0}), Sample(group_norms={"a": 4.0})]
    assert group_norms(halves, Told(2, True, 5.01)) == {"a": 5.0}
    assert group_norms(halves, Told(2, True, 7.0)) == {}


def test_a_norm_that_is_not_finite_on_one_rank_is_left_out():
    samples = [Sample(group_norms={"a": NAN, "b": 1.0}), Sample(group_norms={"a": 4.0, "b": 1.0})]
    assert group_norms(samples, Told(2, False, None)) == {"b": 1.0}


def test_counts_add_up_and_zeros_are_a_share_of_all_values():
    counts = [1] * BUCKETS
    samples = [Sample(histogram=counts, zeros=BUCKETS), Sample(histogram=counts, zeros=BUCKETS)]
    assert histogram(samples) == (2,) * BUCKETS
    assert zeros_ratio(samples) == 0.5
    assert histogram([Sample(histogram=[1])]) is None
    assert zeros_ratio([Sample(histogram=[1], zeros=1)]) is None


def test_the_ratio_of_shards_is_that_of_the_whole():
    shards = [Sample(update_norm=3.0, weight_norm=30.0), Sample(update_norm=4.0, weight_norm=40.0)]
    assert update_ratio(shards) == 0.1
    assert update_ratio(shards[:1] * 4) == 0.1, "of ranks that hold the same it is that of each"
    assert update_ratio([Sample(update_norm=1.0, weight_norm=0.0)]) is None
    assert update_ratio([Sample(update_norm=NAN, weight_norm=1.0)]) is None
    assert update_ratio([]) is None


def test_the_load_of_experts_is_the_mean_of_the_ranks():
    samples = [Sample(expert_load={"gate": [1.0, 0.0]}), Sample(expert_load={"gate": [0.5, 0.5]})]
    assert expert_load(samples) == {"gate": (0.75, 0.25)}
    assert expert_load([*samples, Sample(expert_load={"gate": [1.0]})]) == {"gate": (0.75, 0.25)}


def test_imbalance_is_0_when_even_and_experts_less_one_when_all_goes_to_one():
    assert imbalance([2.0, 2.0]) == 0.0
    assert imbalance([1.0] + [0.0] * 7) == 7.0
    assert imbalance([]) is None
    assert imbalance([0.0, 0.0]) is None


def test_one_number_that_is_not_finite_makes_a_sample_so():
    assert is_finite(Sample(group_norms={"a": 1.0}, update_norm=1.0, expert_load={"gate": [1.0]}))
    bad = (Sample(group_norms={"a": NAN}), Sample(update_norm=math.inf), Sample(expert_load={"gate": [0.0, NAN]}))
    assert not any(map(is_finite, bad))
