"""The private names of torch and Triton: where they may be used, and what is lost if one goes.

`gradilocks._torch` lists them. Each has a test here that takes it away and shows that the fallback
gives the same result; or, where there is none, that says what breaks. A name without a test, and a
name used in another file, fail.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import math
import re
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import gradilocks
from gradilocks import _torch
from gradilocks.errors import GradilocksError

SOURCE = Path(_torch.__file__).parent
NEEDS_CUDA = {
    "torch._C._cuda_getDevice",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._cuda_isCurrentStreamCapturing",
}


def without(path: str, monkeypatch):
    """`gradilocks._torch` as it is on a torch that has nothing at this dotted name."""
    module, _, name = path.rpartition(".")
    spec = importlib.util.spec_from_file_location("torch_names_without_one", _torch.__file__)
    made = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:  # torch itself needs the name again.
        patch.delattr(importlib.import_module(module), name, raising=path not in NEEDS_CUDA)
        spec.loader.exec_module(made)
    return made


class Lacking:
    """Something of torch's that has no attribute of one name."""

    def __init__(self, inner, name):
        self.__dict__.update(inner=inner, name=name)

    def __getattr__(self, name):
        if name == self.name:
            raise AttributeError(name)
        return getattr(self.inner, name)


def lists():
    return [torch.tensor([3.0, -4.0]), torch.tensor([[0.5], [-2.0]]), torch.tensor(7.0)]


# --- names that are looked up at import -----------------------------------------------------------


def tensor_base(torch_, lost):
    tensor = torch.zeros(3, requires_grad=True)
    tensor.grad = torch.ones(3)
    assert lost.TensorBase.data_ptr(tensor) == torch_.TensorBase.data_ptr(tensor)
    assert lost.TensorBase.grad.__get__(tensor) is torch_.TensorBase.grad.__get__(tensor)


def guards(torch_, lost):
    tensors = [torch.zeros(2, 3), torch.zeros(4)]
    assert torch_.tensor_guards(tensors).check(*tensors)
    assert not torch_.tensor_guards(tensors).check(torch.zeros(3, 2), tensors[1])
    assert lost.tensor_guards(tensors) is None  # Then the step compares by itself.


def in_place(name, *args):
    def check(torch_, lost):
        one, other = lists(), lists()
        getattr(torch_, name)(one, *args)
        getattr(lost, name)(other, *args)
        assert all(map(torch.equal, one, other))
        assert not all(map(torch.equal, one, lists()))

    return check


def norms(torch_, lost):
    for dtype in (None, torch.float64):
        found = torch.stack(lost.norms(lists(), 2.0, dtype=dtype))
        torch.testing.assert_close(torch.stack(torch_.norms(lists(), 2.0, dtype=dtype)), found)
    assert [norm.item() for norm in lost.norms(lists())] == pytest.approx([5.0, math.sqrt(4.25), 7])


def unscale(torch_, lost):
    for planted in (1.0, math.inf, math.nan):
        told = []
        for way in (torch_, lost):
            tensors, flag = lists(), torch.zeros(())
            tensors[1][0] = planted
            way.unscale_and_check_(tensors, flag, torch.full((), 0.25))
            told.append((flag.item(), str(tensors)))
        assert told[0] == told[1]
        assert told[0][0] == (0.0 if planted == 1.0 else 1.0)


def has_foreach(torch_, lost):
    for kind in ("cpu", "cuda", "xpu", "meta", "mps"):
        device = torch.device(kind)
        assert lost.has_foreach(device) == torch_.has_foreach(device), kind


def fused_sgd(torch_, lost):
    assert torch_.fused_sgd_ is torch._fused_sgd_
    assert lost.fused_sgd_ is None  # Then no SGD calls it, and nothing is to be mended.


def norm_classes(torch_, lost):
    kept = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2)]
    for module in [*kept, nn.LazyBatchNorm2d(), nn.LayerNorm(2), nn.Linear(2, 2)]:
        expected = isinstance(module, torch_.NORMS_WITH_STATISTICS)
        assert isinstance(module, lost.NORMS_WITH_STATISTICS) == expected
    assert isinstance(kept[0], torch_.NORMS_WITH_STATISTICS)


def graph_task(torch_, lost):
    told = []
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(lambda _: told.append((torch_.in_backward(), lost.in_backward())))
    y.backward()
    torch.autograd.grad((x * 3).sum(), x)
    assert told == [(True, True)]
    assert (torch_.in_backward(), lost.in_backward()) == (False, False)


def functorch_tensor(torch_, lost):
    told = []

    def asked(tensor):
        told.append((torch_.is_functorch_tensor(tensor), lost.is_functorch_tensor(tensor)))
        return tensor

    torch.vmap(asked)(torch.ones(2, 3))
    asked(torch.ones(2))
    assert told == [(True, True), (False, False)]


def transforms(torch_, lost):
    told = []
    torch.func.grad(lambda x: (told.append(torch_.are_transforms_active()), x)[1])(torch.ones(()))
    assert told == [True]
    assert not torch_.are_transforms_active()
    assert lost.are_transforms_active()  # It may be: the slower way, which serves everywhere.
    plain, slow = _rounded(), _rounded(are_transforms_active=lost.are_transforms_active)
    assert all(map(torch.equal, plain, slow))


def _rounded(**replaced):
    """A product and its gradient in bfloat16, with functions of `_torch` replaced."""
    rounding = importlib.import_module("gradilocks.lab.emulate.rounding")
    x = torch.linspace(0.1, 1.7, 12).view(3, 4).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in replaced.items():
            patch.setattr(rounding, name, function)
        with gradilocks.emulate("bf16"):
            loss = (x @ x.t()).sum()
        loss.backward()
    return loss.detach(), x.grad


def autocast(torch_, lost):
    assert not torch_.is_autocast_enabled()
    assert not lost.is_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch_.is_autocast_enabled()
        assert lost.is_autocast_enabled()


class Seeing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return "seen"


def modes_counted(torch_, lost):
    with Seeing():
        assert torch_.function_modes() == 1
        assert lost.function_modes() == 0  # Then nobody notices that one has gone.


def modes_back(torch_, lost):
    one = torch.ones(())
    with Seeing(), torch_.unseen_by_modes():
        assert one + one != "seen"
        with torch_.seen_by_function_modes():
            assert one + one == "seen"
        with lost.seen_by_function_modes():
            assert one + one != "seen"  # Then a replay is not emulated, say.


def versions_kept(torch_, lost):
    tensor = torch.ones(2)
    with torch_.same_version(tensor):
        tensor.add_(1)
    assert tensor._version == 0
    with lost.same_version(tensor):
        tensor.add_(1)
    assert tensor._version == 1  # Then a backward pass that is still to come may refuse.


def flattened(torch_, lost):
    tensors = [torch.ones(2, 3).t(), torch.zeros(()), torch.full((1, 2), 4.0)]
    for way in (torch_, lost):
        assert way.flattened(tensors).tolist() == [1.0] * 6 + [0.0] + [4.0] * 2
        assert way.flattened(tensors[:1]).tolist() == [1.0] * 6


def without_gradients(torch_, lost):
    for way in (torch_, lost):
        for before in (True, False):
            with torch.set_grad_enabled(before):
                with way.unseen_by_modes():
                    assert not torch.is_grad_enabled()
                assert torch.is_grad_enabled() is before


def hidden(torch_, lost):
    """Nothing is hidden without the name, and what is done inside comes out the same."""
    from torch.utils.flop_counter import FlopCounterMode

    for way in (torch_, lost):
        with way.unseen_by_modes():
            assert torch.ones(2).sum() == 2.0
    with FlopCounterMode(display=False) as counter, torch_.unseen_by_modes():
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).sum() == 8.0
    assert counter.get_total_flops() == 0


def modes(torch_, lost):
    """Without the name nothing is seen; process groups refuse to meet all the same."""
    for way, expected in ((torch_, 1), (lost, 0)):
        seen = []

        class Mode(way.DispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, seen=seen):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Mode():
            torch.ones(2)
        assert len(seen) == expected


def disabled(torch_, lost):
    """A wrapper does the same, at the price of a call; the public one imports the compiler."""
    seen = []

    def inside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    for module in (torch_, lost):

        def looks(x):
            seen.append(torch.compiler.is_compiling())
            return inside(2 * x)

        left = module.uncompiled(looks)
        traced = torch.compile(lambda x, left=left: left(x * 2), backend="eager")
        assert traced(torch.tensor(3.0)).item() == 13.0
        assert left(3) == 7
    assert seen == [False] * 8


def hooks_of_all(torch_, lost):
    """Somebody may be listening, so a step goes the way on which he would be called."""
    optimizer = gradilocks.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not torch_.has_step_hooks(optimizer)
    assert lost.has_step_hooks(optimizer)


def profiler(torch_, lost):
    assert not torch_.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_.is_profiling()
    assert lost.is_profiling()  # It may be, so a step goes the way that a profile shows.


def fresh_state(torch_, lost):
    assert lost.new_scaler_state() == torch_.new_scaler_state()
    assert lost.new_scaler_state()["stage"] is torch.amp.grad_scaler.OptState.READY


def device_index(torch_, lost):
    assert lost.current_device is torch.cuda.current_device
    if torch.cuda.is_available():
        assert torch_.current_device() == lost.current_device()


def capture(torch_, lost):
    assert lost.is_capturing is torch.cuda.is_current_stream_capturing
    if torch.cuda.is_available():
        assert not torch_.is_capturing()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert torch_.is_capturing()
            assert lost.is_capturing()


def raw_stream(torch_, lost):
    if torch.cuda.is_available():
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch_.current_stream(0) == lost.current_stream(0)
    else:  # Only who has tensors on a GPU asks; what would answer is torch's public function.
        assert lost.current_stream.__code__.co_names[1:] == (
            "cuda",
            "current_stream",
            "cuda_stream",
        )


@contextlib.contextmanager
def nobody_watching():
    """torch's clip functions as in a fresh process; afterwards as they were.

    Whoever watches them first does so for the whole process: a test that watches would take the
    place of every control that comes after it.
    """
    clip = importlib.import_module("torch.nn.utils.clip_grad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "_group_tensors_by_device_and_dtype", _torch._sorts_gradients)
        yield patch


def clips(torch_, lost):
    """Without the name nobody is told, and torch's functions go on as they are."""
    clip, told = importlib.import_module("torch.nn.utils.clip_grad"), []
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), 3.0)
    with nobody_watching():
        lost.watch_clips(lambda *args: told.append(args))
        clip.clip_grad_norm_([param], 1.0)
        assert told == []
        torch_.watch_clips(lambda *args: told.append(args))
        clip.clip_grad_norm_([param], 0.5)
        clip.clip_grad_value_([param], 0.25)
    (one, gradients, limit), (other, *_, value) = told
    assert (one, limit) == ("torch.nn.utils.clip_grad_norm_", 0.5)
    assert (other, value) == ("torch.nn.utils.clip_grad_value_", 0.25)
    assert gradients == [param.grad]


def jit_tracing(torch_, lost):
    seen = []

    def looks(x):
        seen.extend((torch_.is_jit_tracing(), lost.is_jit_tracing()))
        return x + 1

    looks(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(looks, (torch.ones(1),), check_trace=False)
    assert seen == [False, False, True, True]


FOUND = {
    "torch._C.TensorBase": tensor_base,
    "torch.autograd._unsafe_preserve_version_counter": versions_kept,
    "torch._C._dynamo.guards.TensorGuards": guards,
    "torch._foreach_mul_": in_place("mul_", 0.3),
    "torch._foreach_sub_": in_place("sub_", [torch.ones(2), torch.ones(2, 1), torch.ones(())]),
    "torch._foreach_clamp_min_": in_place("clamp_min_", -1.5),
    "torch._foreach_clamp_max_": in_place("clamp_max_", 1.5),
    "torch._foreach_norm": norms,
    "torch._utils._flatten_dense_tensors": flattened,
    "torch._amp_foreach_non_finite_check_and_unscale_": unscale,
    "torch._fused_sgd_": fused_sgd,
    "torch.utils._foreach_utils._device_has_foreach_support": has_foreach,
    "torch.nn.modules.batchnorm._NormBase": norm_classes,
    "torch._C._current_graph_task_id": graph_task,
    "torch._C._functorch.is_functorch_wrapped_tensor": functorch_tensor,
    "torch._C._are_functorch_transforms_active": transforms,
    "torch._C._is_tracing": jit_tracing,
    "torch._C._is_any_autocast_enabled": autocast,
    "torch._C.DisableTorchFunction": hidden,
    "torch._C._len_torch_dispatch_stack": hidden,
    "torch._C._len_torch_function_stack": modes_counted,
    "torch._C._EnableTorchFunction": modes_back,
    "torch.utils._python_dispatch._disable_current_modes": hidden,
    "torch.utils._python_dispatch.TorchDispatchMode": modes,
    "torch._C._set_grad_enabled": without_gradients,
    "torch._compile._disable_dynamo": disabled,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": disabled,
    "torch._C._dynamo.eval_frame._FrameExecStrategy": disabled,
    "torch._C._dynamo.eval_frame._FrameAction": disabled,
    "torch.optim.optimizer._global_optimizer_pre_hooks": hooks_of_all,
    "torch.optim.optimizer._global_optimizer_post_hooks": hooks_of_all,
    "torch._C._autograd._profiler_enabled": profiler,
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": clips,
    "torch.amp.grad_scaler._refresh_per_optimizer_state": fresh_state,
    "torch._C._cuda_getDevice": device_index,
    "torch._C._cuda_getCurrentRawStream": raw_stream,
    "torch._C._cuda_isCurrentStreamCapturing": capture,
}


def test_every_name_that_is_looked_up_has_a_test():
    assert list(FOUND) == _torch.FOUND_NAMES


@pytest.mark.parametrize("path", FOUND)
def test_a_torch_without_the_name_gives_the_same_result(path, monkeypatch):
    module, _, name = path.rpartition(".")
    there = hasattr(importlib.import_module(module), name)
    assert there or path in NEEDS_CUDA, f"{path} is gone: its fallback serves, which is slower"
    FOUND[path](_torch, without(path, monkeypatch))


# --- attributes of torch's objects ----------------------------------------------------------------


def sparse(function):
    def check():
        tensor = torch.tensor([1.0, 0.0, 3.0, 0.0]).to_sparse()
        read = getattr(_torch, function)
        name = "_values" if function == "sparse_values" else "_indices"
        assert torch.equal(read(tensor), read(Lacking(tensor, name)))
        assert read(tensor).data_ptr() == read(Lacking(tensor, name)).data_ptr()

    return check


def version():
    """No fallback: nothing else tells whether a gradient was cleared in place or is left over."""
    tensor = torch.zeros(2)
    before = _torch.version(tensor)
    tensor.zero_()
    assert _torch.version(tensor) == before + 1, "Tensor._version no longer counts writes"


def hook_table():
    """Without the name the empty table stays, and a hook that comes after a swap is lost."""
    seen = []
    for lacking in (False, True):
        param = nn.Parameter(torch.ones(2))
        param.register_hook(seen.append).remove()
        _torch.drop_empty_hooks(Lacking(param, "_backward_hooks") if lacking else param)
        assert param._backward_hooks == ({} if lacking else None)
        torch.utils.swap_tensors(param, nn.Parameter(torch.zeros(2)))
        param.register_hook(seen.append)
        param.sum().backward()
    assert len(seen) == 1


def late_hooks():
    param = nn.Parameter(torch.ones(2))
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert len(_torch.post_accumulate_hooks(param)) == 1
    assert not _torch.post_accumulate_hooks(Lacking(param, "_post_accumulate_grad_hooks"))


class _NodeWithout:
    """A tensor whose node of the graph has no attribute of one name."""

    def __init__(self, tensor, name):
        self.__dict__.update(tensor=tensor, grad_fn=Lacking(tensor.grad_fn, name))

    def __getattr__(self, name):
        return getattr(self.tensor, name)


def gradient_hooks():
    """Beside others, and after a change in place, as the public one."""
    for lacking in (False, True):
        seen, leaf = [], torch.ones(2, requires_grad=True)
        made = leaf * 2
        given = _NodeWithout(made, "_register_hook_dict") if lacking else made
        _torch.hook_gradient(given, seen.append)
        assert (-1 in made._backward_hooks) is not lacking
        _torch.hook_gradient(made, seen.append)  # There is one already.
        made.register_hook(lambda gradient: gradient * 10)
        made.mul_(5)
        (made * 3).sum().backward()
        assert [each.tolist() for each in seen] == [[15.0, 15.0]] * 2  # Of what it was before.
        assert leaf.grad.tolist() == [300.0, 300.0]


def buffers():
    module = nn.BatchNorm1d(2)
    module.register_buffer("nothing", None)
    lacking = Lacking(module, "_buffers")
    assert _torch.buffers_of(module).pop("nothing") is None
    there = {name: b for name, b in _torch.buffers_of(module).items() if b is not None}
    assert there == _torch.buffers_of(lacking)
    _torch.set_buffer(module, "running_mean", torch.ones(2))
    assert torch.equal(module.running_mean, torch.ones(2))
    _torch.set_buffer(lacking, "running_mean", torch.zeros(2))
    assert torch.equal(lacking.running_mean, torch.zeros(2))


def tables(function, name):
    def check():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module.register_parameter("own", nn.Parameter(torch.ones(1)))
        read = getattr(_torch, function)
        assert read(module)
        assert dict(read(Lacking(module, name))) == dict(read(module))
        assert read(nn.Linear.__new__(nn.Linear)) == {}  # Its constructor has not run.

    return check


def steps_noted():
    """No fallback: a schedule warns, as it does of any optimizer that it has not seen stepping."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _torch.note_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def steps_seen():
    """Without the name the control silences that warning, of all schedules, around each step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not _torch.sees_steps(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert _torch.sees_steps(optimizer), "torch marks its schedules' steps in another way"


def inner():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])
    assert list(_torch.inner_schedules(schedule)) == parts
    assert list(_torch.inner_schedules(Lacking(schedule, "_schedulers"))) == []
    assert schedule.optimizer is parts[0].optimizer  # So nobody is missed without the name.


def amp_flag():
    """No fallback: torch's GradScaler goes by it too."""
    params = [nn.Parameter(torch.ones(1))]
    flag = _torch.AMP_FLAG
    assert getattr(torch.optim.AdamW(params, fused=True), flag, False), "torch has another flag"
    assert not getattr(torch.optim.AdamW(params), flag, False)
    assert getattr(gradilocks.optim.AdamW(params), flag, False)


def hooks(name):
    def check():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        assert not _torch.has_step_hooks(optimizer)
        assert _torch.has_step_hooks(Lacking(optimizer, name))
        handle = getattr(optimizer, f"register{name[10:-1]}")(lambda *_: None)
        assert _torch.has_step_hooks(optimizer)
        handle.remove()
        assert not _torch.has_step_hooks(optimizer)

    return check


def flattened():
    """Without the mark a shard of FSDP1 counts as a plain tensor; a control needs to be told."""
    param = nn.Parameter(torch.ones(1))
    assert not _torch.is_flattened(param)
    param._fsdp_flattened = True
    assert _torch.is_flattened(param)
    assert "_fsdp_flattened" in _source_of("torch.distributed.fsdp._flat_param"), (
        "FSDP1 marks its shards in another way"
    )


def joined():
    """Without the mark a control that records waits for ranks that have left a `join()`."""

    model = nn.Linear(1, 1)
    model._join_config = types.SimpleNamespace(enable=True)
    assert _torch.is_joining(model)
    assert not _torch.is_joining(nn.Linear(1, 1))
    assert "_join_config" in _source_of("torch.distributed.algorithms.join"), (
        "torch marks a join() in another way"
    )


def inference():
    def _backward_metadata_inference(call):
        return call()

    assert not _torch.infers_metadata()
    assert _backward_metadata_inference(_torch.infers_metadata)
    assert _backward_metadata_inference(lambda: [_torch.infers_metadata()][0])
    assert "def _backward_metadata_inference" in _source_of("torch.distributed.pipelining.stage"), (
        "a pipeline learns of shapes in another way: does it call the loss function?"
    )


def local_elements():
    class Distributed:
        _local_tensor = torch.ones(2)

    assert _torch.local_tensor(Distributed()) is Distributed._local_tensor
    assert _torch.local_tensor(object()) is None  # Then `to_local()` has them, more slowly.
    Distributed._local_tensor = nn.Parameter(torch.ones(2))  # No plain tensor: neither is what is
    assert _torch.local_tensor(Distributed()) is None  # still on its way.
    assert "_local_tensor" in _source_of("torch.distributed.tensor._api"), (
        "DTensors keep their elements under another name"
    )
    local, spec, *told = _torch.DTENSOR_PARTS
    assert f'__slots__ = ["{local}", "{spec}"]' in _source_of("torch.distributed.tensor._api"), (
        "DTensors keep their parts elsewhere: Python walks over them"
    )
    specs = _source_of("torch.distributed.tensor._dtensor_spec")
    assert all(f"    {name}: " in specs for name in told), "and so if specs name theirs otherwise"


def _source_of(module):
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is gone"
    return Path(spec.origin).read_text()


def compiled_in_place():
    """Without the name the calls of a module that is compiled in place are not seen."""
    model = nn.Linear(1, 1)
    assert _torch.compiled_call(model) is None
    model.compile(backend="eager")
    made = _torch.compiled_call(model)
    assert made is not None
    _torch.set_compiled_call(model, lambda *args: ("called with", *args))
    assert model(3) == ("called with", 3)
    assert _torch.compiled_call(copy.deepcopy(model)) is None


def kinds():
    class Group:
        _device_types = (torch.device("cpu"), torch.device("cuda"))

    assert _torch.device_kinds(Group()) == ["cpu", "cuda"]
    assert _torch.device_kinds(object()) == []  # Then every device is taken to be reached.


def formats_of_a_node():
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    node = (weight * 2).grad_fn
    assert _torch.output_dtypes(node) == [torch.bfloat16]
    assert _torch.output_dtypes(Lacking(node, "_input_metadata")) == []  # Then nobody knows.


def groups_joined():
    world = importlib.import_module("torch.distributed.distributed_c10d")._world
    assert _torch.groups_joined() == len(world.pg_names)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("torch.distributed.distributed_c10d._world")
        assert _torch.groups_joined() == 0  # Then ranks in unequal numbers of groups may wait.
        # Then ranks under `run` tell each other nothing, nor those under DDP what they load.
        assert _torch.default_store() is None


def default_group():
    dist = importlib.import_module("torch.distributed.distributed_c10d")
    layout = importlib.import_module("gradilocks.ranks.layout")
    assert _torch.default_group(dist) is None
    with pytest.MonkeyPatch.context() as patch:  # Then torch's own function is asked.
        patch.setattr(dist, "_world", types.SimpleNamespace())
        asked = []
        patch.setattr(dist, "is_initialized", lambda: asked.append(True))
        assert not layout.has_other_ranks()
        assert asked


def root():
    """Without the name a control refuses at its first step what it refuses when it is made."""
    mesh = types.SimpleNamespace(_get_root_mesh=lambda: "the mesh of all ranks")
    assert _torch.root_mesh(mesh) == "the mesh of all ranks"
    source = _source_of("torch.distributed.device_mesh")
    assert "_get_root_mesh" in source or "_mesh_resources" in source, "slices forget their mesh"


def root_before():
    """How torch before 2.9 knew it."""
    name = "torch.distributed.device_mesh._mesh_resources"
    importlib.import_module("torch.distributed.device_mesh")
    with pytest.MonkeyPatch.context() as patch:
        known = types.SimpleNamespace(get_root_mesh=lambda mesh: ("of all ranks", mesh))
        patch.setattr(name, known, raising=False)
        assert _torch.root_mesh("slice") == ("of all ranks", "slice")
        patch.delattr(name)
        assert _torch.root_mesh("slice") == "slice"


def fsdps_norm():
    """Without the name a clip by an FSDP1 model is not noticed, and is what it was."""
    place = "torch.distributed.fsdp.fully_sharded_data_parallel"
    fsdp, told = importlib.import_module(place), []
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([3.0, 4.0])
    given = [param], 2.0, torch.zeros(()), torch.device("cpu")
    with nobody_watching() as patch:
        real = fsdp._get_grad_norm
        patch.setattr(fsdp, "_get_grad_norm", getattr(real, "__wrapped__", real))
        _torch.watch_clips(lambda *args: told.append(args))
        assert fsdp._get_grad_norm(*given).item() == 5.0
        patch.delattr(fsdp, "_get_grad_norm")
        _torch.watch_clips(lambda *args: told.append(args))
    ((name, gradients, _),) = told
    assert name == "FullyShardedDataParallel.clip_grad_norm_"
    assert gradients == [param.grad]


def first_of_a_step():
    """Without the name torch's step on an adopted optimizer is not refused, and is torch's."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        param = nn.Parameter(torch.ones(2))
        optimizer = kind([param], lr=0.1)
        held = optimizer.step
        param.grad = torch.ones(2)
        gradilocks.optim.adopt(optimizer)
        with pytest.raises(RuntimeError, match="torch's step was called"):
            held()
        assert param.tolist() == [1.0, 1.0]


INSTANCE = {
    "_backward_hooks": hook_table,
    "_backward_metadata_inference": inference,
    "_buffers": buffers,
    "_compiled_call_impl": compiled_in_place,
    "_default_pg": default_group,
    "_device_types": kinds,
    "_fsdp_flattened": flattened,
    "_get_grad_norm": fsdps_norm,
    "_get_root_mesh": root,
    "_indices": sparse("sparse_indices"),
    "_init_group": first_of_a_step,
    "_input_metadata": formats_of_a_node,
    "_join_config": joined,
    "_local_tensor": local_elements,
    "_mesh_resources": root_before,
    "_modules": tables("children_of", "_modules"),
    "_opt_called": steps_noted,
    "_optimizer_step_post_hooks": hooks("_optimizer_step_post_hooks"),
    "_optimizer_step_pre_hooks": hooks("_optimizer_step_pre_hooks"),
    "_parameters": tables("parameters_in", "_parameters"),
    "_post_accumulate_grad_hooks": late_hooks,
    "_register_hook_dict": gradient_hooks,
    "_schedulers": inner,
    "_spec": local_elements,
    "_step_supports_amp_scaling": amp_flag,
    "_values": sparse("sparse_values"),
    "_version": version,
    "_world": groups_joined,
    "_wrapped_by_lr_sched": steps_seen,
}


def test_every_attribute_has_a_test():
    assert tuple(INSTANCE) == _torch.INSTANCE_NAMES


@pytest.mark.parametrize("name", INSTANCE)
def test_an_attribute_of_torchs_objects_is_there_or_is_done_without(name):
    INSTANCE[name]()


def test_a_test_that_watches_clips_does_not_watch_them_ever_after():
    clip = importlib.import_module("torch.nn.utils.clip_grad")
    with nobody_watching():
        fsdps_norm()
        assert clip._group_tensors_by_device_and_dtype is _torch._sorts_gradients


def test_an_audit_without_the_late_hooks_refuses_a_step_inside_backward(monkeypatch):
    unchanged = importlib.import_module("gradilocks.lab.unchanged")
    monkeypatch.setattr(unchanged, "post_accumulate_hooks", lambda param: {})
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(GradilocksError, match="was changed while"):
        gradilocks.audit(model, lambda m, batch: m(batch).sum(), [torch.ones(3, 2)])


def test_step_is_found_without_torchs_hooks_around_it():
    step = torch.optim.SGD.step
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # torch wraps it at the first one.
    assert _torch.unhooked(torch.optim.SGD.step).__name__ == "step"
    assert _torch.unhooked(_torch.unhooked(step)) is _torch.unhooked(step)


@pytest.mark.parametrize("name", _torch.SCALER_ATTRIBUTES)
def test_torchs_scaler_has_what_our_subclass_and_frameworks_build_on(name):
    """No fallback: our GradScaler is torch's, with some of these replaced."""
    assert hasattr(torch.amp.GradScaler("cpu"), name), (
        f"torch's GradScaler has no {name}: dropin/ reads or replaces it and must follow torch"
    )


def test_torchs_scaler_has_no_private_name_that_is_not_listed():
    private = {n for n in dir(torch.amp.GradScaler("cpu")) if n[0] == "_" and n[:2] != "__"}
    assert private == set(_torch.SCALER_ATTRIBUTES)


def test_a_scaler_tells_its_scale_and_what_it_knows_of_an_optimizer():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert _torch.scale_of(scaler) is None
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    assert _torch.scale_of(scaler).item() == 8.0
    assert _torch.scaler_state(scaler, optimizer)["stage"] is _torch.OptState.READY
    scaler.unscale_(optimizer)
    assert _torch.scaler_state(scaler, optimizer)["stage"] is _torch.OptState.UNSCALED
    assert _torch.scale_of(object()) is None


def test_checkpointing_is_made_by_the_function_that_emulate_stands_in_for():
    """Without it, what a checkpoint computes again inside emulate is not emulated."""
    assert _torch.CHECKPOINT_GENERATOR in _source_of("torch.utils.checkpoint")
    assert _torch.CHECKPOINT_GENERATOR in _source_of(_torch.COMPOSABLE_CHECKPOINT)


def test_the_wrapper_of_a_checkpointed_module_is_a_class_of_that_module():
    """Without it, a checkpointed module's parameters keep the wrapper's part in their names."""
    assert "class ActivationWrapper" in _source_of(_torch.CHECKPOINT_WRAPPER)
    assert "_checkpoint_wrapped_module" in _source_of(_torch.CHECKPOINT_WRAPPER)


def test_the_compiler_is_a_module_of_that_name():
    assert importlib.util.find_spec(_torch.DYNAMO) is not None


@pytest.mark.parametrize("name", [*_torch.TRITON_NAMES, "run", "function"])
def test_triton_has_what_a_launch_without_a_search_needs(name):
    """Without `warmup` no kernel is compiled, and plain torch serves; without the others, or in
    another order, each launch is searched for (`tests/kernels/test_launcher_order.py`)."""
    pytest.importorskip("triton", reason="Triton is not installed, so nothing is launched")
    sources = _source_of("triton.runtime.jit") + _source_of("triton.compiler.compiler")
    assert re.search(rf"\b{name}\b", sources), f"Triton has no {name} any more"


# --- nowhere else ---------------------------------------------------------------------------------

FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "_torch.py")
# Of Python: named tuples, and these two functions.
PYTHONS = {"_asdict", "_replace", "_fields", "_make", "_exit", "_getframe"}
ASKING = {
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "attrgetter",
    "getattr_static",
    "methodcaller",
}
# Keys of the state_dict of a GradScaler and of a schedule, which torch's files on disk have.
STATE_KEYS = {"_growth_tracker", "_schedulers"}
# What the package calls an object of its own, where a private name of ours is the same as torch's.
OUR_OBJECTS = {"self", "cls", "control", "made", "super()"}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _trees():
    return {path: ast.parse(path.read_text()) for path in FILES}


def _given(trees) -> set[str]:
    """The private names that classes of this package give their objects."""
    names = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    names |= {getattr(part, "name", "")}
                    targets = getattr(part, "targets", [getattr(part, "target", None)])
                    names |= {each.id for each in targets if isinstance(each, ast.Name)}
    return {name for name in names if _private(name)}


def _torchs_classes(trees) -> set[str]:
    """The package's classes that inherit from one of torch's."""
    bases = {
        node.name: {ast.unparse(base).partition("[")[0] for base in node.bases}
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {name for name, of in bases.items() if any(b.startswith(("torch.", "nn.")) for b in of)}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def _imported(tree) -> set[str]:
    """The names that a file has from torch or Triton."""
    names = set()
    for node in ast.walk(tree):
        module = getattr(node, "module", None) or ""
        for alias in getattr(node, "names", []) if hasattr(node, "names") else []:
            if isinstance(alias, ast.alias):
                whole = f"{module}.{alias.name}" if module else alias.name
                if whole.split(".")[0] in ("torch", "triton"):
                    names.add((alias.asname or alias.name).split(".")[0])
    return names


def uses(path, tree, given, torchs_classes) -> list[str]:
    """Where a file uses a private name of torch or Triton.

    1. It imports a name, or from a module, with a leading underscore in torch or Triton.
    2. It reads a private attribute off something that it imported from there.
    3. It reads a private attribute that neither Python nor a class of this package gives anything.
    4. It reads one that is listed in `_torch`, off anything that is not an object of our own. In
       a class that inherits from torch's, `self` is torch's. A scaler's are free in `dropin/`.
    5. It names one of these as a string, for `getattr`, `x.__dict__`, `vars(x)` or whatever else,
       or a private module of torch.
    """
    listed = {*_torch.INSTANCE_NAMES, *_torch.TRITON_NAMES}
    listed |= set() if path.parent.name == "dropin" else set(_torch.SCALER_ATTRIBUTES)
    scalers = set(_torch.SCALER_ATTRIBUTES) if path.parent.name == "dropin" else set()
    imported, found = _imported(tree), []
    inherited = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in torchs_classes
        for inside in ast.walk(node)
    }
    for node in ast.walk(tree):
        told = None
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                whole = f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".").split(".")
                if whole[0] in ("torch", "triton") and any(map(_private, whole)):
                    told = ".".join(whole)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            root = owner.split(".")[0].split("(")[0]
            ours = OUR_OBJECTS - ({"self", "cls", "super()"} if id(node) in inherited else set())
            if node.attr in scalers:
                continue
            if node.attr in listed and owner not in ours:
                told = f"{owner}.{node.attr}"
            elif _private(node.attr) and node.attr not in PYTHONS:
                foreign = root in imported and owner not in OUR_OBJECTS
                told = f"{owner}.{node.attr}" if foreign or node.attr not in given else None
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).split(".")[-1]
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            words = [word for word in words if isinstance(word, str)]
            ours = bool(node.args) and ast.unparse(node.args[0]) in OUR_OBJECTS
            if function in ASKING and not ours:
                told = next((word for word in words if word in listed), None)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.startswith(("torch._", "triton._")) and " " not in node.value
            # Any use: `x.__dict__` may have a variable of its own before a name is looked up there.
            attribute = _private(node.value) and node.value in listed - STATE_KEYS
            told = node.value if module or attribute else None
        if told is not None:
            found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {told}")
    return found


def test_no_other_file_uses_a_private_name_of_torch_or_triton():
    trees = _trees()
    given, torchs_classes = _given(trees), _torchs_classes(trees)
    found = [use for path, tree in trees.items() for use in uses(path, tree, given, torchs_classes)]
    way_out = "put it into gradilocks/_torch.py, with a fallback and a test"
    assert not found, "\n".join([way_out, *found])


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import _x",
        "import torch._dynamo",
        "torch._foreach_add_([], 1)",
        "torch._C._cuda_getDevice()",
        "version = grad._version",
        "grads = [param.grad._values() for param in params]",
        "scale = scaler._scale",
        "getattr(optimizer, '_step_supports_amp_scaling', False)",
        "optimizer._never_heard_of",
        "sys.modules['torch._dynamo']",
        "kernel.warmup()",
        "x.__dict__.get('_parameters')",
        "vars(x)['_parameters']",
        "vars(x).pop('_modules')",
        "x.__dict__['_backward_hooks']",
        "del x.__dict__['_backward_hooks']",
        "fields = x.__dict__\nfields.get('_parameters')",
        "class Ours(torch.optim.SGD):\n    def f(self):\n        self._opt_called = True",
        "class Ours(torch.optim.SGD):\n    def f(self):\n        return self._buffers",
    ],
)
def test_the_search_finds(line):
    tree = ast.parse(f"import torch\nimport triton\n{line}")
    assert uses(SOURCE / "step" / "x.py", tree, _given(_trees()), _torchs_classes({0: tree}))


@pytest.mark.parametrize(
    "line",
    ["self._held", "self._version", "control._schedules", "row._asdict()", "sys._getframe(1)"],
)
def test_the_search_leaves_alone_what_is_ours_or_pythons(line):
    body = f"self._held = self._version = {line}"
    tree = ast.parse(f"import torch\nclass Ours:\n    def f(self):\n        {body}")
    trees = {**_trees(), SOURCE / "step" / "x.py": tree}
    assert not uses(SOURCE / "step" / "x.py", tree, _given(trees), _torchs_classes(trees))


def test_a_script_function_that_counts_no_frames_is_called_as_it_is():
    def script(obj, optimize=None):
        return obj, optimize

    assert _torch.script_for_caller(script, 3, optimize=4) == (3, 4)
