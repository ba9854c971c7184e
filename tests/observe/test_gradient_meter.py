"""Gradients that are watched step by step are told as if they were looked at for the first time."""

from __future__ import annotations

import gc
import math
import sys
import weakref

import pytest
import torch
from torch import nn

from gradilocks import kernels
from gradilocks.kernels import native
from gradilocks.observe.gradient_reader import GradientReader, WatchedGradients
from gradilocks.step.events import Clip
from gradilocks.values import ROW

NAN, INF = math.nan, math.inf


def parameters():
    torch.manual_seed(0)
    shapes = [(3, 5), (7,), (), (0,), (40, 30)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    give_all(params)
    return params


def give_all(params):
    for param in params:
        param.grad = torch.randn(param.shape, dtype=param.dtype)


def scaled_in_place(params):
    for param in params:
        param.grad.mul_(3.0)


def nan_and_inf(params):
    params[0].grad[0, 0], params[0].grad[1, 1], params[4].grad[2, 2] = NAN, INF, -INF


def one_without(params):
    params[1].grad = None


def none_at_all(params):
    for param in params:
        param.grad = None


def strided(params):
    params[4].grad = torch.randn(30, 40).t()


def a_view_of_every_other(params):
    params[1].grad = torch.randn(14)[::2]


def sparse(params):
    values = torch.ones(2, 30)
    params[4].grad = torch.sparse_coo_tensor([[1, 1]], values, (40, 30), check_invariants=False)


def one_for_two(params):
    params[2].grad = params[1].grad[0]


def not_aligned(params):
    params[1].grad = torch.randn(8)[1:]


def half(params):
    for param in params:
        param.data = param.data.half()
        param.grad = torch.randn(param.shape).half()


def double(params):
    for param in params:
        param.data = param.data.double()
        param.grad = torch.randn(param.shape, dtype=torch.float64)


def one_more_parameter(params):
    params.append(nn.Parameter(torch.ones(4)))
    params[-1].grad = torch.ones(4)


def one_replaced(params):
    params[1] = nn.Parameter(torch.ones(9))
    params[1].grad = torch.ones(9)


CHANGES = (
    give_all, scaled_in_place, nan_and_inf, one_without, none_at_all, strided,
    a_view_of_every_other, sparse, one_for_two, not_aligned, half, double, one_more_parameter,
    one_replaced,
)  # fmt: skip


def told(params, watched):
    """What two ways to look say of the gradients as they are: of each step, and anew."""
    answers = []
    for way in (watched, WatchedGradients(params, once=True)):
        found = way.measure(detail=True)
        if found is None:
            answers.append(None)
            continue
        row = dict(zip(ROW, found.record.row.tolist(), strict=False))
        numbers = dict(zip(ROW, found.record.numbers or found.record.row.tolist(), strict=False))
        each = found.record.statistics
        columns = [each.norms, each.largest, each.zeros, each.nan, each.inf]
        counts = found.record.counts().tolist()
        assert counts == each.nan.tolist() + each.inf.tolist()
        assert bool(found.record.skip) == (row["nan"] + row["inf"] > 0)
        answers.append(
            (
                list(found.places),
                list(found.elements),
                found.double,
                [str(row[name]) for name in ("norm", "nan", "inf")],  # NaN is NaN.
                [str(numbers[name]) for name in ("norm", "nan", "inf")],
                [str(column.tolist()) for column in columns],
            )
        )
    return answers


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen_and_the_way_back_too(change):
    params = parameters()
    watched = WatchedGradients(params)
    for act in (give_all, give_all, change, scaled_in_place, give_all, give_all, change):
        if act is not scaled_in_place or all(param.grad is not None for param in params):
            act(params)
        mine, anew = told(params, watched)
        assert mine == anew, act.__name__


@pytest.mark.skipif(
    native.library() is None or not kernels.BACKENDS["cpu"].BY_ADDRESS,
    reason="the native library is not built: Python walks, and nothing is measured on the way",
)
def test_gradients_of_the_same_make_are_walked_over_and_measured_in_one_call(monkeypatch):
    params = parameters()
    watched, calls = WatchedGradients(params), []
    watched.measure(detail=False)

    class Library:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(native_library, name)

    native_library = native.library()
    monkeypatch.setattr(native, "library", Library)
    for _ in range(3):
        give_all(params)
        watched.measure(detail=False)
    assert calls == ["measure_walk"] * 3


def test_no_gradient_is_held_from_one_look_to_the_next():
    params = parameters()
    watched = WatchedGradients(params)
    for _ in range(3):
        give_all(params)
        found = watched.measure(detail=False)
        gone = [weakref.ref(param.grad.untyped_storage()) for param in params if param.numel()]
        for param in params:
            param.grad = None
        gc.collect()
        assert [find() for find in gone] == [None] * len(gone)
    assert found.record.statistics.norms.numel() == len(params)


@pytest.mark.skipif(native.library() is None, reason="the native library is not there")
def test_what_is_no_walk_no_tensor_or_has_no_room_is_refused():
    params = parameters()
    watched = WatchedGradients(params)
    watched.measure(detail=False)
    meter, library = watched._meter, native.library()
    given = [meter._walker, [[params]], meter._chunks, meter._numbers]
    room = torch.empty(5, len(params), dtype=torch.float64)
    for place, wrong, error in (
        (0, object(), TypeError),
        (2, object(), TypeError),
        (3, torch.zeros(2, dtype=torch.int64), ValueError),
        (3, "numbers", TypeError),
        (4, torch.empty(5, len(params)), ValueError),
        (4, torch.empty(5, 1, dtype=torch.float64), ValueError),
    ):
        arguments = [*given, room]
        arguments[place] = wrong
        with pytest.raises(error):
            library.measure_walk(*arguments)
    with pytest.raises(TypeError):
        library.measure_walk(*given)
    assert library.measure_walk(given[0], [[params[:1]]], *given[2:], room) is None


@pytest.mark.skipif(native.library() is None, reason="the native library is not there")
def test_copies_of_weights_refuse_what_they_cannot_take():
    library, tensors = native.library(), [torch.ones(2, 3), torch.zeros(0), torch.full((), 2.0)]
    room, norms = torch.empty(7), torch.empty(6, dtype=torch.float64)
    assert library.copy_elements(tensors, room)
    assert room.tolist() == [1.0] * 6 + [2.0]
    tensors[0].mul_(3.0)
    assert library.moved_norms(tensors, room, norms)
    expected = [math.sqrt(6.0), 0.0, 2.0, math.sqrt(24.0), 0.0, 0.0]
    assert norms.tolist() == pytest.approx(expected, rel=1e-15)
    with pytest.raises(ValueError, match="no room"):
        library.copy_elements(tensors, room[:6])
    assert not library.copy_elements(tensors, torch.empty(8))
    for wrong in (torch.ones(14)[::2], torch.ones(7).half(), torch.ones(7, dtype=torch.int64)):
        assert not library.copy_elements([wrong], torch.empty(7))
    assert not library.moved_norms([torch.ones(14)[::2]], room, norms[:2])
    assert not library.moved_norms([torch.ones(7).double()], room, norms[:2])
    assert not library.moved_norms(tensors, torch.empty(8), norms)
    assert not library.moved_norms(tensors, torch.empty(6), norms)
    assert not library.moved_norms(tensors, room, norms[:4])
    for call in (library.copy_elements, library.moved_norms):
        with pytest.raises(TypeError):
            call(tensors)
    with pytest.raises(TypeError):
        library.copy_elements(tensors, "room")
    with pytest.raises(TypeError):
        library.moved_norms(tensors, room, None)


@pytest.mark.skipif(native.library() is None, reason="the native library is not built")
def test_a_clip_leaves_no_python_object_for_each_gradient():
    params = [nn.Parameter(torch.randn(3)) for _ in range(400)]
    gradients, reader = WatchedGradients(params), GradientReader()
    for _ in range(3):
        give_all(params)
        before = sys.getallocatedblocks()
        clipped = reader.before_clip(gradients, detail=False)
        left = sys.getallocatedblocks() - before
        reader.after_clip(clipped, gradients, Clip(params, 1.0, norm=torch.ones(())))
        assert reader.read(gradients, detail=False).clip["limit"] == 1.0
    assert left < 100  # Storages and weak references to them would be 800 and more.
