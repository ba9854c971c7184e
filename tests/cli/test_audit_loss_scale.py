"""`gradilocks audit` of scripts that scale their losses: the scale is divided out, of its loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.audited_scripts import HEAD, LOOP, found_in
from tests.cli.forked import Server, command_server


@pytest.fixture(scope="module")
def server() -> Server:
    return command_server()


@pytest.fixture
def audited(server, tmp_path):
    """Writes a script, audits it, and returns what the command printed."""

    def audited(source: str, *options: str, folder: Path = tmp_path):
        (folder / "train.py").write_text(source)
        return server.run("audit", *options, "train.py", cwd=folder)

    return audited


SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for number in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 6)).square().mean()
    (scaler.scale(loss) * 1.0).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()
"""
CONTROLLED = """
import gradilocks
control = gradilocks.GradientControl(
    optimizer, model=model, scale=gradilocks.StaticScale(4096.0), clip=1e-3
)
for number in range(40):
    control.backward(model(torch.randn(16, 6)).square().mean())
    control.step()
    control.zero_grad()
"""


@pytest.mark.parametrize("loop", [SCALED, CONTROLLED], ids=["GradScaler", "GradientControl"])
def test_a_loss_scale_is_divided_out_and_a_clip_is_not_seen(audited, loop, tmp_path):
    (tmp_path / "plain").mkdir()
    audited(HEAD + LOOP, "-n", "1", folder=tmp_path / "plain")
    done = audited(HEAD + loop, "-n", "1")
    assert done.returncode == 0, done.stderr
    found, plain = found_in(tmp_path), found_in(tmp_path / "plain")
    assert found.loss_scale == 4096.0
    assert found.modules == plain.modules


TWO = """
other = nn.Linear(6, 1)
learns = torch.optim.SGD(other.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled={})
for number in range(40):
    optimizer.zero_grad(), learns.zero_grad()
    batch = torch.randn(16, 6)
    torch.autograd.grad(model(batch).mean(), model[0].weight)
    first, second = (scaler.scale(each(batch).square().mean()) for each in (model, other))
    first.backward()
    scaler.step(optimizer)
    torch.autograd.grad(other(batch).mean(), other.weight)
    second.backward()
    scaler.step(learns)
    scaler.update()
"""


def test_a_scale_belongs_to_the_loss_that_was_multiplied_whatever_comes_between(audited, tmp_path):
    found = {}
    for enabled in (True, False):
        folder = tmp_path / str(enabled)
        folder.mkdir()
        done = audited(HEAD + TWO.format(enabled), "-n", "2", folder=folder)
        assert done.returncode == 0, done.stderr
        found[enabled] = found_in(folder)
    assert found[True].modules == found[False].modules
    assert (found[True].loss_scale, found[False].loss_scale) == (65536.0, 1.0)


def test_a_loss_scaled_by_a_control_carries_its_scale_into_a_checkpoint(audited, tmp_path):
    loop = """
import gradilocks
from torch.utils.checkpoint import checkpoint
scale = gradilocks.StaticScale({})
control = gradilocks.GradientControl(optimizer, model=model, scale=scale)
for number in range(40):
    batch = torch.randn(16, 6, requires_grad=True)
    loss = control.scale_loss(checkpoint(model, batch, use_reentrant=True).square().mean())
    torch.autograd.grad(model(batch).mean(), batch)
    loss.backward()
    control.step()
    control.zero_grad()
"""
    found = []
    for scale in (1.0, 4096.0):
        folder = tmp_path / str(scale)
        folder.mkdir()
        done = audited(
            HEAD.replace("inplace=True", "") + loop.format(scale), "-n", "2", folder=folder
        )
        assert done.returncode == 0, done.stderr
        found.append(found_in(folder).modules)
    assert found[0] == found[1]


def test_a_backward_that_returns_none_does_not_end_the_script(audited):
    source = """
class Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return None

batch = torch.randn(16, 6)
for number in range(3):
    (model(batch).square().mean() + Blocked.apply(model[0](batch)).mean()).backward()
    optimizer.step()
print("to the end")
"""
    done = audited(HEAD + source)
    assert (done.returncode, done.stderr.count("failed")) == (0, 0), done.stderr
    assert "to the end" in done.stdout


@pytest.mark.parametrize("bad", ["loss / 0 * 0", "loss * torch.inf"])
def test_a_loss_that_is_nan_or_inf_itself_is_no_matter_of_the_scale(audited, bad, tmp_path):
    spoils = f"    loss = {bad} if number == 1 else loss\n    (scaler.scale"
    done = audited(HEAD + SCALED.replace("    (scaler.scale", spoils), "-n", "3")
    assert done.returncode == 0, done.stderr
    words = " ".join(found_in(tmp_path).recommendation.words)
    assert "The loss itself was NaN or Inf in 1 of 3 backward passes" in words
    assert "smaller scale" not in words


def test_gradients_that_overflow_behind_a_finite_loss_may_want_a_smaller_scale(audited, tmp_path):
    spoils = "    loss.register_hook(lambda grad: grad * torch.inf)\n    (scaler.scale"
    done = audited(HEAD + SCALED.replace("    (scaler.scale", spoils), "-n", "3")
    assert done.returncode == 0, done.stderr
    assert "a smaller scale may do" in " ".join(found_in(tmp_path).recommendation.words)
