"""What holds for every detector: memory that can be taken out and put back, and no memory of NaN."""

import doctest
import importlib
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.detect import catalogue
from sentinel.detect_settings import DetectSettings, LossSpikeSettings
from sentinel.vocabulary import UpdateResult
from tests.benchmarks import detection
from tests.detect.series import record, reflex

LOSS = st.one_of(
    st.none(),
    st.floats(1e-6, 1e4),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 2.0, 2.1, 8.0]),
)
RECORD = st.tuples(LOSS, LOSS, st.sampled_from(UpdateResult))
# A short warm-up, so that short examples reach the rules behind it.
QUICK = replace(DetectSettings(), loss_spike=LossSpikeSettings(warmup_steps=5))


def run(detectors, rows, first=1):
    found = []
    for step, (loss, norm, result) in enumerate(rows, first):
        found += [detector.observe(record(step, loss, norm, result=result)) for detector in detectors]
    return found


def same(left, right):
    return [repr(one) for one in left] == [repr(one) for one in right]


@settings(max_examples=150, deadline=None)
@given(before=st.lists(RECORD, max_size=60), after=st.lists(RECORD, max_size=60))
def test_taking_the_state_out_and_putting_it_back_changes_nothing(before, after):
    straight, moved = catalogue.build(QUICK), catalogue.build(QUICK)
    run(straight, before)
    run(moved, before)
    packed = [msgspec.msgpack.encode(detector.state()) for detector in moved]
    fresh = catalogue.build(QUICK)
    for detector, state in zip(fresh, packed, strict=True):
        detector.restore(msgspec.msgpack.decode(state))
    first = len(before) + 1
    assert same(run(straight, after, first), run(fresh, after, first))


@settings(max_examples=100, deadline=None)
@given(before=st.lists(RECORD, max_size=60), after=st.lists(RECORD, max_size=30))
def test_a_saved_state_shares_nothing_with_its_detector(before, after):
    detectors = catalogue.build(QUICK)
    run(detectors, before)
    states = [detector.state() for detector in detectors]
    packed = [msgspec.msgpack.encode(state) for state in states]
    run(detectors, after, len(before) + 1)
    for detector, state in zip(catalogue.build(QUICK), states, strict=True):
        detector.restore(state)
        run([detector], after, len(before) + 1)
    assert [msgspec.msgpack.encode(state) for state in states] == packed


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(RECORD, max_size=60), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_lone_nan_leaves_the_statistics_untouched(rows, bad):
    detectors = [detector for detector in catalogue.build(QUICK) if detector.name != "nonfinite"]
    run(detectors, rows)
    before = [detector.state() for detector in detectors]
    found = [detector.observe(record(len(rows) + 1, bad)) for detector in detectors]
    found += [detector.observe(reflex(len(rows) + 1)) for detector in detectors]
    assert found == [None] * len(found)
    assert [detector.state() for detector in detectors] == before


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(RECORD, max_size=80))
def test_the_same_records_give_the_same_findings(rows):
    assert same(run(catalogue.build(QUICK), rows), run(catalogue.build(QUICK), rows))


def test_a_disabled_detector_is_not_built():
    only = replace(DetectSettings(), loss_spike=LossSpikeSettings(enabled=False))
    assert [detector.name for detector in catalogue.build(only)] == ["nonfinite", "loss_divergence"]


@pytest.mark.parametrize("module", ["statistics", "nonfinite", "loss_spike", "loss_divergence"])
def test_the_examples_in_the_docstrings_hold(module):
    result = doctest.testmod(importlib.import_module(f"sentinel.detect.{module}"))
    assert result.attempted >= 3
    assert result.failed == 0


@pytest.mark.skipif(not detection.CURVES.is_dir(), reason="the public curves lie beside the repository, not in it")
def test_healthy_public_curves_raise_no_alarm_and_broken_ones_do():
    for name in ("hf_alpaca_llama", "hf_star_speculative"):
        assert detection.episodes(list(detection.read(name))) == []
    for name, step in detection.ANOMALIES.items():
        found = detection.episodes(list(detection.read(name)))
        assert step <= found[0].step <= step + 5
