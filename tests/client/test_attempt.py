"""The record that an attempt becomes: every field under its own name, whatever lived on a device read by then."""

from typing import Any

import msgspec
import torch

from sentinel.client.attempt import SCALARS, Attempt
from sentinel.client.guard import Measure
from sentinel.client.probes.memory import DeviceMemory
from sentinel.records import StepRecord
from sentinel.vocabulary import UpdateResult

# What an attempt says under the name that the field has too.
SAME = [
    "generation", "step", "time", "step_seconds", "data_wait_seconds", "backward_seconds", "optimizer_seconds",
    "data_position", "hook_seconds", "clip_max_norm", "forward_seconds", "clip_fraction", "scheduler_steps",
    "evaluations", "gradients_absent", "loss_scale", "mfu_ratio",
]  # fmt: skip


def filled() -> tuple[Attempt, dict[str, Any]]:
    """An attempt in which every number is another, and the fields that it must become."""
    attempt = Attempt()
    wanted: dict[str, Any] = {name: 100 + place for place, name in enumerate(SAME)}
    for name, value in wanted.items():
        setattr(attempt, name, value)
    attempt.result = UpdateResult.OVERFLOW
    attempt.memory = DeviceMemory(1, 2, 3)
    attempt.measures["optimizer"] = Measure(4.0, "clip")
    attempt.lrs["optimizer"] = 5.0
    attempt.reported.add(6.0, 7.0, 8.0, {"flops": 9.0, "accuracy": 10.0})
    wanted |= {"result": UpdateResult.OVERFLOW, "memory_allocated_bytes": 1, "memory_reserved_bytes": 2}
    wanted |= {"memory_peak_bytes": 3, "grad_norm": 4.0, "grad_norm_source": "clip", "lr": 5.0, "loss": 6.0}
    wanted |= {
        "tokens": 7.0,
        "flops": 9.0,
        "samples": 8.0,
        "reported": {"accuracy": 10.0},
        "applied": 11,
        "skipped": 12,
        "seq": 0,
    }
    return attempt, wanted


def test_every_field_of_the_record_is_under_its_own_name() -> None:
    attempt, wanted = filled()
    assert attempt.values() == {}
    record = attempt.record(11, 12, {})
    known = {name: value for name, value in msgspec.structs.asdict(record).items() if value is not None}
    assert known == wanted


def test_fields_of_probes_stand_beside_those_of_the_attempt() -> None:
    attempt, _ = filled()
    attempt.values()
    record = attempt.record(11, 12, {"flops": 13.0, "communication_source": "ddp"})
    assert (record.flops, record.communication_source, record.tokens) == (13.0, "ddp", 7.0)


def test_numbers_on_a_device_are_named_once_and_end_where_they_came_from() -> None:
    on_device = Attempt()
    tensor = torch.tensor  # stands for one on a device: what is a tensor has not been read
    on_device.objective.total, on_device.objective.count = tensor(1.0), 1
    on_device.loss_scale, on_device.reported.tokens = tensor(2.0), tensor(3.0)
    on_device.reported.samples, on_device.reported.flops = tensor(4.0), tensor(5.0)
    on_device.reported.others["accuracy"] = tensor(6.0)
    on_device.lrs |= {"optimizer.0": tensor(7.0), "optimizer.1": 8.0}
    on_device.measures |= {
        "optimizer.0": Measure(tensor(3.0), "own", tensor(1.0)),
        "optimizer.1": Measure(4.0, "own"),
    }
    on_device.clips = [tensor(9.0), 10.0]
    numbers = {name: float(value) for name, value in on_device.values().items()}  # type: ignore[arg-type]
    assert {*SCALARS} <= numbers.keys()
    assert numbers["nonfinite.optimizer.0"] == 1.0
    assert len(numbers) == len(SCALARS) + 5
    on_device.settle(numbers)
    record = on_device.record(1, 0, {})
    assert (record.loss, record.loss_scale, record.tokens, record.samples, on_device.flops) == (
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
    )
    assert (record.grad_norm, record.lr, record.reported) == (5.0, 7.0, {"accuracy": 6.0})
    assert record.optimizers == {
        "optimizer.0": {"lr": 7.0, "grad_norm": 3.0},
        "optimizer.1": {"lr": 8.0, "grad_norm": 4.0},
    }
    assert on_device.clips == [9.0, 10.0]
    assert isinstance(record, StepRecord)
