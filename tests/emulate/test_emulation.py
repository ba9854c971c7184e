"""The context: what is inside, what is refused, and that torch is as it was afterwards."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

import gradilocks
from gradilocks.errors import GradilocksError
from gradilocks.lab.emulate import rounding

ODD = torch.tensor([[1.0001]])
"""Not a value of fp16, bf16 or fp8."""


def stored(value: torch.Tensor | None = None) -> float:
    """What a product stores of a number."""
    return torch.mm(ODD if value is None else value, torch.ones(1, 1)).item()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def test_inside_it_is_stored_and_outside_it_is_not():
    assert stored() == ODD.item()
    with gradilocks.emulate(torch.float16):
        assert stored() == 1.0
    assert stored() == ODD.item()


@pytest.mark.parametrize(
    "name", [torch.float16, "fp16", "float16", "torch.float16", "half", "FP16"]
)
def test_a_format_has_torchs_name_and_its_short_one(name):
    assert gradilocks.emulate(name).format.name == "fp16"


@pytest.mark.parametrize("name", ["fp17", "int8", torch.int8, torch.float64, "", None, 16])
def test_an_unknown_format_is_refused_in_a_line_with_those_that_are_known(name):
    with pytest.raises(ValueError, match="format") as caught:
        gradilocks.emulate(name)
    text = str(caught.value)
    assert "\n" not in text
    assert "format" in text
    assert str(name) in text
    assert "fp16" in text
    with pytest.raises(ValueError, match="backward"):
        gradilocks.emulate("fp16", backward=name if name is not None else "nothing")


def test_the_backward_pass_is_stored_wherever_it_is_called():
    found = []
    for inside in (True, False):
        module = model()
        with gradilocks.emulate("fp16"):
            loss = module(torch.ones(4, 16)).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append(gradients(module))
    assert torch.equal(*found)
    assert torch.equal(found[0], found[0].half().float())


def test_of_several_the_innermost_counts():
    with gradilocks.emulate("fp16"):
        with gradilocks.emulate("fp32"):
            assert stored() == ODD.item()
            with gradilocks.emulate("fp8 e5m2"):
                assert stored(torch.tensor([[1.13]])) == 1.25
        assert stored(torch.tensor([[1.13]])) == torch.tensor(1.13).half().item()


def test_one_object_may_be_entered_again_and_inside_itself():
    emulation = gradilocks.emulate("fp16")
    for _ in range(2):
        with emulation, emulation:
            assert stored() == 1.0
        assert stored() == ODD.item()


def test_it_is_a_decorator_as_autocast_is():
    assert gradilocks.emulate("fp16")(stored)() == 1.0
    assert stored() == ODD.item()


def test_an_exception_passes_and_leaves_torch_as_it_was():
    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    before = [getattr(torch.utils.checkpoint, name) for name in names]
    module = model()
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        gradilocks.emulate("fp16", keep=[module[2]]),
    ):
        module(torch.ones(4, 15))
    assert stored() == ODD.item()
    assert [getattr(torch.utils.checkpoint, name) for name in names] == before
    assert not module[2]._forward_hooks
    assert not module[2]._forward_pre_hooks


def test_other_threads_are_not_concerned():
    found = []
    with gradilocks.emulate("fp16"):
        thread = threading.Thread(target=lambda: found.append(stored()))
        thread.start()
        thread.join()
    assert found == [ODD.item()]


def test_one_object_may_be_used_by_several_threads_at_once():
    decorated = gradilocks.emulate("fp16")(stored)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: decorated(), range(300)))
    assert found == [1.0] * 300


def test_an_emulation_is_copied_and_pickled():
    first = gradilocks.emulate("e4m3", backward="e5m2")
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert (other.format, other.backward) == (first.format, first.backward)
        with other:
            assert stored() == 1.0


def test_in_fp32_everything_passes_as_if_it_were_not_there():
    layer = nn.Linear(4, 4).bfloat16()
    with gradilocks.emulate("fp16"), gradilocks.emulate("fp32"):
        layer(torch.ones(1, 4, dtype=torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "formats",
    [("fp16",), ("bf16",), ("tf32",), ("e5m2",), ("e4m3",), ("fp4",), ("fp32", "fp16")],
    ids="-".join,
)
def test_results_may_be_written_into(formats):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 32),
    )
    with gradilocks.emulate(formats[0], backward=formats[-1]):
        result = module(torch.randn(2, 3, 4, 4))
        result += 1
        result[:, 0].mul_(2)
    result.sum().backward()
    assert module[0].weight.grad.count_nonzero()


class TestKeep:
    def test_modules_that_are_kept_stay_in_float32(self):
        module = model()
        inputs = torch.randn(4, 16)
        with gradilocks.emulate("fp16", keep=[module[2]]):
            result = module(inputs)
        with gradilocks.emulate("fp16"):
            hidden = module[:2](inputs)
        assert torch.equal(result, module[2](hidden))

    def test_what_is_inside_them_too(self):
        module = nn.Sequential(model(), nn.Linear(8, 8))
        inputs = torch.randn(4, 16)
        with gradilocks.emulate("fp16", keep=[module]):
            kept = module(inputs)
        assert torch.equal(kept, module(inputs))

    def test_an_error_inside_one_does_not_keep_the_rest(self):
        module = model()
        with gradilocks.emulate("fp16", keep=[module[0]]):
            with pytest.raises(RuntimeError):
                module(torch.ones(4, 15))
            assert stored() == 1.0

    @pytest.mark.parametrize(
        ("keep", "shown"),
        [
            (["head"], "'head'"),
            ("head", "'head'"),
            (3, "a int"),
            (nn.Linear, "a type"),
            (nn.Linear(2, 2).parameters(), "a Parameter"),
            (nn.Linear(2, 2).named_modules(), "a tuple"),
        ],
        ids=["list", "name", "number", "class", "parameters", "named"],
    )
    def test_something_else_than_a_module_is_refused(self, keep, shown):
        with pytest.raises(TypeError) as caught:
            gradilocks.emulate("fp16", keep=keep)
        text = str(caught.value)
        assert "\n" not in text
        assert f"keep must be modules, got {shown}" in text
        assert "get_submodule" in text

    def test_a_list_of_modules_that_is_never_called_itself_is_kept(self):
        layers, inputs = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(2, 4)
        with gradilocks.emulate("fp16", keep=layers):
            found = layers[1](layers[0](inputs))
        assert torch.equal(found, layers[1](layers[0](inputs)))

    def test_the_last_layer_of_an_attention_is_refused_with_the_way_out(self):
        attention = nn.MultiheadAttention(4, 1)
        with pytest.raises(ValueError, match=r"Keep the nn\.MultiheadAttention"):
            gradilocks.emulate("fp16", keep=attention.out_proj)

    def test_a_kept_module_of_another_thread_holds_only_that_one(self):
        layer, inside, seen = nn.Identity(), threading.Event(), threading.Event()

        class Waiting(nn.Module):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                inside.set()
                assert seen.wait(20)
                return inputs

        layer = Waiting()

        def other():
            with gradilocks.emulate("fp16", keep=layer):
                layer(ODD)

        with gradilocks.emulate("fp16", keep=layer):
            thread = threading.Thread(target=other)
            thread.start()
            assert inside.wait(20)
            found = stored()
            seen.set()
            thread.join()
        assert found == 1.0

    def test_a_module_may_be_copied_and_saved_meanwhile(self):
        module, inputs = model(), torch.randn(2, 16)
        with gradilocks.emulate("fp16", keep=module):
            copied = copy.deepcopy(module)
            torch.save(module, io.BytesIO())
        assert torch.equal(copied(inputs), module(inputs))

    def test_one_module_need_not_be_in_a_list(self):
        layer, inputs = nn.Linear(4, 4), torch.randn(2, 4)
        with gradilocks.emulate("fp16", keep=layer):
            kept = layer(inputs)
        assert torch.equal(kept, layer(inputs))


class TestAutocast:
    @pytest.mark.parametrize("device", ["cpu", "xpu"])
    def test_emulate_inside_autocast_is_refused_with_the_way_out(self, device):
        torch.set_autocast_enabled(device, True)
        try:
            with (
                pytest.raises(
                    GradilocksError, match=rf"autocast\('{device}'\).*leave autocast out"
                ),
                gradilocks.emulate("fp16"),
            ):
                pass
        finally:
            torch.set_autocast_enabled(device, False)

    def test_so_is_autocast_as_people_write_it(self):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(GradilocksError, match=r"autocast.*leave autocast out"),
            gradilocks.emulate("fp16"),
        ):
            pass

    def test_autocast_inside_emulate_is_refused_at_the_first_product(self):
        with (
            gradilocks.emulate("fp16"),
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(GradilocksError, match=r"autocast.*leave autocast out"),
        ):
            stored()

    def test_autocast_that_is_switched_off_is_no_matter(self):
        off = torch.autocast("cpu", enabled=False)
        with off, gradilocks.emulate("fp16"), off:
            assert stored() == 1.0


class TestTogetherWith:
    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpoint_computes_the_same_again(self, reentrant, inside):
        module, inputs = model(), torch.randn(4, 16)
        with gradilocks.emulate("fp16"):
            module(inputs).square().sum().backward()
        expected = gradients(module)
        module.zero_grad()
        with gradilocks.emulate("fp16"):
            loss = (
                torch.utils.checkpoint.checkpoint(
                    module, inputs.requires_grad_(), use_reentrant=reentrant
                )
                .square()
                .sum()
            )
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert torch.equal(gradients(module), expected)

    def test_a_checkpoint_inside_a_module_that_is_kept_is_kept_again(self):
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=False)

        module, inputs = Checkpointed(), torch.randn(4, 16)
        with gradilocks.emulate("fp16", keep=[module]):
            loss = module(inputs).square().sum()
        loss.backward()
        found = gradients(module)
        module.zero_grad()
        module.inner(inputs).square().sum().backward()
        assert torch.equal(found, gradients(module))

    def test_torch_func(self):
        module, inputs = model(), torch.randn(4, 16)
        parameters = {name: p.detach() for name, p in module.named_parameters()}

        def loss(values, row):
            return functional_call(module, values, (row,)).square().sum()

        with gradilocks.emulate("fp16"):
            module(inputs).square().sum().backward()
            whole = grad(loss)(parameters, inputs)
            rows = vmap(grad(loss), (None, 0))(parameters, inputs)
        for name, parameter in module.named_parameters():
            assert torch.equal(whole[name], parameter.grad)
            assert rows[name].shape == (4, *parameter.shape)
            assert torch.equal(rows[name], rows[name].half().float())

    @pytest.mark.filterwarnings("ignore:`torch.jit")  # Of torch's own forward mode.
    @pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "e5m2", "e4m3", "fp4"])
    def test_derivatives_of_every_kind_flow(self, name):
        """As many as without: rounding is the identity to them, whatever it is made of."""
        torch.manual_seed(0)
        weight, point = torch.randn(4, 4), torch.randn(4)

        def function(values):
            return torch.mv(weight, torch.mv(weight, values).tanh()).square().sum()

        def found():
            _, tangent = torch.func.jvp(function, (point,), (torch.ones(4),))
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(point.clone().requires_grad_(), torch.ones(4))
                other = forward_ad.unpack_dual(function(dual)).tangent
            return [
                tangent,
                other,
                torch.func.jacfwd(function)(point),
                torch.func.jacrev(function)(point),
                torch.func.hessian(function)(point),
                torch.func.jacrev(torch.func.jacrev(function))(point),
            ]

        with gradilocks.emulate(name):
            mine = found()
        coarse = name in ("e5m2", "e4m3", "fp4")
        for value, plain in zip(mine, found(), strict=True):
            apart = (value - plain).norm() / plain.norm()
            assert apart < (0.9 if coarse else 0.05)
            assert value.count_nonzero() > 0

    def test_a_gradient_of_a_gradient_is_stored_too(self):
        module, inputs = model(), torch.randn(4, 16, requires_grad=True)
        with gradilocks.emulate("fp16"):
            (first,) = torch.autograd.grad(module(inputs).square().sum(), inputs, create_graph=True)
            (first.square().sum() * 1e-6).backward()
        second = module[0].weight.grad
        assert second.count_nonzero() > 0
        lost = second.eq(0).float().mean()
        module.zero_grad()
        (first,) = torch.autograd.grad(module(inputs).square().sum(), inputs, create_graph=True)
        (first.square().sum() * 1e-6).backward()
        assert lost > module[0].weight.grad.eq(0).float().mean()

    def test_a_compiled_model_runs_as_it_was_written(self):
        module, inputs = model(), torch.randn(4, 16)
        compiled = torch.compile(module, backend="aot_eager")
        plain = compiled(inputs)
        with gradilocks.emulate("fp16"):
            eager = module(inputs)
            found = compiled(inputs)
        assert torch.equal(found, eager)
        assert not torch.equal(found, plain)
        assert torch.equal(compiled(inputs), plain)

    def test_threads_that_leave_in_another_order_leave_torch_as_it_was(self):
        calls = []

        def backend(graph, inputs):
            calls.append(graph)
            return graph.forward

        torch.compiler.reset()
        compiled = torch.compile(nn.Linear(2, 2), backend=backend)
        first, second = gradilocks.emulate("fp16"), gradilocks.emulate("bf16")
        entered, left = threading.Event(), threading.Event()

        def other():
            with second:
                entered.set()
                assert left.wait(20)

        thread = threading.Thread(target=other)
        with first:
            thread.start()
            assert entered.wait(20)
            compiled(torch.ones(1, 2))
        compiled(torch.ones(1, 2))
        assert not calls  # The other thread is still inside.
        left.set()
        thread.join()
        compiled(torch.ones(1, 2))
        assert calls

    def test_a_compiled_function_that_enters_it_is_refused_or_right(self):
        """torch decides whether it compiles a function with a context in it or gives up."""

        @torch.compile(backend="eager")
        def inside(values):
            with gradilocks.emulate("fp16"):
                return torch.mm(values, torch.ones(1, 1))

        try:
            found = inside(ODD).item()
        except GradilocksError as error:
            found = str(error)
        assert found == 1.0 or "Enter it around the call" in found
        assert stored() == ODD.item()

    def test_without_torchs_private_names_the_slower_way_gives_the_same(self, monkeypatch):
        module, inputs = model(), torch.randn(4, 16)
        with gradilocks.emulate("fp16"):
            module(inputs).square().sum().backward()
        expected = gradients(module)
        module.zero_grad()
        monkeypatch.setattr(rounding, "are_transforms_active", lambda: True)
        with gradilocks.emulate("fp16"):
            module(inputs).square().sum().backward()
        assert torch.equal(gradients(module), expected)

    def test_composable_checkpoints(self):
        from torch.distributed._composable.checkpoint_activation import checkpoint

        module, inputs = model(), torch.randn(4, 16)
        with gradilocks.emulate("fp16"):
            module(inputs).square().sum().backward()
        expected = gradients(module)
        module.zero_grad()
        checkpoint(module)
        with gradilocks.emulate("fp16"):
            loss = module(inputs).square().sum()
        loss.backward()
        assert torch.equal(gradients(module), expected)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_flex_attention_is_refused_with_the_way_out(self):
        from torch.nn.attention.flex_attention import flex_attention

        rows = torch.randn(1, 2, 16, 16)
        with (
            gradilocks.emulate("fp16"),
            pytest.raises(GradilocksError, match="scaled_dot_product_attention"),
        ):
            flex_attention(rows, rows, rows)

    def test_gradient_control_finds_what_overflows(self):
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        control = gradilocks.GradientControl(optimizer, model=module, scale=2.0**20, clip=1.0)
        before = [p.detach().clone() for p in module.parameters()]
        with gradilocks.emulate("fp16"):
            loss = module(torch.ones(4, 16)).square().sum() * 100
        control.backward(loss)
        outcome = control.step()
        assert outcome.skipped
        assert all(map(torch.equal, before, module.parameters()))
