"""Train while a part of sentinel in this process raises, one part after another: `python -m ...broken_parts FOLDER`.

Says per part the digest of the weights and how often the part raised; and the digest without sentinel as `clean`.
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.end_to_end.scripts import stage

STEPS = 60

# What raises, by the name of the part: where it is looked up.
PARTS = {
    "gradient probe": "sentinel.client.reflex.measure",
    "memory probe": "sentinel.client.loop.device_memory",
    "loss probe": "sentinel.client.probes.loss.Objective.add",
    "report": "sentinel.client.probes.loss.Reported.add",
    "snapshot": "sentinel.client.ring.Ring.take",
    "record": "sentinel.client.attempt.Attempt.record",
    "outbox": "sentinel.client.outbox.len",  # the loop holds `push` itself; so every call of it raises
    "turns": "sentinel.client.turns.Turns.after_step",
    "link": "sentinel.client.link.Link._send",
    "spool": "sentinel.client.keeper.Keeper.keep",
}


class Broken:
    """Raises whenever it is called, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_arguments: Any, **_named: Any) -> Any:
        self.calls += 1
        raise ValueError("injected")


def main(folder: str) -> None:
    told = stage.Stage(folder)
    told.say("clean", stage.digest(_train(lambda model, optimizer: None)))
    import sentinel

    for name, place in PARTS.items():
        broken = Broken()
        held: list[Any] = []

        def attach(model: Any, optimizer: Any, held: list[Any] = held, name: str = name) -> Any:
            run = sentinel.attach(model, optimizer, run_id=name.replace(" ", "-"))
            stage.connected(run)
            held.append(run)
            return run

        model = _train(attach, lambda place=place, broken=broken: mock.patch(place, broken, create=True))
        held[0].detach()
        told.say(name.replace(" ", "-"), {"digest": stage.digest(model), "raised": broken.calls})
    told.say("end")


def _train(attach: Callable[[Any, Any], Any], breaking: Callable[[], Any] = mock.MagicMock) -> torch.nn.Module:
    model = stage.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = attach(model, optimizer)
    with breaking():
        for number in range(STEPS):
            inputs, targets = stage.batch(number)
            loss = stage.error(model(inputs), targets)
            loss.backward()
            if run is not None:
                run.report(loss=loss.detach())
                with run.phase("eval"):
                    stage.pace(0.0)
            optimizer.step()
            optimizer.zero_grad()
            stage.pace(0.002)
        if run is not None:
            stage.pace(0.1)  # the thread beside the loop gets its turn
            run.detach()
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
