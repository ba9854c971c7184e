"""Numbers reach the host as they were when they were sent, and nobody waits for them."""

from __future__ import annotations

import time

import pytest
import torch

from gradilocks.step.host_copy import HostCopy, fetch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32])
def test_a_copy_is_of_what_was_sent_and_may_be_read_again(device, flagged, dtype):
    for numbers in ([3.0], [1.0, 2.0, 7.0], []):
        sent = torch.tensor(numbers, dtype=dtype, device=device)
        copy = HostCopy(sent, flagged=flagged)
        sent.zero_()
        copy.wait()
        assert copy.arrived()
        assert copy.read() == numbers == copy.read()


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_number_without_a_dimension_is_copied_too(device):
    count = torch.tensor(5, dtype=torch.int32, device=device)
    copy = HostCopy(count)
    copy.wait()
    assert copy.read() == [5.0] == fetch(count)


def test_what_is_on_the_cpu_is_here_at_once():
    assert HostCopy(torch.ones(2)).is_here()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_a_gpu_nobody_waits_and_the_flag_comes_last():
    sent = torch.zeros(1000, device="cuda")
    HostCopy(sent, flagged=True).wait()  # Whatever is pinned first has been.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        sent.fill_(4.0)
        copy = HostCopy(sent, flagged=True)
        assert not copy.is_here()
        assert not copy.arrived()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    end = time.monotonic() + 60.0
    while not copy.is_here():
        assert time.monotonic() < end
    assert copy.read() == [4.0] * 1000
    assert not HostCopy(sent).is_here()  # Without a flag nobody can tell.
