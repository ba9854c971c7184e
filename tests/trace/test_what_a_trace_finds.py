"""A trace names the module in which NaN or Inf is born: first in time, forward or backward."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.lab.trace import Tracer


class Times(nn.Module):
    """Multiplies, so that a test can make any module overflow."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class Length(nn.Module):
    def forward(self, x):
        return x.square().sum(-1).sqrt()


class Logs(nn.Module):
    """log(0) · 0 is -Inf · 0 in forward; kept out of it by a mask, as in an entropy."""

    def forward(self, x):
        return torch.where(x > 0, x * x.log(), torch.zeros_like(x))


def followed(model, inputs, loss=lambda out: out.square().mean(), seed=0):
    torch.manual_seed(seed)
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        loss(model(inputs)).backward()
    assert not has_hooks(model)
    return tracer.findings


def has_hooks(model):
    lists = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = any(getattr(module, name) for module in model.modules() for name in lists)
    return on_modules or any(param._backward_hooks for param in model.parameters())


def test_an_overflow_in_forward_is_found_where_it_happens_not_where_it_spreads():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Times(1e30), Times(1e30), nn.Linear(4, 1))
    (found,) = followed(model, torch.ones(2, 4))
    assert (found.phase, found.module, found.kind, found.what) == ("forward", "3", "Times", "Inf")
    (entered,) = found.inputs
    assert entered["name"] == "input"
    assert entered["shape"] == [2, 4]
    assert 1e28 < entered["largest"] < 1.1e30
    assert "Inf first in the output of 3 (Times); into it went input (float32 2x4" in found.text


def test_an_fp16_matmul_that_overflows_is_found():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(60.0)
    (found,) = followed(model, torch.full((1, 64), 30.0).half(), lambda out: out.float().mean())
    assert (found.phase, found.module) == ("forward", "1")
    assert {each["name"] for each in found.inputs} == {"weight", "bias", "input"}


@pytest.mark.parametrize(("module", "inputs"), [(Root(), 0.0), (Length(), 0.0), (Logs(), 0.0)])
def test_a_nan_born_in_backward_alone_is_found(module, inputs):
    first = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(first, module)
    (found,) = followed(model, torch.full((2, 3), inputs), lambda out: out.sum())
    assert found.phase == "backward"
    assert (found.module, found.kind) == ("1", type(module).__name__)
    assert "NaN" in found.what or "Inf" in found.what
    assert "in the gradient of its input" in found.text


def test_an_activation_gradient_that_overflows_under_a_large_scale_is_found():
    model = nn.Sequential(nn.Linear(8, 8), Times(100.0), nn.Linear(8, 1)).half()
    scale = torch.tensor(65536.0)
    loss = lambda out: (out.float() * scale / 8).mean()  # noqa: E731
    with torch.no_grad():
        model[0].bias.zero_()
        model[2].weight.fill_(0.5)
    (found,) = followed(model, torch.zeros(1, 8).half(), loss)
    assert (found.phase, found.module, found.what) == ("backward", "1", "Inf")
    assert any(each["name"] == "gradient of output" for each in found.inputs)


def test_a_weight_gradient_that_overflows_is_found_though_activations_are_well():
    model = nn.Sequential(nn.Linear(2, 1, bias=False)).half()
    (found,) = followed(
        model, torch.full((1, 2), 60000.0).half(), lambda out: out.float().sum() * 2
    )
    assert (found.phase, found.module) == ("backward", "0")
    assert "in the gradient of its weight" in found.text


def test_it_is_the_first_in_time_and_not_by_definition():
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.late = Times(float("inf"))
            self.early = Times(float("inf"))
            self.head = nn.Linear(2, 1)

        def forward(self, x):
            return self.late(self.early(self.head(x)))

    (found,) = followed(Crossed(), torch.ones(1, 2))
    assert found.module == "early"


def test_an_operation_between_modules_belongs_to_the_module_that_computes_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x.exp())

    model = nn.Sequential(Block())
    (found,) = followed(model, torch.full((1, 2), 1000.0))
    assert (found.phase, found.module, found.kind) == ("forward", "0", "Block")
    assert "in what 0 (Block) computes itself, before 0.inner" in found.text

    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.inner(x).sqrt()

    (found,) = followed(nn.Sequential(Behind()), torch.zeros(1, 2))
    assert (found.phase, found.module) == ("backward", "0")
    assert "in what 0 (Behind) computes itself with the output of 0.inner" in found.text


def test_bad_input_data_is_called_so():
    model = nn.Sequential(nn.Linear(3, 1))
    batch = torch.tensor([[1.0, float("nan"), 2.0]])
    (found,) = followed(model, batch)
    assert (found.phase, found.module, found.what) == ("forward", "", "NaN")
    assert found.where == "input"
    assert found.text.startswith("NaN in the input: input (float32 1x3, 1 NaN)")


def test_a_damaged_parameter_is_called_so():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    (found,) = followed(model, torch.ones(1, 3))
    assert found.damaged == ("1.weight",)
    assert found.text.startswith("NaN in 1.weight itself, before the traced step: ")
    assert found.where == "parameters"
    assert "first" not in found.text


def test_a_model_with_damaged_parameters_is_not_followed_and_names_no_module():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    tracer = gradilocks.trace(model)
    tracer.arm()
    assert not tracer.armed
    assert not has_hooks(model[0])
    (found,) = tracer.findings
    assert (found.module, len(found.damaged)) == ("", 4)
    assert found.text.startswith("NaN in 4 parameters themselves, before the traced step")
    tracer.arm()
    assert len(tracer.findings) == 1  # Once is enough.


def test_a_parameter_that_is_damaged_while_the_model_is_followed_names_no_module():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        with torch.no_grad():
            model[0].bias.fill_(float("inf"))
        model(torch.ones(1, 3)).sum().backward()
    (found,) = tracer.findings
    assert found.damaged == ("0.bias",)
    assert found.text.startswith("Inf in 0.bias itself, finite when the trace began: ")


def test_a_fault_is_named_though_a_parameter_that_is_not_trained_holds_infinities():
    model = nn.Sequential(nn.Linear(2, 2), Times(float("inf")), nn.Linear(2, 1))
    model.register_parameter("mask", nn.Parameter(torch.full((2,), -float("inf")), False))
    (found,) = followed(model, torch.ones(1, 2))
    assert (found.module, found.damaged) == ("1", ())


class Remembers(nn.Module):
    """Adds a buffer, as a codebook or a moving average is added."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        return x + self.mean


def test_a_buffer_that_is_nan_already_is_no_origin_either():
    model = nn.Sequential(nn.Linear(2, 2), Remembers(), nn.Linear(2, 1))
    model[1].mean.fill_(float("nan"))
    (found,) = followed(model, torch.ones(1, 2))
    assert (found.damaged, found.where) == (("1.mean",), "buffers")
    assert found.text == (
        "NaN in the buffer 1.mean of 1 (Remembers) before it ran: the forward of a skipped step, "
        "or of this one, may have written it"
    )


def test_statistics_that_the_traced_forward_itself_ruins_are_no_excuse():
    model = nn.Sequential(nn.Linear(2, 2), Times(1.0), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[1].by = 3e38  # Finite, and its mean over the batch is not.
    batch = torch.ones(8, 2)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[0].bias.zero_()
    (found,) = followed(model, batch)
    assert model[2].running_mean.isinf().all()
    assert (found.module, found.where, found.damaged) == ("2", "module", ())


def test_statistics_that_a_batch_norm_in_training_does_not_read_are_no_excuse():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].running_mean.fill_(float("nan"))
    with gradilocks.trace(model) as tracer:
        model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
        tracer.arm()
        model(torch.randn(8, 2)).square().mean().backward()
    (found,) = tracer.findings
    assert (found.phase, found.module, found.where) == ("backward", "0", "module")


def test_statistics_of_a_batch_norm_that_a_skipped_step_has_ruined_hide_no_origin():
    model = nn.Sequential(nn.Linear(2, 2), Times(float("inf")), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model(torch.ones(3, 2))
    assert model[2].running_var.isnan().all()
    (found,) = followed(model, torch.ones(3, 2))
    assert (found.module, found.kind, found.damaged) == ("1", "Times", ())


def test_a_tracer_looks_again_once_a_step_was_well():
    model = nn.Sequential(nn.Linear(2, 2), Times(1.0), nn.Linear(2, 1))
    tracer = gradilocks.trace(model)
    good = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    for _ in range(3):
        tracer.note(torch.ones(1))
    assert [found.damaged for found in tracer.findings] == [("0.weight",)]
    model.load_state_dict(good)
    tracer.note(torch.zeros(1))
    tracer.note(torch.ones(1))
    assert tracer.armed
    model[1].by = float("inf")
    model(torch.ones(1, 2)).sum().backward()
    assert tracer.findings[-1].module == "1"
    tracer.close()


def test_what_is_born_in_the_loss_is_called_so():
    model = nn.Sequential(nn.Linear(3, 1))
    (found,) = followed(model, torch.zeros(1, 3), lambda out: (out - out.detach()).sqrt().sum())
    assert (found.phase, found.where) == ("backward", "after")
    assert "in the loss, or in what follows the model (Sequential), first in backward" in found.text


def backward(loss, params):
    loss.backward()


def by_function(loss, params):
    torch.autograd.backward([loss])


def by_grad(loss, params):
    torch.autograd.grad(loss, params)


@pytest.mark.parametrize("run", [backward, by_function, by_grad])
def test_a_loss_that_is_nan_itself_is_no_fault_of_backward(run):
    model, plain = nn.Sequential(nn.Linear(3, 1)), (torch.autograd.backward, torch.autograd.grad)
    with gradilocks.trace(model) as tracer, gradilocks.trace(nn.Linear(1, 1)) as other:
        tracer.arm(), other.arm()
        run(model(torch.ones(1, 3)).sum() * float("nan"), list(model.parameters()))
    (found,) = tracer.findings
    assert (found.phase, found.where) == ("forward", "after")
    assert found.text == (
        "NaN in the loss, or in what follows the model (Sequential), in forward: what was run "
        "backward was not finite"
    )
    assert (torch.autograd.backward, torch.autograd.grad) == plain


def test_what_arises_between_modules_that_a_loop_calls_one_by_one_is_no_input_data():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(4, 4)})
    for step in (lambda z: z * float("inf"), lambda z: z + torch.full((4,), float("nan"))):
        with gradilocks.trace(model) as tracer:
            tracer.arm()
            model["decoder"](step(model["encoder"](torch.ones(2, 4)))).sum().backward()
        (found,) = tracer.findings
        assert (found.phase, found.module, found.where) == ("forward", "decoder", "before")
        assert "first in forward, between modules, before decoder (Linear): input" in found.text


@pytest.mark.parametrize("detached", [True, False])
def test_what_another_model_may_have_made_is_not_said_to_be_known(detached):
    generator, model = nn.Linear(4, 4), nn.Linear(4, 1)
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model(torch.ones(2, 4)).sum().backward()
        made = generator(torch.ones(2, 4)) * float("nan")
        model(made.detach() if detached else made).sum().backward()
    (found,) = tracer.findings
    assert (found.phase, found.module, found.where) == ("forward", "", "outside")
    assert found.text.endswith(
        "Whether it was in the data, came from another model or arose between modules is not known"
    )


def bad_step(model, tracer, bad):
    model.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    if bad:
        model[0].weight.grad[0, 0] = float("nan")
    tracer.note(torch.full((1,), float(bad)))


def test_nan_that_is_written_into_gradients_after_backward_is_said_to_be_in_no_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with gradilocks.trace(model) as tracer:
        for bad in (False, True, True, False, False):
            bad_step(model, tracer, bad)
    (found,) = tracer.findings
    assert (found.step, found.where, found.module) == (2, "gradients", "")
    assert found.text.startswith("NaN in the gradient of 0.weight, but in no module: ")


def test_gradients_of_another_optimizer_that_are_still_bad_are_no_finding():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with gradilocks.trace(model) as tracer:
        bad_step(model, tracer, True)
        (found,) = tracer.findings  # Of that step.
        model(torch.ones(2, 2)).sum().backward()
        tracer.note(torch.zeros(1))
    assert tracer.findings == [found]


def test_weights_that_are_spoilt_are_told_as_of_the_step_after_which_they_were_looked_at():
    model = nn.Sequential(nn.Linear(2, 1))
    tracer = gradilocks.trace(model)
    for _ in range(19):
        tracer.note(torch.zeros(1))
    good = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    tracer.note(torch.ones(1))
    model.load_state_dict(good)
    (found,) = tracer.findings
    assert found.step == 20
    assert found.text.startswith("NaN in 0.weight itself, before step 20: ")


def test_a_mask_of_minus_infinity_is_no_finding():
    class Mask(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.tensor([[True, False]]), float("-inf"))

    model = nn.Sequential(nn.Linear(2, 2), Mask(), nn.Softmax(-1))
    assert followed(model, torch.ones(1, 2)) == []
    model = nn.Sequential(nn.Linear(2, 2), Mask())  # The output itself is masked.
    assert followed(model, torch.ones(1, 2), lambda out: out.softmax(-1)[:, 1].sum()) == []


def test_a_loss_that_is_never_run_backward_still_tells():
    model = nn.Sequential(nn.Linear(2, 2), Times(float("inf")))
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model(torch.ones(1, 2))
    assert [found.module for found in tracer.findings] == ["1"]


def test_findings_are_logged_and_written_by_a_recorder(caplog, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), Times(float("inf")))
    with gradilocks.Recorder(tmp_path / "a.jsonl") as recorder:
        tracer = gradilocks.trace(model, recorder=recorder)
        tracer.arm()
        with caplog.at_level(logging.WARNING, logger="gradilocks"):
            model(torch.ones(1, 2)).sum().backward()
    assert "step 1 traced: Inf first in the output of 1 (Times)" in caplog.text
    (written,) = gradilocks.read_run(tmp_path / "a.jsonl").traces
    assert written.text == tracer.findings[0].text
    assert written.inputs[0]["name"] == "input"


def test_bad_arguments_are_told():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got Tensor"):
        gradilocks.trace(torch.ones(2))
    with pytest.raises(TypeError, match=r"or a gradilocks.GradScaler, got builtins.str"):
        gradilocks.trace(nn.Linear(1, 1), control="c")
    with pytest.raises(ValueError, match="most must be a whole number of at least 1, got 0"):
        Tracer(nn.Linear(1, 1), most=0)
    tracer = gradilocks.trace(nn.Linear(1, 1))
    tracer.close()
    tracer.close()
    with pytest.raises(RuntimeError, match="this tracer is closed"):
        tracer.arm()


class Masked(nn.Module):
    """Attention under a mask of -inf, and something behind it."""

    def __init__(self, behind, change=lambda mask: mask):
        super().__init__()
        self.first = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.behind, self.head = behind, nn.Linear(8, 1)
        self.change = change

    def forward(self, pair):
        x, mask = pair
        x = self.second(self.first(x, src_mask=self.change(mask)), src_mask=self.change(mask))
        return self.head(self.behind(x))


MASK = nn.Transformer.generate_square_subsequent_mask(4)
CHANGES = {
    "as it is": lambda mask: mask,
    "a part": lambda mask: mask[:4, :4],
    "a copy": lambda mask: mask.clone(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_mask_that_attention_makes_nothing_of_is_not_what_a_later_fault_comes_from(change):
    model = Masked(Times(float("inf")), change)
    (found,) = followed(model, (torch.ones(2, 4, 8), MASK))
    assert (found.phase, found.module) == ("forward", "behind")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_mask_alone_is_no_fault(change):
    assert not followed(Masked(nn.Identity(), change), (torch.ones(2, 4, 8), MASK))


@pytest.mark.parametrize("mask", [MASK, torch.zeros(4, 4)], ids=["masked", "not masked"])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_data_that_are_not_finite_are_told_beside_a_mask_too(mask, bad):
    data = torch.ones(2, 4, 8)
    data[1, 2, 3] = bad  # As the logarithm of an empty bin leaves it.
    (found,) = followed(Masked(nn.Identity()), (data, mask))
    assert "in the input: " in found.text
    assert found.module == ""


class Divides(nn.Module):
    def forward(self, x):
        return x / (x - x)


def enlarged(model, by):
    with torch.no_grad():
        model[0].weight.fill_(by)
    return model


@pytest.mark.parametrize(
    ("weight", "inputs", "module", "where"),
    [
        (3e19, 1.0, Length(), "grown"),  # Overflows in Length, which is not at fault.
        (1e15, 1.0, Length(), None),  # Large, but all of it is finite.
        (0.5, 3e19, Length(), "module"),  # The weights are well: the data is large.
        (2e6, 1e-4, Divides(), "module"),  # Large, but not what makes 0 / 0.
    ],
)
def test_an_overflow_of_weights_that_have_grown_names_the_weights(weight, inputs, module, where):
    model = enlarged(nn.Sequential(nn.Linear(3, 3, bias=False), module), weight)
    found = followed(model, torch.full((2, 3), inputs), lambda out: out.square().sum())
    assert [each.where for each in found] == ([where] if where else [])
    for each in found:
        assert (each.module, "0.weight to 3e+19" in each.text) == ("1", where == "grown")
        assert ("Lower the learning rate" in each.text) is (where == "grown")


def test_a_loss_that_overflows_on_what_grown_weights_made_names_them_too():
    model = enlarged(nn.Sequential(nn.Linear(3, 3, bias=False)), 1e25)
    (found,) = followed(model, torch.ones(2, 3), lambda out: out.pow(3).sum())
    assert (found.where, found.phase) == ("grown", "forward")
    (well,) = followed(nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3), lambda out: out.sum() / 0)
    assert well.where == "after"
