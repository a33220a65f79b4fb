"""The ring of snapshots: what may be kept, what must be, and what can be returned to."""

from typing import Any

import pytest
import torch
from torch import nn

from sentinel.client import ring as ring_module
from sentinel.client.ring import BASE, NEVER, Counters, Ring
from sentinel.client.subject import Subject
from sentinel.config import SnapshotSettings
from sentinel.records import SnapshotNote
from sentinel.vocabulary import Quality


class Bench:
    """A model with Adam, and a ring over it whose boundaries are called by hand."""

    def __init__(self, budget_bytes: int = 1 << 30, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.notes: list[SnapshotNote] = []
        chosen = SnapshotSettings(**{"every_steps": 10, "good_after_steps": 50, **settings})
        self.ring = Ring(chosen, Subject(self.model, [self.optimizer]), self.notes.append)
        self.ring._budget_bytes = budget_bytes
        self.step = 0
        self.ring.take(None, 0, BASE, Counters(0, 0, 0, 0))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            self.ring.promote(self.step)
            if self.step >= self.ring.next_step:
                self.take()

    def take(self) -> None:
        self.ring.take(None, 0, "step", Counters(self.step, self.step, 0, 0))

    def steps(self, quality: Quality) -> list[int]:
        return [one.step for one in self.ring.snapshots if one.quality is quality]


def test_a_snapshot_becomes_good_after_w_clean_steps_and_not_before() -> None:
    bench = Bench()
    bench.train(59)
    assert bench.steps(Quality.GOOD) == [0]
    bench.train(1)
    assert bench.steps(Quality.GOOD) == [0, 10]
    bench.ring.trouble(60)
    bench.train(49)
    assert bench.steps(Quality.GOOD)[-1] == 10
    bench.train(1)
    assert 60 in bench.steps(Quality.GOOD)


@pytest.mark.parametrize("slots", [2, 3, 4, 8])
def test_a_long_run_always_holds_a_good_snapshot_that_is_not_too_old(slots: int) -> None:
    bench = Bench(slots=slots)
    for _ in range(100):
        bench.train(10)
        assert len(bench.ring.snapshots) <= slots
        newest = max(bench.steps(Quality.GOOD))
        assert bench.step - newest <= (60 if slots > 6 else 130)
    ages = [bench.step - one.step for one in bench.ring.snapshots]
    assert ages == sorted(ages, reverse=True)


def test_a_long_incident_does_not_push_the_last_good_snapshot_out() -> None:
    """O09: a slow spike outlives the rotation."""
    bench = Bench(slots=3)
    bench.train(200)
    good = max(bench.steps(Quality.GOOD))
    bench.ring.mark(good + 5, clear=False)
    for _ in range(60):
        bench.train(10)
        bench.ring.trouble(bench.step)
        bench.ring.mark(good + 5, clear=False)
        assert bench.steps(Quality.GOOD)[-1] == good
        assert len(bench.ring.snapshots) <= 3
    assert [one.pinned for one in bench.ring.snapshots if one.step == good] == [True]


def test_suspects_are_passed_over_and_get_their_quality_back_when_the_incident_was_none() -> None:
    bench = Bench(good_after_steps=5)
    bench.train(40)
    bench.ring.mark(20, clear=False)
    assert bench.steps(Quality.SUSPECT) == [20, 30, 40]
    restored = bench.ring.restore(35, "step", None)
    assert restored is not None
    assert restored.step == 10
    bench.ring.mark(20, clear=True)
    assert not bench.steps(Quality.SUSPECT)
    assert not any(one.pinned for one in bench.ring.snapshots)


def test_a_budget_for_one_copy_only_means_no_rollback_and_says_so() -> None:
    bench = Bench(budget_bytes=1000)
    bench.train(30)
    assert not bench.ring.snapshots
    assert "do not fit" in bench.ring.unavailable
    assert bench.ring.next_step == NEVER


def test_the_memory_of_all_snapshots_stays_within_the_budget_as_the_state_grows() -> None:
    """LBFGS keeps a history of many gradients, which the state at attach does not show."""
    torch.manual_seed(0)
    model = nn.Linear(100, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=20)
    notes: list[SnapshotNote] = []
    ring = Ring(SnapshotSettings(every_steps=1, min_steps=1), Subject(model, [optimizer]), notes.append)
    budget = ring._budget_bytes = 8 * 3 * 4 * 1010
    ring.take(None, 0, BASE, Counters(0, 0, 0, 0))
    inputs, targets = torch.randn(32, 100), torch.randn(32, 10)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    sizes = []
    for step in range(1, 30):
        optimizer.step(closure)
        if step >= ring.next_step:
            ring.take(None, 0, "step", Counters(step, step, 0, 0))
        sizes.append(sum(one.state.size_bytes for one in ring.snapshots))
        held = sizes[-1] + sum(t.numel() * t.element_size() for free in ring._pool._free.values() for t in free)
        assert sizes[-1] <= budget
        assert held <= 2 * budget
    assert max(note.size_bytes for note in notes) > 2 * notes[0].size_bytes, "the state did grow"
    assert ring.snapshots


@pytest.mark.parametrize("where", ["weight", "buffer", "moment"])
def test_a_state_with_a_nan_is_never_kept_and_pushes_nothing_out(where: str) -> None:
    bench = Bench(slots=3, good_after_steps=5)
    bench.train(35)
    before = [one.step for one in bench.ring.snapshots]
    broken = {
        "weight": bench.model[0].weight.data,
        "buffer": bench.model[1].running_var,
        "moment": bench.optimizer.state[bench.model[2].bias]["exp_avg_sq"],
    }[where]
    broken.view(-1)[1] = float("nan")
    good = bench.steps(Quality.GOOD)[-1]
    for _ in range(20):
        bench.step += 10
        bench.take()
        bench.ring.promote(bench.step)
    assert bench.steps(Quality.GOOD)[-1] == good
    assert [one.step for one in bench.ring.snapshots] == before
    refused = [note for note in bench.notes if note.quality is Quality.BAD]
    assert len(refused) == 20
    expected = {"weight": "0.weight", "buffer": "1.running_var", "moment": "optimizer.0.5.exp_avg_sq"}[where]
    assert {note.reason for note in refused} == {expected}
    restored = bench.ring.restore(bench.step, "step", None)
    assert restored is not None
    assert bool(torch.isfinite(broken).all())


def test_a_copy_that_changed_in_memory_is_not_restored_and_the_next_older_is() -> None:
    bench = Bench(good_after_steps=5)
    bench.train(40)
    weight = bench.model[0].weight
    bench.ring.snapshots[-1].state.tensors["0.weight"].view(torch.int32)[0, 0] ^= 1
    bench.ring.snapshots[-2].state.tensors["optimizer.0.0.exp_avg"].view(torch.int32)[0, 0] ^= 1
    restored = bench.ring.restore(40, "step", None)
    assert restored is not None
    assert restored.step == 20
    assert torch.equal(weight.detach(), restored.state.tensors["0.weight"])
    assert [one.quality for one in bench.ring.snapshots[-2:]] == [Quality.BAD, Quality.BAD]


def test_when_no_copy_is_sound_nothing_is_written() -> None:
    bench = Bench()
    bench.train(15)
    for one in bench.ring.snapshots:
        one.state.tensors["0.bias"].view(torch.int32)[0] ^= 1
    before = [value.clone() for value in bench.model.state_dict().values()]
    assert bench.ring.restore(15, "step", None) is None
    assert all(torch.equal(*pair) for pair in zip(before, bench.model.state_dict().values(), strict=True))


def test_copies_that_keep_failing_end_the_snapshots_and_not_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.train(10)

    def fail(*_arguments: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ring_module, "capture", fail)
    tries = 0
    for _ in range(100):
        bench.step += 1
        if bench.step >= bench.ring.next_step:
            tries += 1
            with pytest.raises(MemoryError):
                bench.take()
    assert tries == 3
    assert "could not be copied" in bench.ring.unavailable
    assert bench.steps(Quality.GOOD) == [0]


def test_one_copy_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(ring_module, "capture", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            bench.train(10)
    bench.train(30)
    assert [one.step for one in bench.ring.snapshots][-1] >= 30
    assert not bench.ring.unavailable
