"""Routers of mixtures are found by what they look like, and each expert's share of the choices is told."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sentinel.client.attach import attach
from sentinel.client.sampling.routers import chosen, find
from sentinel.records import StepRecord, Trouble
from sentinel.sample import Sample
from sentinel.testing import FakeDaemon
from tests.client.sampling.conftest import EVERY
from tests.client.sampling.mixtures import EXPERTS, TOP_K, Mixture
from tests.client.sampling.samples import samples
from tests.client.training import CLASSES, FEATURES
from tests.client.watching import watched


def train(
    daemon: FakeDaemon, model: nn.Module, forward: Any = None, pieces: int = 1
) -> tuple[Sample, dict[str, list[float]]]:
    """The sample of step EVERY, and the load of every `gate` that is a Linear, by hooks of the test's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    routers = [name for name, _ in model.named_modules() if name.endswith(("gate", "router"))]
    counts = {name: torch.zeros(EXPERTS) for name in routers}
    with watched(daemon, model, optimizer, settings={"sampling": {"signals": ["expert_load"]}}) as found:
        for number in range(1, EVERY + 1):
            torch.manual_seed(number)
            handles = [count(model.get_submodule(name), counts[name]) for name in routers if number == EVERY]
            optimizer.zero_grad()
            for part in torch.randn(32, FEATURES).chunk(pieces):
                (forward or model)(part).square().mean().backward()
            optimizer.step()
            for handle in handles:
                handle.remove()
    return samples(found.records)[EVERY], {name: (one / one.sum()).tolist() for name, one in counts.items()}


def count(router: nn.Module, counts: Tensor) -> Any:
    """The test's own hook. What it returned would take the output's place."""

    def hear(_module: nn.Module, _inputs: Any, logits: Tensor) -> None:
        if router.training and torch.is_grad_enabled():
            counts.add_(torch.bincount(logits.topk(TOP_K).indices.flatten(), minlength=EXPERTS))

    return router.register_forward_hook(hear)


@pytest.mark.parametrize("named", ["gate", "router"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_the_share_of_the_choices_of_every_expert_is_told_and_sums_to_one(daemon, named: str, pieces: int) -> None:
    sample, truth = train(daemon, Mixture(named), pieces=pieces)
    assert list(sample.expert_load) == [f"layers.{n}.{named}" for n in range(2)]
    for router, load in sample.expert_load.items():
        assert load == pytest.approx(truth[router])
        assert sum(load) == pytest.approx(1.0)
    assert len({share for load in sample.expert_load.values() for share in load}) > 2, "it is uneven"


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_tell_the_same_load(daemon: FakeDaemon, reentrant: bool) -> None:
    plain, _ = train(daemon, Mixture())
    model = Mixture()

    def forward(inputs: Tensor) -> Tensor:
        hidden = inputs.requires_grad_()
        for layer in model.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        return model.head(hidden)

    recomputed, _ = train(daemon, model, forward)
    assert recomputed.expert_load == {name: pytest.approx(load) for name, load in plain.expert_load.items()}


def test_evaluation_and_an_average_of_the_weights_are_no_training(daemon: FakeDaemon) -> None:
    """O31: a copy carries the hooks of the model it was made from."""
    plain, _ = train(daemon, Mixture())
    model = Mixture()

    def forward(inputs: Tensor) -> Tensor:
        average = copy.deepcopy(model)  # also while a sample is armed
        output = model(inputs)
        average(torch.ones(64, FEATURES)).sum().backward()
        model.eval()
        model(torch.ones(64, FEATURES))
        model.train()
        with torch.no_grad():
            model(torch.ones(64, FEATURES))
        return output

    found, _ = train(daemon, model, forward)
    assert found.expert_load == {name: pytest.approx(load) for name, load in plain.expert_load.items()}
    assert find(model)


def small(kind: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "vocab_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    more = {"intermediate_size": 16, "num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, **more, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config), config
    if kind == "qwen":
        config = transformers.Qwen2MoeConfig(
            **sizes, **more, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
        )
        return transformers.Qwen2MoeForCausalLM(config), config
    config = transformers.SwitchTransformersConfig(
        d_model=16, d_kv=8, d_ff=16, num_heads=2, vocab_size=32, num_experts=4, num_layers=2, num_decoder_layers=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=64, router_jitter_noise=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config), config


@pytest.mark.parametrize(("kind", "routers"), [("mixtral", 2), ("qwen", 2), ("switch", 2)])
def test_routers_of_published_models_are_read(daemon: FakeDaemon, kind: str, routers: int) -> None:
    model, _ = small(kind)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    heard: dict[str, Any] = {}
    for router in find(model):
        router.module.register_forward_hook(lambda _m, _i, output, name=router.name: heard.update({name: output}))
    with watched(daemon, model, optimizer, settings={"sampling": {"signals": ["expert_load"]}}) as found:
        for number in range(1, EVERY + 1):
            torch.manual_seed(number)
            tokens = torch.randint(32, (2, 8))
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            last = dict(heard) if number == EVERY else {}
    load = samples(found.records)[EVERY].expert_load
    assert len(load) == routers
    assert all(sum(shares) == pytest.approx(1.0) for shares in load.values())
    for name, shares in load.items():
        logits = last[name][-1 if kind == "switch" else 0]
        choices = logits.topk(1 if kind == "switch" else 2).indices.flatten()
        counts = torch.bincount(choices, minlength=4)
        assert shares == pytest.approx((counts / counts.sum()).tolist())


def test_the_choice_is_read_where_the_output_holds_it_else_the_largest_logits_are_taken() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    assert chosen(logits, 4, 1).tolist() == [1, 0, 0, 1]
    assert chosen((logits, torch.tensor([[1, 2], [1, 3]])), 4, 2).tolist() == [0, 2, 1, 1]
    mask = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])  # beyond the expert's capacity a token has none
    assert chosen((mask, logits), 4, 1).tolist() == [0, 0, 1, 0]
    assert chosen(torch.randn(3, 5), 4, 1) is None
    assert chosen("nothing", 4, 1) is None


def test_a_model_without_experts_has_no_routers() -> None:
    gated = nn.Module()
    gated.gate = nn.Linear(8, 8)  # a gate that is none: nothing says how many experts there are
    assert find(gated) == []
    assert find(nn.Sequential(nn.Linear(8, 8))) == []


def test_a_reported_load_is_told_at_every_step_as_shares(daemon: FakeDaemon) -> None:
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(daemon, model, optimizer, settings={"sampling": {"signals": []}}) as found:
        for given in (torch.tensor([3, 1]), [0.5, 0.5], None, torch.tensor([0.0, 2.0], dtype=torch.bfloat16)):
            optimizer.zero_grad()
            model(torch.randn(4, FEATURES)).sum().backward()
            optimizer.step()
            if given is not None:
                found.run.report(expert_load=given)
    loads = [None if one is None else one.expert_load for one in found.all("sampled")]
    assert loads == [{"reported": [0.75, 0.25]}, {"reported": [0.5, 0.5]}, None, {"reported": [0.0, 1.0]}]


@pytest.mark.parametrize("wrong", [3.0, "x", torch.ones(2, 2), torch.ones(1), torch.ones(5000), [1, "x"]])
def test_what_is_no_load_is_said_and_left_out(daemon: FakeDaemon, wrong: Any) -> None:
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attach(model, optimizer)
    model(torch.randn(4, FEATURES)).sum().backward()
    run.report(expert_load=wrong, accuracy=0.5)
    optimizer.step()
    run.detach()
    (trouble,) = daemon.of(Trouble)
    assert "expert_load" in trouble.text
    (record,) = daemon.of(StepRecord)
    assert record.sampled is None
    assert record.reported == {"accuracy": 0.5}
