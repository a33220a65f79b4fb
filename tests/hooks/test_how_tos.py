"""The how-tos are true: their code trains and is watched, and what they list are the adapter's options."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from sentinel.records import RunEnd, RunStart, StepRecord
from sentinel.testing import FakeDaemon
from sentinel_hooks.attachment import Options
from tests.client.training import Numbers

DOCS = Path(__file__).parents[2] / "docs"
STEPS = 20


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def names_of_a_trainers_reader() -> dict[str, Any]:
    shape = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    words = torch.arange(8)
    return {"model": GPT2LMHeadModel(shape), "dataset": [{"input_ids": words, "labels": words}] * 64}


def names_of_a_lightning_reader() -> dict[str, Any]:
    return {"module": Module(), "loader": DataLoader(Numbers(64), batch_size=8)}


PAGES = {
    "how-to-trainer.md": (names_of_a_trainers_reader, "my-model"),
    "how-to-lightning.md": (names_of_a_lightning_reader, "Module"),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_page_trains_and_is_watched(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names, run_name = PAGES[page]
    (code,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, page, "exec"), names())
    (end,) = daemon.wait_for(lambda: daemon.of(RunEnd))
    assert (end.status, end.step) == ("completed", STEPS)
    assert len(daemon.of(StepRecord)) == STEPS
    assert daemon.of(RunStart)[0].name == run_name


@pytest.mark.parametrize("page", PAGES)
def test_the_options_of_the_page_are_those_of_the_adapter(page: str) -> None:
    text = (DOCS / page).read_text()
    section = text.partition("## What the callback takes")[2].partition("`SentinelCallback(")[0]
    unused = {"checkpoint_dir"}  # accepted and said to be unused, until there are checkpoints on disk
    assert set(re.findall(r"`(\w+)`", section)) == Options.__annotations__.keys() - unused
