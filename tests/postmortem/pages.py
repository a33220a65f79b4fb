"""Runs that a page has to show well: hostile, quiet, nothing but NaN, failed, very long."""

import math
import random
from pathlib import Path
from typing import Any

from sentinel.postmortem.html_page import Material
from sentinel.postmortem.series import gather
from sentinel.records import Origin, RunEnd, Trouble
from sentinel.sample import HISTOGRAM_EDGES, Sample
from sentinel.store.database import Store
from sentinel.store.timeline import segments
from sentinel.vocabulary import Kind, RunStatus
from tests.postmortem.test_diagnosis import row
from tests.store.building import RUN, START, entries, hello, incident, record, start, url_in

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
STEPS = 60


def plain_run(folder: Path, *, name: str = "gpt", status: str = "completed", error: str = "", **first: Any) -> Store:
    """STEPS steps with every signal; `first`: of the run's start."""
    store = Store.open(url_in(folder))
    store.register_rank(hello(), "box", START)
    memory = {"memory_allocated_bytes": 2**30, "memory_peak_bytes": 2**31, "memory_reserved_bytes": 3 * 2**30}
    records = [
        record(
            step + 1,
            step,
            loss=4.0 / step**0.3,
            grad_norm=1.0 + 0.2 * math.sin(step),
            lr=1e-3,
            loss_scale=1024.0,
            data_wait_seconds=0.01,
            **memory,
        )
        for step in range(1, STEPS + 1)
    ]
    store.write(entries(start(name=name, **first), *records), critical=True)
    end = RunEnd(STEPS + 2, START + STEPS + 2, 0, STEPS, status, error)
    store.write(entries(end), critical=True)
    store.end_run(RUN, RunStatus(status), START + STEPS + 2)
    return store


def quiet_run(folder: Path) -> None:
    plain_run(folder).close()


def failing_run(folder: Path) -> None:
    plain_run(folder, status="failed", error="RuntimeError: the disk is full").close()


def hostile_run(folder: Path) -> None:
    """Every text that comes from a run tries to be markup; two of them look like secrets."""
    store = plain_run(
        folder,
        name=HOSTILE,
        argv=["train.py", HOSTILE, "--api-key", "hunter2", "--password=hunter2"],
        config={HOSTILE: HOSTILE, "wandb": {"token": "hunter2"}, "max_tokens": 4711},
        packages={"torch": HOSTILE},
        devices=[HOSTILE],
    )
    store.save_incident(incident(summary=HOSTILE, cause=HOSTILE, evidence={HOSTILE: HOSTILE}))
    store.write(entries(Trouble(STEPS + 3, START + 90, 13, "probe", HOSTILE)), critical=False)
    store.close()


def nan_run(folder: Path) -> None:
    """Loss and gradient are NaN from the first step to the last; the learning rate is infinite."""
    store = Store.open(url_in(folder))
    store.register_rank(hello(), "box", START)
    bad = {"loss": math.nan, "grad_norm": math.nan, "lr": math.inf, "step_seconds": math.nan}
    records = [record(step + 1, step, **bad) for step in range(1, STEPS + 1)]
    store.write(entries(start(), *records), critical=True)
    where = {"first_step": 1, "onset_step": 1, "last_step": STEPS}
    store.save_incident(incident(Kind.NONFINITE_LOSS, evidence={"value": math.nan}, **where))
    store.write(entries(RunEnd(STEPS + 2, START + 90, 0, STEPS, "completed")), critical=True)
    store.end_run(RUN, RunStatus.COMPLETED, START + 90)
    store.close()


def full_run(folder: Path, steps: int = 400, every: int = 20) -> None:
    """Two ranks that tell every signal; the second is late, and a rollback takes the last tenth back once."""
    store = Store.open(url_in(folder))
    origins = [Origin(RUN, 1, rank) for rank in range(2)]
    back = steps * 9 // 10
    order = [(0, step) for step in range(1, steps + 1)] + [(1, step) for step in range(back + 1, steps + 1)]
    for origin in origins:
        store.register_rank(hello(rank=origin.rank, nonce=f"n{origin.rank}", world_size=2), "box", START)
        store.write(entries(start(world_size=2, local_rank=origin.rank), origin=origin), critical=True)
        records = [
            record(seq, step, generation, **signals(step, origin.rank, sampled=step % every == 0))
            for seq, (generation, step) in enumerate(order, 2)
        ]
        store.write(entries(*records, origin=origin), critical=False)
    for second in range(1, steps + 1):
        store.save_system_sample(RUN, 1, 0, START + second, {"host_memory_bytes": 1e9} | _machine(second, every))
    store.save_generation(origins[0], 1, back, steps + 1, START + steps, "rollback")
    store.end_run(RUN, RunStatus.COMPLETED, START + steps + 2)
    store.close()


def signals(step: int, rank: int, *, sampled: bool) -> dict[str, Any]:
    """Every signal of one record, as a run of two ranks has them of which the second is late."""
    wave = 1 + 0.2 * math.sin(step / 15)
    late = 0.02 if step % 90 > 60 else 0.0
    times = {"data_wait_seconds": 0.004 + late * rank, "forward_seconds": 0.03 * wave, "optimizer_seconds": 0.006}
    waited = {"communication_wait_seconds": 0.002 + late * (1 - rank), "communication_source": "ddp"}
    counts = {"tokens": 2048.0, "samples": 8.0, "mfu_ratio": 0.38 / wave, "clip_fraction": 0.3 * wave}
    memory = {"memory_allocated_bytes": 2**30, "memory_peak_bytes": 2**31, "memory_reserved_bytes": 3 * 2**30}
    plain = {"loss": 4.0 / step**0.3, "grad_norm": wave, "lr": 1e-3, "loss_scale": 1024.0, "host_memory_bytes": 10**9}
    whole = {"step_seconds": 0.12 * wave + late, "backward_seconds": 0.06 * wave + late * (1 - rank)}
    sample = _sample(step, wave) if sampled else None
    return {**times, **waited, **counts, **memory, **plain, **whole, "sampled": sample}


def _machine(second: int, every: int) -> dict[str, float]:
    """What is measured of the machine now and then; two GPUs."""
    if second % every:
        return {}
    wave = 0.9 + 0.1 * math.sin(second / 30)
    gpus = {f"gpu_utilization_ratio{{GPU-{number}}}": wave - 0.1 * number for number in range(2)}
    gpus |= {f"gpu_temperature_celsius{{GPU-{number}}}": 60.0 + 5 * number for number in range(2)}
    gpus |= {f"gpu_power_watts{{GPU-{number}}}": 600 * wave for number in range(2)}
    room = {"machine_memory_bytes{available}": 2e11, "disk_free_bytes{home}": 4e11 - 1e8 * second}
    wires = {"network_bytes{eth0,sent}": 2e8 * second, "network_bytes{eth0,received}": 1e8 * second}
    return {"cpu_utilization_ratio": wave / 2, **gpus, **room, **wires}


def _sample(step: int, wave: float) -> Sample:
    middle = 12 + step / 200
    counts = [int(1e5 * math.exp(-((number - middle) ** 2) / 9)) for number in range(len(HISTOGRAM_EDGES) + 1)]
    groups = {f"layers.{number}": wave * 10 ** (-number / 6) for number in range(12)}
    load = [wave, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 2 - wave]
    return Sample(
        group_norms={"embed": 3 * wave, **groups, "head": wave},
        histogram=counts,
        zeros=sum(counts) // 9,
        update_norm=1e-3 * wave,
        weight_norm=1.0,
        expert_load={f"layers.{layer}.gate": [share / sum(load) for share in load] for layer in range(3)},
    )


def long_run(steps: int, bad: set[int], spike: int) -> Material:
    """As read from a database, without the minutes that writing one takes."""

    def loss(step: int) -> float:
        return math.nan if step in bad else 50.0 if step == spike else 2.0 + math.sin(step) / 10

    rows = (row(step, loss=loss(step), host_memory_bytes=10**9 + step) for step in range(1, steps + 1))
    where = {"attempt": 1, "generation": 0, "onset_step": spike, "first_step": spike, "last_step": spike + 2}
    words = {
        "kind": "loss_spike",
        "severity": "critical",
        "tier": "T2",
        "status": "open",
        "summary": "up",
        "cause": "",
    }
    times = {"opened_at": "2026-01-31T12:00:00.250Z", "resolved_at": None}
    found = {**where, **words, **times, "id": "i1", "ranks": [0], "evidence": {}, "actions": []}
    run = {"run_id": RUN, "name": "long", "status": "running", "steps": steps, "attempts": 1, "generations": 1}
    return Material(
        report={
            "run": {**run, "world_size": 1, "started_at": None, "ended_at": None, "error": None},
            "incidents": [found],
            "requests": [],
            "checkpoints": [],
            "goodput": {"useful_seconds": 1.0, "lost_seconds": 0.0, "ratio": 1.0},
            "conservation": [],
        },
        provenance={
            "git": {},
            "host": "box",
            "devices": ["cpu"],
            "mode": "protect",
            "argv": [],
            "config": {},
            "packages": {},
        },
        decisions=[],
        findings=[],
        troubles=[],
        series=gather(segments([{"attempt": 1, "generation": 0, "target_step": 0}]), rows),
        place="nowhere",
    )


def crowded_run(steps: int, incidents: int, snapshots: int) -> Material:
    """Every signal with noise in all its digits, incidents everywhere, many snapshots; three are BAD."""
    told = long_run(100, set(), 50)
    chance = random.Random(0)
    signals = ("loss", "grad_norm", "lr", "loss_scale", "step_seconds", "data_wait_seconds")
    memory = ("host_memory_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "memory_peak_bytes")

    def noise() -> dict[str, float]:
        return {name: 1 + chance.random() for name in signals} | {name: 1e10 * chance.random() for name in memory}

    rows = (row(step, **noise()) for step in range(1, steps + 1))
    (first,) = told.report["incidents"]
    every = steps // incidents
    found = [
        first | {"id": f"i{number}", "onset_step": step, "first_step": step, "last_step": step, "summary": "up " * 20}
        for number, step in enumerate(range(1, 1 + every * incidents, every))
    ]
    where = {"attempt": 1, "generation": 0, "tier": "ram", "verified": True, "kept": False, "reason": "made room"}
    kept = [
        {**where, "step": number * (steps // snapshots), "quality": "BAD" if number in {7, 8, 9} else "GOOD"}
        for number in range(snapshots)
    ]
    return told._replace(
        report={**told.report, "incidents": found, "checkpoints": kept},
        series=gather(segments([{"attempt": 1, "generation": 0, "target_step": 0}]), rows),
    )
