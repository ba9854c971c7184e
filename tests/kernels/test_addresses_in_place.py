"""Addresses of tensors that change from step to step, sent into the table that has the old ones."""

from __future__ import annotations

import pytest
import torch

from gradilocks.kernels.chunks import Addresses

COUNT = 3
KINDS = ((torch.float32, 16),) * COUNT
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def numbers(first):
    return torch.arange(first, first + 16 * COUNT, 16, dtype=torch.int64)


def addresses(device, first=16):
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    return Addresses(numbers(first), KINDS, (5, 6, 7), torch.device(where))


def pointers(at, chunk=None):
    return at.located_in(chunk).pointers.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_all_that_know_a_table_see_its_new_addresses(device):
    at = addresses(device)
    assert pointers(at) == numbers(16).tolist()
    at.change(numbers(160))
    kept = at.located
    assert pointers(at, 64) == numbers(160).tolist()  # Made between two changes.
    for first in (320, 16, 480):
        at.change(numbers(first))
        assert at.located is kept  # So what was launched on it is launched again.
        assert pointers(at) == pointers(at, 64) == numbers(first).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_two_that_lie_alike_part_when_one_of_them_moves(device):
    at = addresses(device)
    assert pointers(at) == numbers(16).tolist()
    at.change(numbers(160))
    twin = at.moved(numbers(160))
    other = at.moved(numbers(320))
    at.change(numbers(480))
    assert pointers(twin) == numbers(160).tolist()
    assert pointers(other) == numbers(320).tolist()
    twin.change(numbers(640))
    twin.change(numbers(800))
    assert pointers(at) == numbers(480).tolist()
    assert pointers(twin) == numbers(800).tolist()
    assert pointers(other) == numbers(320).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_the_tensors_has_a_table_of_its_own(device):
    at = addresses(device)
    part = at.part(1, 3)
    for first in (160, 320, 480):
        at.change(numbers(first))
        part = at.part(1, 3)
        assert pointers(at) == numbers(first).tolist()
        assert pointers(part) == numbers(first).tolist()[1:]


@pytest.mark.gpu
def test_another_stream_gets_a_table_of_its_own():
    at = addresses("cuda")
    at.change(numbers(16))
    assert pointers(at) == numbers(16).tolist()
    at.change(numbers(160))
    before = at.located.pointers
    with torch.cuda.stream(torch.cuda.Stream()):
        at.change(numbers(320))
        assert at.located.pointers is not before
        assert pointers(at) == numbers(320).tolist()
    torch.cuda.synchronize()
    assert before.tolist() == numbers(160).tolist()


@pytest.mark.gpu
def test_what_a_graph_has_captured_is_not_written_to_any_more():
    at = addresses("cuda")
    assert pointers(at) == numbers(16).tolist()
    at.change(numbers(160))
    seen = torch.zeros(COUNT, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.copy_(at.located.pointers)
    at.change(numbers(320))
    at.change(numbers(480))
    graph.replay()
    assert seen.tolist() == numbers(160).tolist()
    assert pointers(at) == numbers(480).tolist()
