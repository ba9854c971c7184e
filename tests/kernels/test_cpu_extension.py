"""The C extension: the order of additions, threads, forks, memory that is gone."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.cases import INF, NAN, same_bits

CHUNK, LANES = 1 << 15, 16
HALF = torch.tensor(0.5, dtype=torch.float64)


def test_the_order_of_additions_is_the_documented_one(cpu):
    """No processor, compiler or number of threads may change these bits."""
    tensor = torch.randn(2 * CHUNK + 1001, generator=torch.Generator().manual_seed(1)) * 1e-3
    total = 0.0
    for chunk in tensor.double().square().split(CHUNK):
        lanes = torch.nn.functional.pad(chunk, (0, -chunk.numel() % LANES)).view(-1, LANES)
        total += sum(lanes.cumsum(0)[-1].tolist())
    assert cpu.measure([tensor])[0].item() == math.sqrt(total)


def test_any_number_of_threads_gives_the_same_bits(cpu, threads):
    tensors = [torch.randn(size) for size in (3, 3, 90_001, 90_001, 250_000, 250_000)]
    tensors[1][1], tensors[3][-1], tensors[5][0] = NAN, INF, NAN
    found = []
    for number in (1, 2, 3, 4):
        threads(number)
        changed = [tensor.clone() for tensor in tensors]
        flag = cpu.unscale_(changed, torch.tensor(0.3, dtype=torch.float64))
        cpu.clamp_(changed, torch.tensor(0.1, dtype=torch.float64))
        found.append([*(cpu.measure(tensors, order=order) for order in (1.0, 2.0)), flag, *changed])
    for other in found[1:]:
        assert all(map(same_bits, found[0], other))


def test_several_python_threads_may_call_at_once(cpu):
    tensors = [torch.randn(size) for size in (5, 70_001, 200_000)]
    expected = cpu.measure(tensors)
    wrong = []

    def work(number):
        own = [tensor.clone() for tensor in tensors]
        for _ in range(20):
            cpu.multiply_(own, HALF)
            cpu.multiply_(own, torch.tensor(2.0, dtype=torch.float64))
            if not torch.equal(cpu.measure(own), expected):
                wrong.append(number)

    running = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def test_inference_tensors_can_be_changed_in_inference_mode(cpu):
    with torch.inference_mode():
        tensor = torch.ones(3)
        cpu.multiply_([tensor], HALF)
        assert cpu.unscale_([tensor], HALF).item() == 0.0
        cpu.clamp_([tensor], torch.tensor(0.2, dtype=torch.float64))
        assert tensor.tolist() == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("operation", ["measure", "multiply_", "clamp_", "unscale_"])
@pytest.mark.parametrize("offset", [0, 10])
def test_a_tensor_whose_memory_was_freed_is_rejected(cpu, operation, offset):
    """The address of a view with an offset is not 0 then."""
    storage = torch.ones(100)
    tensors = [torch.ones(3), storage[offset : offset + 20], torch.zeros(0)]
    storage.untyped_storage().resize_(0)
    arguments = [] if operation == "measure" else [HALF]
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(20,\) has no memory: its storage was freed"):
        getattr(cpu, operation)(tensors, *arguments)
    assert tensors[0].tolist() == [1.0] * 3


class Wrapper(torch.Tensor):
    """A tensor subclass without memory of its own, as those of frameworks are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(value):
            if isinstance(value, (list, tuple)):
                return type(value)(map(unwrap, value))
            return value.inner if isinstance(value, cls) else value

        return function(*unwrap(args), **(kwargs or {}))


def test_a_wrapper_subclass_is_left_to_plain_torch(cpu):
    inner = torch.full((16,), 2.0)
    tensors = [Wrapper(inner), torch.ones(3)]
    assert cpu.measure(tensors)[0].tolist() == pytest.approx([8.0, math.sqrt(3.0)])
    cpu.multiply_(tensors, HALF)
    assert inner.tolist() == [1.0] * 16
    assert tensors[1].tolist() == [0.5] * 3


def run(program):
    """Runs a program in a new process, in which nothing has opened a parallel region yet."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_the_work_is_divided_among_torchs_threads(cpu):
    if "OpenMP" not in cpu.DESCRIPTION:
        pytest.skip("torch does not use OpenMP here")
    run(
        "import os, torch\n"
        "from gradilocks.kernels import cpu\n"
        "tensors = [torch.empty(1 << 16) for _ in range(8)]\n"
        "torch.set_num_threads(2)\n"
        "before = os.listdir('/proc/self/task')\n"
        "cpu.measure(tensors)\n"
        "assert len(os.listdir('/proc/self/task')) == len(before) + 1, os.listdir('/proc/self/task')\n"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_a_fork_does_not_wait_for_threads_of_its_parent(cpu):
    """libgomp waits forever for threads that the child does not have."""
    run(
        "import faulthandler, os, sys, torch\n"
        "from gradilocks.kernels import cpu\n"
        "torch.set_num_threads(2)\n"
        "cpu.measure([torch.ones(1 << 20)])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    faulthandler.dump_traceback_later(300, exit=True)\n"
        "    tensors = [torch.empty(1 << 16) for _ in range(8)]\n"
        "    cpu.multiply_(tensors, torch.zeros((), dtype=torch.float64))\n"
        "    cpu.measure(tensors)\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )


def test_the_extension_needs_neither_python_nor_torch(cpu):
    """One build serves every version of both."""
    library = Path(cpu._library._name).read_bytes()
    assert not [name for name in (b"PyObject_", b"Py_Initialize", b"_ZN3c10", b"_ZN2at") if name in library]
