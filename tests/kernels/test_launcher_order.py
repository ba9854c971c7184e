"""Triton's launcher takes its arguments by place: no kernel is handed to it in an unproven order.

Stand-ins for compiled kernels take their arguments in Triton's order of today, in that of older
versions, and in orders that no version has yet; whatever they are, each argument must arrive under
its own name. Every kernel of the package is tried, also those that are added later.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import pytest
import torch

import gradilocks.kernels
from gradilocks import _torch

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
launching = importlib.import_module("gradilocks.kernels.triton_launch")
CUDA = torch.device("cuda", 0)
STREAM, FUNCTION, METADATA = 0x7000, 0x9000, (4, 1, 512)
HEAD = ("x", "y", "z", "stream", "function", "metadata", "launch_metadata", "enter", "exit")


def kernels_of_the_package():
    """Every function in gradilocks.kernels that Triton runs by itself, by name."""
    found = {}
    for module in pkgutil.iter_modules(gradilocks.kernels.__path__, "gradilocks.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                found[name] = value
    return found


KERNELS = kernels_of_the_package()


class Hooks:
    """What Triton hands over for profilers since 3.4: never None, mostly empty."""

    calls = ()

    def __call__(self, metadata):
        pass


# What a launcher takes, as a function of the names of the kernel's arguments and constants.
ORDERS = {
    "Triton 3.3 and later": lambda args, constants: (*HEAD, *args, *constants),
    "Triton 3.1 and 3.2": lambda args, constants: (*HEAD, *args),
}
OTHER_ORDERS = {
    "stream and function exchanged": lambda args, constants: (
        *HEAD[:3], "function", "stream", *HEAD[5:], *args, *constants,
    ),
    "arguments reversed": lambda args, constants: (*HEAD, *args[::-1], *constants),
    "two arguments exchanged": lambda args, constants: (
        *HEAD, args[1], args[0], *args[2:], *constants,
    ),
    "constants first": lambda args, constants: (*HEAD, *constants, *args),
    "arguments before the hooks": lambda args, constants: (*HEAD[:6], *args, *constants, *HEAD[6:]),
    "one hook less": lambda args, constants: (*HEAD[:8], *args, *constants),
    "one hook more": lambda args, constants: (*HEAD, "function", *args, *constants),
    "the stream last": lambda args, constants: (
        *HEAD[:3], *HEAD[4:], *args, *constants, "stream",
    ),
    "grid as one": lambda args, constants: ("x", *HEAD[3:], *args, *constants),
}  # fmt: skip


def where(programs):
    """What a launch has beside its arguments."""
    grid = {"x": programs, "y": 1, "z": 1}
    return {**grid, "stream": STREAM, "function": FUNCTION, "metadata": METADATA}


class Kernel:
    """A stand-in for a kernel: Triton's way to it, its launcher, and what has arrived there."""

    def __init__(self, like, order, hooks=None, by_name=False, hidden=False):
        self.arg_names = list(like.arg_names)
        self.__name__ = "stand_in_kernel"
        self.args = [name for name in self.arg_names if not name.isupper()]
        self.constants = [name for name in self.arg_names if name.isupper()]
        self.order = order(self.args, self.constants)
        self.hooks, self.by_name, self.hidden = hooks, by_name, hidden
        self.arrived = []
        self.short = 0
        self.documented = False

    def warmup(self, *args, grid, num_warps, **constants):
        self.compiled = Compiled(self)
        return self.compiled

    def __getitem__(self, grid):
        def run(*args, num_warps, **constants):
            given = dict(zip(self.args, args, strict=True))
            given |= {name: constants[name] for name in self.constants}
            given |= where(grid[0])
            given |= {"launch_metadata": self.hooks and object()}
            given |= {"enter": self.hooks, "exit": self.hooks}
            self.documented = True
            launcher = self.launcher if self.hidden else self.compiled.run
            if self.by_name:
                launcher(*[given[name] for name in self.order[:-1]], last=given[self.order[-1]])
            else:
                launcher(*[given[name] for name in self.order])
            self.documented = False

        return run

    def launcher(self, *values, last=None):
        values = values if last is None else (*values, last)
        arrived = dict(zip(self.order, values, strict=True))
        self.short += not self.documented
        self.arrived.append(
            {
                name: value.data_ptr() if isinstance(value, torch.Tensor) else value
                for name, value in arrived.items()
                if name not in ("launch_metadata", "enter", "exit")
            }
        )


class Compiled:
    """As triton.compiler.CompiledKernel: the launcher is an attribute of the instance."""

    function, packed_metadata = FUNCTION, METADATA

    def __init__(self, kernel):
        self._run = kernel.launcher

    @property
    def run(self):
        return self._run


class OldCompiled:
    """As it was before Triton 3.4."""

    function, packed_metadata = FUNCTION, METADATA

    def __init__(self, kernel):
        self.run = kernel.launcher


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as a launch asks for one."""
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(launching, "takes_addresses", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


def launched(kernel, times=3):
    """What should have arrived at each of several launches with other arguments each."""
    numbers = {name: 100 + place for place, name in enumerate(kernel.constants)}
    launch = launching.Launch(kernel, 4, tuple(numbers.items()))
    expected = []
    for time in range(times):
        args = [
            torch.zeros(1) if name.endswith("_ptr") else 10 * time + place
            for place, name in enumerate(kernel.args)
        ]
        launch(time + 2, CUDA, *args)
        values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
        given = dict(zip(kernel.args, values, strict=True)) | numbers
        given |= where(time + 2)
        expected.append({name: given[name] for name in kernel.order if name in given})
    return expected


def test_there_are_kernels_and_each_is_tried():
    assert {"measure_kernel", "gather_kernel", "settle_kernel", "adam_kernel", "sgd_kernel"} <= set(
        KERNELS
    )
    for name, kernel in KERNELS.items():
        pointers = [each for each in kernel.arg_names if each.endswith("_ptr")]
        assert pointers, f"{name} takes no pointer by a name that ends in _ptr"


@pytest.mark.parametrize("hooks", [None, Hooks()], ids=["no hooks", "hooks"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", KERNELS)
def test_in_an_order_that_agrees_only_the_first_launch_is_searched_for(name, order, hooks, gpu):
    kernel = Kernel(KERNELS[name], ORDERS[order], hooks)
    assert launched(kernel) == kernel.arrived
    assert kernel.short == 2


@pytest.mark.parametrize("order", OTHER_ORDERS)
@pytest.mark.parametrize("name", KERNELS)
def test_in_another_order_every_launch_goes_the_documented_way(name, order, gpu):
    kernel = Kernel(KERNELS[name], OTHER_ORDERS[order])
    assert launched(kernel) == kernel.arrived
    is_other = kernel.constants or order != "constants first"
    assert kernel.short == (0 if is_other else 2)


@pytest.mark.parametrize("how", [{"by_name": True}, {"hidden": True}])
@pytest.mark.parametrize("name", KERNELS)
def test_a_launcher_that_cannot_be_seen_at_work_is_not_used(name, how, gpu):
    kernel = Kernel(KERNELS[name], ORDERS["Triton 3.3 and later"], **how)
    assert launched(kernel) == kernel.arrived
    assert kernel.short == 0


@pytest.mark.parametrize("name", KERNELS)
def test_the_launcher_of_an_older_triton_is_compared_too(name, gpu, monkeypatch):
    monkeypatch.setattr(Kernel, "warmup", _warm_up_as_before)
    agreeing = Kernel(KERNELS[name], ORDERS["Triton 3.1 and 3.2"])
    assert launched(agreeing) == agreeing.arrived
    assert agreeing.short == 2
    other = Kernel(KERNELS[name], OTHER_ORDERS["arguments reversed"])
    assert launched(other) == other.arrived
    assert other.short == 0


def _warm_up_as_before(self, *args, grid, num_warps, **constants):
    self.compiled = OldCompiled(self)
    return self.compiled


def test_a_device_whose_probe_fails_is_launched_on_as_documented(gpu, monkeypatch):
    monkeypatch.setattr(launching, "takes_addresses", lambda device: False)
    kernel = Kernel(KERNELS["change_kernel"], ORDERS["Triton 3.3 and later"])
    assert launched(kernel) == kernel.arrived
    assert kernel.short == 0


def test_the_launcher_is_put_back_also_after_a_failure(gpu):
    kernel = Kernel(KERNELS["change_kernel"], ORDERS["Triton 3.3 and later"])
    compiled = kernel.warmup(grid=(1,), num_warps=4)
    before = compiled.run

    def fails():
        raise RuntimeError("Triton Error [CUDA]: launch failure")

    with pytest.raises(RuntimeError, match="launch failure"):
        _torch.seen_by_launcher(compiled, fails)
    assert compiled.run == before


# --- the probe, on memory of its own --------------------------------------------------------------


class Probe:
    """A stand-in for the probe's kernel, whose launcher writes as `write` says."""

    def __init__(self, write):
        self.write = write
        self.arg_names = launching._probe_kernel.arg_names

    def warmup(self, *args, grid, **options):
        self.tensors = args[:2]
        self.compiled = Compiled(self)
        return self.compiled

    def __getitem__(self, grid):
        def run(*args, num_warps, **constants):
            before = where(grid[0]).values()
            self.compiled.run(*before, None, None, None, *args, *constants.values())

        return run

    def launcher(self, *args):
        source, out = self.tensors
        by_address = isinstance(args[9], int)
        self.write(source, out, by_address)


def right(source, out, by_address):
    out[:3] = source[:3] * 7 + 5


def nothing_by_address(source, out, by_address):
    if not by_address:
        right(source, out, by_address)


def beside_it_by_address(source, out, by_address):
    right(source, out, by_address)
    if by_address:
        torch.as_strided(out, (1,), (1,), out.storage_offset() + 20).fill_(9)


def an_error_by_address(source, out, by_address):
    if by_address:
        raise TypeError("Pointer argument must be a tensor")
    right(source, out, by_address)


@pytest.mark.parametrize(
    ("write", "told"),
    [(right, True), (nothing_by_address, False), (beside_it_by_address, False),
     (an_error_by_address, False)],
)  # fmt: skip
def test_the_probe_believes_only_what_it_finds_in_its_own_buffer(write, told, monkeypatch):
    monkeypatch.setattr(launching, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(launching, "_probe_kernel", Probe(write))
    monkeypatch.setattr(launching, "_takes_addresses", {})
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *mode: 0)
    assert launching.takes_addresses(torch.device("cpu")) is told
    assert launching._takes_addresses == {None: told}


def test_nothing_is_tried_out_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(launching, "_takes_addresses", {})
    monkeypatch.setattr(launching, "capturing", lambda: True)
    assert not launching.takes_addresses(CUDA)
    assert launching._takes_addresses == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
@pytest.mark.parametrize("apart", [64, 56])
def test_the_probe_writes_only_if_its_pointers_lie_as_they_should(apart):
    cells = torch.arange(32)
    launching._probe_kernel[(3,)](cells[8:16], cells[16:], 7, 5, APART=apart, CELLS=8)
    expected = torch.arange(32)
    if apart == 64:
        expected[16:19] = cells[8:11] * 7 + 5
    assert torch.equal(cells, expected)


@pytest.mark.gpu
def test_on_a_gpu_the_short_way_is_taken():
    from gradilocks import GradientControl, optim

    device = torch.device("cuda", torch.cuda.current_device())
    params = [torch.nn.Parameter(torch.ones(70, device=device))]
    control = GradientControl(optim.AdamW(params, lr=0.1), clip=1.0)
    for _ in range(3):
        control.backward(params[0].square().sum())
        control.step()
        control.zero_grad()
    assert launching.takes_addresses(device)
    launches = {
        each for chunking in _chunkings() for many in chunking.launches.values() for each in many
    }
    assert launches
    for launch in launches:
        assert device.index in launch._trusted, launch._kernel.__name__


def _chunkings():
    chunks = importlib.import_module("gradilocks.kernels.chunks")
    return list(chunks._chunkings.values())
