"""What sentinel uses of torch without a promise from torch: one test per name, so that an upgrade says what moved."""

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader


def test_backward_and_autograd_backward_both_start_at_the_engine_seam() -> None:
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
    calls: list[dict[str, Any]] = []
    original = torch.autograd._engine_run_backward

    def spy(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs | {"task": torch._C._current_graph_task_id()})
        return original(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = spy
    try:
        weight = torch.ones(2, requires_grad=True)
        weight.sum().backward()
        torch.autograd.backward([weight.sum()])
        torch.autograd.grad(weight.sum(), weight)
    finally:
        torch.autograd._engine_run_backward = original
    assert [call["accumulate_grad"] for call in calls] == [True, True, False]
    assert {call["task"] for call in calls} == {-1}


def test_clipping_goes_through_the_two_halves_that_are_looked_up_in_the_module() -> None:
    names = clip_grad.clip_grad_norm_.__wrapped__.__code__.co_names  # type: ignore[attr-defined]
    assert {"_get_total_norm", "_clip_grads_with_norm_"} <= set(names)
    assert list(inspect.signature(clip_grad._clip_grads_with_norm_).parameters) == [
        "parameters", "max_norm", "total_norm", "foreach",
    ]  # fmt: skip
    assert list(inspect.signature(clip_grad._get_total_norm).parameters)[:2] == ["tensors", "norm_type"]


def test_a_grad_scaler_keeps_its_scale_and_its_overflows_where_we_look() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert scaler._scale is None
    scaler.scale(layer(torch.ones(1)).sum()).backward()
    assert float(scaler._scale) == scaler._init_scale == 8.0
    assert int(scaler._growth_tracker) == scaler._init_growth_tracker
    assert scaler._per_optimizer_states.get(id(optimizer)) is None
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"].name == "UNSCALED"
    assert [float(found) for found in state["found_inf_per_device"].values()] == [0.0]
    assert not GradScaler("cpu", enabled=False)._enabled


def test_a_fused_optimizer_obeys_found_inf() -> None:
    layer = nn.Linear(2, 1)
    optimizer: Any = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    assert optimizer._step_supports_amp_scaling
    before = layer.weight.detach().clone()
    layer(torch.ones(2)).sum().backward()
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    assert torch.equal(before, layer.weight)


def test_step_hooks_get_the_optimizer_and_may_replace_the_arguments() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda _o, args, kwargs: ((args[0], lambda: seen.append("ours")), kwargs))
    optimizer.step(lambda: seen.append("theirs"))
    assert seen == ["ours"]


def test_a_loader_reads_its_sampler_when_its_iterator_is_made() -> None:
    loader: Any = DataLoader(range(4), batch_size=2)
    assert "batch_sampler" in vars(loader)
    vars(loader)["batch_sampler"] = [[3, 2], [1, 0]]
    iterator = iter(loader)
    assert iterator._index_sampler == [[3, 2], [1, 0]]
    assert [batch.tolist() for batch in iterator] == [[3, 2], [1, 0]]
    assert hasattr(DataLoader(range(4), batch_size=2, num_workers=1), "_iterator")


def test_tensors_count_their_in_place_changes_and_schedulers_mark_the_step_they_wrap() -> None:
    tensor = torch.zeros(2)
    version = tensor._version
    torch._foreach_mul_([tensor], 2.0)
    assert tensor._version > version
    optimizer = torch.optim.SGD([tensor], lr=0.1)
    assert not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")


def test_the_wrapper_that_runs_step_hooks_names_its_optimizer_self() -> None:
    code = torch.optim.Optimizer.profile_hook_step(lambda _self: None).__code__
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    seen: list[Any] = []

    def look(*_arguments: Any) -> None:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        seen.append((frame.f_back.f_code is code, frame.f_back.f_locals["self"] is optimizer))

    optimizer.register_step_pre_hook(look)
    optimizer.step()
    assert seen == [(True, True)]


def test_the_engine_calls_back_in_the_order_of_asking_once_all_gradients_are_there() -> None:
    told: list[str] = []
    engine = torch.autograd.Variable._execution_engine
    first, last = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def ask(name: str) -> None:
        engine.queue_callback(lambda: told.append(f"{name} {first.grad is not None and last.grad is not None}"))

    last.register_post_accumulate_grad_hook(lambda _: ask("early"))
    first.register_post_accumulate_grad_hook(lambda _: ask("late"))
    (first.exp() * last).sum().backward()
    assert sorted(told) == ["early True", "late True"]
    assert torch._C._current_graph_task_id() == -1


def test_ddp_leaves_word_in_its_forward_whether_the_backward_will_reduce(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 1))
        word = []
        model(torch.ones(1, 2)).sum().backward()
        word.append(model.require_forward_param_sync)
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
            word.append(model.require_forward_param_sync)
        assert word == [True, False]
        assert (model._use_python_reducer, model.static_graph) == (False, False)
        assert "_sync_buffers" in vars(DistributedDataParallel)
        assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "gloo"
        assert "cpu" in {one.type for one in dist.group.WORLD._device_types}
    finally:
        dist.destroy_process_group()


def test_a_blocking_collective_ends_in_the_wait_that_can_be_replaced(tmp_path: Path) -> None:
    calls: list[object] = []
    original = dist.Work.wait
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    dist.Work.wait = lambda self, *args: (calls.append(self), original(self, *args))[1]
    try:
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    finally:
        dist.Work.wait = original
        dist.destroy_process_group()
    assert len(calls) == 3


def test_dynamo_is_kept_out_of_a_function_and_of_what_it_calls_by_names_that_torch_has() -> None:
    from torch._C._dynamo import eval_frame

    assert eval_frame.get_eval_frame_callback() is None
    assert eval_frame.set_eval_frame(None) is None
    assert {"SKIP", "DEFAULT"} <= set(dir(eval_frame._FrameAction))
    assert "_torchdynamo_disable" in inspect.getsource(torch._dynamo.decorators)


def test_unscaling_leaves_the_versions_of_gradients_as_they_were() -> None:
    """Else what GradScaler does would pass for the loop's own writing to gradients."""
    for fused in (False, True):
        layer = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(layer(torch.ones(1, 3)).sum()).backward()
        left = [(id(one.grad), one.grad._version) for one in layer.parameters()]
        seen: list[Any] = []
        optimizer.register_step_pre_hook(
            lambda *_, of=layer, into=seen: into.extend((id(one.grad), one.grad._version) for one in of.parameters())
        )
        scaler.step(optimizer)
        assert seen == left


def test_inside_a_backward_a_hook_of_a_parameter_knows_that_it_is() -> None:
    weight = nn.Parameter(torch.ones(2))
    seen: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    weight.sum().backward()
    assert seen[0] != -1
    assert torch._C._current_graph_task_id() == -1


def test_a_tensor_made_of_others_says_of_which_and_is_made_again_from_them() -> None:
    pair = TwoTensor(torch.zeros(2), torch.ones(2))
    assert is_traceable_wrapper_subclass(pair)
    assert not is_traceable_wrapper_subclass(nn.Parameter(torch.zeros(2)))
    names, context = pair.__tensor_flatten__()
    parts = {name: getattr(pair, name) for name in names}
    again = TwoTensor.__tensor_unflatten__(parts, context, pair.shape, pair.stride())
    assert all(getattr(again, name) is part for name, part in parts.items())
