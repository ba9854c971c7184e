"""Kernels launched through the driver from C++: only where the driver's own description agrees."""

from __future__ import annotations

import importlib
import threading

import pytest
import torch

from gradilocks.kernels import native

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
launching = importlib.import_module("gradilocks.kernels.triton_launch")


@pytest.fixture
def library():
    found = native.library()
    if found is None:
        pytest.skip("the native library is not built here")
    return found


@pytest.mark.parametrize("args", [(), (1, 2, 3), (0, 32, 0, 0, [1])])
def test_what_is_no_launch_is_refused(library, args):
    with pytest.raises(TypeError, match="cuda_launch takes function"):
        library.cuda_launch(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the driver is there")
def test_without_a_driver_nothing_is_launched_from_c(library):
    assert library.cuda_launch(0, 32, 0, 0, (1, 2)) is None


def probe():
    """The probe's kernel, compiled; its arguments; and the cells that it writes."""
    device = torch.device("cuda", torch.cuda.current_device())
    cells = torch.full((32,), -1, dtype=torch.int64, device=device)
    cells[8:16] = torch.arange(8, device=device)
    args = (cells[8:16], cells[16:], 7, 5)
    constants = {"APART": 64, "CELLS": 8}
    compiled = launching.compile_kernel(launching._probe_kernel, args, num_warps=1, **constants)
    return compiled, args, cells


def launched(compiled, args):
    index = torch.cuda.current_device()
    launch = launching.by_driver(compiled, index, args)
    assert launch is not None
    return launch, launching.current_stream(index)


@pytest.mark.gpu
def test_a_launch_through_the_driver_does_what_tritons_own_does(library):
    compiled, args, cells = probe()
    launch, stream = launched(compiled, args)
    assert launch(3, stream, *args) is True
    assert cells[16:20].tolist() == [5, 12, 19, -1]
    assert launch(0, stream, *args) is True  # No program: nothing to do.
    assert cells[16:20].tolist() == [5, 12, 19, -1]


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_is_not_launched(library):
    compiled, args, cells = probe()
    launch, stream = launched(compiled, args)
    before = cells.clone()
    with pytest.raises(TypeError, match="4 arguments, got 5 in all"):
        launch(3, stream, *args[:3])
    with pytest.raises(OverflowError, match="does not fit into the 4 bytes"):
        launch(3, stream, *args[:2], 2**31, 5)
    with pytest.raises(TypeError, match="where the kernel takes a number"):
        launch(3, stream, *args[:3], cells)
    with pytest.raises(ValueError, match="was given a tensor on cpu"):
        launch(3, stream, cells.cpu(), *args[1:])
    with pytest.raises(TypeError, match="takes tensors and numbers, got float"):
        launch(3, stream, 1.0, *args[1:])
    with pytest.raises(ValueError, match="got -1"):
        launch(-1, stream, *args)
    assert torch.equal(cells, before)
    index = torch.cuda.current_device()
    assert launching.by_driver(compiled, index, args[:1]) is None  # Too few for this kernel.
    assert launching.by_driver(compiled, index, (*args[:2], cells, 5)) is None


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_gpu_yet_launches_all_the_same(library):
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = torch.ones(100, device=device)
    backend = importlib.import_module("gradilocks.kernels.triton_backend")
    factor = torch.full((), 2.0, device=device)
    backend.multiply_([numbers], factor)
    backend.multiply_([numbers], factor)
    torch.cuda.synchronize()
    raised = []

    def multiply():
        try:
            backend.multiply_([numbers], factor)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    assert not raised
    assert numbers.unique().tolist() == [8.0]


@pytest.mark.gpu
def test_launches_go_through_the_driver_where_the_library_is_built(library):
    device = torch.device("cuda", torch.cuda.current_device())
    assert launching.takes_addresses(device)
    assert device.index in launching._by_driver


@pytest.mark.gpu
def test_a_bound_launch_takes_only_what_changes(library):
    compiled, args, cells = probe()
    launch, stream = launched(compiled, args)
    bound = launch.bind(3, (*args[:2], 0, 5), (2,))
    for factor in (7, 11):
        assert bound(stream, factor) is True
        assert cells[16:20].tolist() == [5, 5 + factor, 5 + 2 * factor, -1]
    elsewhere = cells.clone()
    moved = launch.bind(3, (0, 0, 2, 5), (1, 0))
    assert moved(stream, elsewhere[16:], elsewhere[8:16]) is True
    assert elsewhere[16:20].tolist() == [5, 7, 9, -1]
    assert cells[16:20].tolist() == [5, 16, 27, -1]


@pytest.mark.gpu
def test_what_cannot_be_bound_is_refused(library):
    compiled, args, cells = probe()
    launch, stream = launched(compiled, args)
    with pytest.raises(TypeError, match="bind takes programs, a tuple of 4 arguments"):
        launch.bind(3, args[:3], ())
    with pytest.raises(IndexError, match="has none at 4"):
        launch.bind(3, args, (4,))
    with pytest.raises(ValueError, match="was given a tensor on cpu"):
        launch.bind(3, (cells.cpu(), *args[1:]), ())
    bound = launch.bind(3, args, (2,))
    before = cells.clone()
    with pytest.raises(TypeError, match="takes a stream and 1 arguments, got 3 in all"):
        bound(stream, 1, 2)
    with pytest.raises(OverflowError, match="does not fit into the 4 bytes"):
        bound(stream, 2**31)
    assert torch.equal(cells, before)


@pytest.mark.gpu
def test_a_bound_launch_keeps_what_it_was_bound_to(library):
    compiled, args, cells = probe()
    launch, stream = launched(compiled, args)
    bound = launch.bind(3, args, ())
    where = cells.data_ptr()
    del args, cells
    assert torch.empty(32, dtype=torch.int64, device="cuda").data_ptr() != where
    assert bound(stream) is True
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 64, 8192, 20_000], ids=lambda count: f"{count} numbers")
def test_numbers_are_sent_into_a_tensor_behind_what_reads_it(library, count):
    host_numbers = importlib.import_module("gradilocks.kernels.host_numbers")
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.zeros(count, dtype=torch.int64, device=device)
    seen = []
    for number in range(20):
        numbers = torch.full((count,), number, dtype=torch.int64)
        host_numbers.send_into(there, numbers, host_numbers.stream_of(device))
        numbers.fill_(-1)  # The driver has taken them over.
        torch.cuda._sleep(100_000)
        seen.append(there.clone())
    assert [(each.min().item(), each.max().item()) for each in seen] == [(n, n) for n in range(20)]


def test_an_upload_that_does_not_fit_is_refused(library):
    numbers = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="cuda_upload takes to, numbers, device and stream"):
        library.cuda_upload(numbers)
    with pytest.raises(ValueError, match="was given a tensor on cpu"):
        library.cuda_upload(numbers, numbers, 0, 0)


@pytest.mark.gpu
def test_an_upload_of_another_size_or_from_elsewhere_is_refused(library):
    there = torch.zeros(3, dtype=torch.int64, device="cuda")
    index, stream = there.get_device(), launching.current_stream(there.get_device())
    with pytest.raises(ValueError, match="16 bytes were given for a table of 24"):
        library.cuda_upload(there, torch.zeros(2, dtype=torch.int64), index, stream)
    with pytest.raises(ValueError, match="expected a tensor on the CPU, got one on cuda"):
        library.cuda_upload(there, there, index, stream)
    with pytest.raises(TypeError, match="expected a contiguous tensor, got list"):
        library.cuda_upload(there, [1, 2, 3], index, stream)
