"""A run that begins while the C++ library is being built keeps its bits when that is done.

The build is one that ends when the test says so (`Build`), and what it leaves is the real library.
What the kernels compute is fixed at the first step and serves the next process; only the walk may
switch.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradilocks
from gradilocks import GradientControl, GradScaler, HeadroomScale, QuantileClip, kernels, optim
from gradilocks.kernels import native, rank_choice, reference
from gradilocks.kernels.native import NativeLibrary
from tests import PATIENCE
from tests.kernels.fake_compiler import Fake

if native.library() is None:
    pytest.skip("the native library is not there", allow_module_level=True)

from gradilocks.kernels import native_backend

LIBRARY = native.library()


class Build:
    """The library of a process that has just begun: being built until `finish`."""

    def __init__(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake, self._patch = fake, monkeypatch
        self.begin_process()

    def begin_process(self) -> None:
        """Nothing is chosen, and nothing of the library is known."""
        self.here = NativeLibrary(self.fake.recipe)
        for name in ("library", "library_within", "status", "is_coming"):
            self._patch.setattr(native, name, getattr(self.here, name))
        for chosen in (kernels.BACKENDS, kernels._reasons):
            self._patch.delitem(chosen, "cpu", raising=False)

    def finish(self) -> None:
        assert native.library() is None
        self.fake.go_on()
        assert self.here.library_within(PATIENCE) is LIBRARY


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADILOCKS_NATIVE", raising=False)
    monkeypatch.setenv("GRADILOCKS_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "loaded", lambda path: LIBRARY)
    (tmp_path / "fake").mkdir()
    fake = Fake(tmp_path / "fake")
    fake.hold()
    build = Build(fake, monkeypatch)
    yield build
    if (fake.folder / "wait").exists():  # Nobody is left waiting for a test that has failed.
        fake.go_on()


def by_control(make, **options):
    def begin(params):
        optimizer = make(params, lr=0.1)
        control = GradientControl(optimizer, **{"scale": 256.0, "clip": 1.0, **options})

        def step(loss):
            control.backward(loss)
            outcome = control.step()
            return outcome.norm, outcome.limit, outcome.scale, outcome.skipped

        return optimizer, step

    return begin


def by_scaler(make, **options):
    def begin(params):
        optimizer = make(params, lr=0.1)
        scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2, **options)

        def step(loss):
            scaler.scale(loss).backward()
            told = None
            if not options:
                scaler.unscale_(optimizer)
                told = gradilocks.clip_grad_norm_(params, 1.0).item()
            scaler.step(optimizer)
            scaler.update()
            return told, scaler.get_scale()

        return optimizer, step

    return begin


def by_itself(make, **options):
    def begin(params):
        optimizer = make(params, lr=0.1, **options)

        def step(loss):
            loss.backward()
            norm = gradilocks.clip_grad_norm_(params, 1.0).item()
            gradilocks.clip_grad_value_(params, 0.1)
            optimizer.step()
            return norm

        return optimizer, step

    return begin


TRAININGS = {
    "control": by_control(torch.optim.AdamW),
    "control, policies asked": by_control(
        torch.optim.SGD, clip=QuantileClip(), scale=HeadroomScale()
    ),
    "control, optim": by_control(optim.AdamW),
    "drop-in": by_scaler(torch.optim.AdamW),
    "drop-in, optim": by_scaler(optim.AdamW),
    "drop-in that clips": by_scaler(torch.optim.SGD, clip=1.0),
    "optim": by_itself(optim.AdamW),
    "optim, masters": by_itself(optim.Adam, master_weights=True),
    "optim, momentum": by_itself(optim.SGD, momentum=0.9),
}
each_training = pytest.mark.parametrize("name", TRAININGS)
STEPS, BAD = 6, 4


def trained(name, *, after_three=lambda: None):
    """All that a run says and leaves; one of its steps after the third has an overflow."""
    generator = torch.Generator().manual_seed(7)
    kinds = [((300, 70), torch.float32), ((1000,), torch.bfloat16), ((), torch.float32)]
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in kinds
    ]
    optimizer, step = TRAININGS[name](params)
    told = []
    for number in range(STEPS):
        if number == 3:
            after_three()
        given = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
        if number == BAD and name.partition(",")[0] != "optim":
            given[0][7, 7] = float("inf")
        loss = sum((p.float() * g.float()).sum() for p, g in zip(params, given, strict=True))
        told.append(step(loss))
        optimizer.zero_grad()
    left = [p.detach() for p in params]
    left += [v for p in params for v in optimizer.state[p].values() if torch.is_tensor(v)]
    return told, left


def assert_same(one, other):
    (told, left), (other_told, other_left) = one, other
    assert repr(told) == repr(other_told)  # A NaN is itself.
    assert len(left) == len(other_left)
    for mine, others in zip(left, other_left, strict=True):
        assert mine.dtype == others.dtype
        assert torch.equal(mine, others)


class Counted:
    """A module, and what was asked of it."""

    def __init__(self, module):
        self._module, self.asked = module, []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self._module, name)


@pytest.fixture
def fused(monkeypatch):
    """The module of the kernels as `kernels` imports it."""
    counted = Counted(native_backend)
    monkeypatch.setitem(sys.modules, native_backend.__name__, counted)
    return counted


@pytest.fixture
def plain(monkeypatch):
    """What a run without a library says and leaves, by its name."""

    def run(name):
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            patch.setitem(kernels.BACKENDS, "cpu", reference)
            return trained(name)

    return run


@each_training
def test_a_library_that_is_built_in_mid_run_serves_the_next_process(build, name, plain, fused):
    expected = plain(name)
    assert_same(trained(name, after_three=build.finish), expected)
    described = kernels.describe()
    assert described["walk"].startswith("C++: built ")
    assert "no C++ library yet when it was first used" in described["cpu"]
    assert_same(trained(name), expected)  # What begins now, in the same process.
    assert fused.asked == []
    build.begin_process()
    trained(name)
    assert kernels.describe()["cpu"].startswith("fused: ")
    assert len(set(fused.asked) - {"try_out"}) > 1


@pytest.fixture
def store(monkeypatch):
    """Where ranks tell each other; a process after another plays them."""
    made = dist.HashStore()
    monkeypatch.setattr(rank_choice, "has_company", lambda: True)
    monkeypatch.setattr(rank_choice, "default_store", lambda: made)


@pytest.mark.usefixtures("store")
@each_training
def test_a_rank_whose_library_is_there_computes_as_one_that_began_without(
    build, name, plain, fused
):
    expected = plain(name)
    assert_same(trained(name, after_three=build.finish), expected)
    build.begin_process()
    assert_same(trained(name), expected)
    assert native.library() is LIBRARY
    assert "another rank has begun with plain torch" in kernels.describe()["cpu"]
    assert fused.asked == []


@pytest.mark.usefixtures("store")
@each_training
def test_a_rank_that_begins_during_the_build_waits_for_it_where_another_computes_with_it(
    build, name, monkeypatch
):
    rank_choice.first_choice("cpu kernels", "native")
    within = native.library_within

    def finish_and_wait(seconds):
        assert seconds > 0
        build.fake.go_on()
        return within(seconds)

    monkeypatch.setattr(native, "library_within", finish_and_wait)
    begun = trained(name)
    assert kernels.describe()["cpu"].startswith("fused: ")
    build.begin_process()
    assert_same(begun, trained(name))


@each_training
def test_a_walk_that_is_left_to_cpp_in_mid_run_changes_no_bit(name, monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, "cpu", native_backend)
    now = {}
    monkeypatch.setattr(native, "library", lambda: now["walk"])
    found = []
    for before, after in ((LIBRARY, LIBRARY), (None, None), (None, Counted(LIBRARY))):
        now["walk"] = before
        found.append(trained(name, after_three=lambda after=after: now.update(walk=after)))
        assert_same(found[-1], found[0])
    assert "walk_over" in after.asked
