"""Launching the same kernel again and again without asking Triton each time which one it is.

Triton looks at every argument of every launch to find the compiled kernel that fits: some 30 us a
launch. Here the search is done once. The kernels are declared so that neither the value of a number
nor the alignment of a pointer changes what is compiled, so what was found the first time fits ever
after, and is handed to Triton's own launcher.

That launcher is undocumented and believes what it is given: in another version's order a number
may become an address. So it is never used on trust. The first launch of every kernel goes the way
that Triton documents, and what Triton itself then hands to the launcher is compared, place by
place, with what would be handed over here; and once a device, a kernel that touches nothing but a
buffer of its own shows that addresses serve in place of tensors. If anything differs, every launch
of that kernel goes the documented way: slower, and right.
"""

# Kernel arguments have no types that a checker knows, and tl.constexpr names are capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from gradilocks._torch import (
    compile_kernel,
    constants_taken,
    current_device,
    current_stream,
    plain_launch,
    seen_by_launcher,
    short_launcher,
)
from gradilocks.kernels import native
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.kernels.failure import KernelFailed, report

__all__ = ["TYPES", "BoundLaunch", "Launch", "launch_for", "takes_addresses", "unspecialized"]

TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}
"""What kernels are told of a tensor's dtype."""


class Launch:
    """One kernel with its constants.

    Args:
        kernel: made by triton.jit.
        warps: how many warps a program has.
        constants: the kernel's tl.constexpr arguments, all of them, by name; they come last.
    """

    def __init__(self, kernel: Any, warps: int, constants: tuple[tuple[str, Any], ...]) -> None:
        self._kernel, self._warps, self._constants = kernel, warps, dict(constants)
        names = [name for name in kernel.arg_names if name in self._constants]
        self._tail = tuple([self._constants[name] for name in names])
        self.compiled: dict[int, Any] = {}
        self._trusted: dict[int, Callable[..., object]] = {}
        """By device: the short way, where the launcher was seen to agree with it."""

    def prepare(self, device: torch.device, *args: Any) -> None:
        """Compiles without running, so that of several launches all are possible or none is tried.

        Raises:
            KernelFailed: it does not compile.
        """
        if device.type != "cuda" or device.index in self.compiled:
            return
        try:
            with torch.cuda.device(device.index):
                compiled = compile_kernel(
                    self._kernel, args, num_warps=self._warps, **self._constants
                )
        except Exception as error:  # A compiler may fail in any way.
            # Not its fault: no memory, what somebody else's kernel has done, or a capture.
            if "out of memory" in str(error) or "Triton Error [CUDA]" in str(error) or capturing():
                raise
            raise self.failed(device, error) from error
        self.compiled[device.index] = compiled

    def failed(self, device: torch.device, error: Exception) -> KernelFailed:
        """Says so, once, and has plain torch serve the device from here on."""
        name = getattr(self._kernel, "__name__", "a kernel")
        report(device, f"{name} does not compile", error)
        return KernelFailed(f"{name}: {error}")

    def __call__(self, programs: int, device: torch.device, *args: Any) -> None:
        """Runs `programs` programs on the device's current stream."""
        index = device.index
        launch = self._trusted.get(index)
        if (
            launch is None
            or current_device() != index
            or launch(programs, current_stream(index), *args) is False
        ):
            self._launch(programs, device, args)

    def bind(
        self,
        programs: int,
        device: torch.device,
        args: tuple[Any, ...],
        changing: tuple[int, ...] = (),
    ) -> BoundLaunch:
        """The same launch again and again, of which some arguments change.

        Args:
            programs, device: as in a call.
            args: the others are not looked at again, and are held.
            changing: the places of those that each call brings.
        """
        return BoundLaunch(self, programs, device, args, changing)

    def quick(
        self, programs: int, index: int, args: tuple[Any, ...], changing: tuple[int, ...]
    ) -> Callable[..., object] | None:
        """What launches on these arguments from C++; None if that is not built, or not trusted."""
        bind: Any = getattr(self._trusted.get(index), "bind", None)
        bound: Callable[..., object] | None = (
            None if bind is None else bind(programs, args, changing)
        )
        return bound

    def _launch(self, programs: int, device: torch.device, args: tuple[Any, ...]) -> None:
        index = device.index
        if device.type != "cuda":  # Interpreted.
            self._as_documented(programs, args)
        elif current_device() != index:
            with torch.cuda.device(index):
                self(programs, device, *args)
        else:
            self.prepare(device, *args)
            constants = self.launch_and_compare(programs, index, args)
            if constants is not None and takes_addresses(device):
                compiled = self.compiled[index]
                quick = None if index not in _by_driver else by_driver(compiled, index, args)
                self._trusted[index] = quick or short_launcher(compiled, constants)

    def launch_and_compare(
        self, programs: int, index: int, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Launches as Triton documents it, and compares what Triton hands to its launcher.

        Returns:
            The constants that the launcher wants after `args`, if all else is as `short_launcher`
            has it; else None.
        """
        compiled = self.compiled[index]
        seen = seen_by_launcher(compiled, lambda: self._as_documented(programs, args))
        if seen is None:
            return None
        return constants_taken(seen, compiled, programs, current_stream(index), args, self._tail)

    def _as_documented(self, programs: int, args: tuple[Any, ...]) -> Any:
        return self._kernel[(programs,)](*args, num_warps=self._warps, **self._constants)


class BoundLaunch:
    """A kernel with its programs and arguments, called with those of them that have changed.

    Made by `Launch.bind`. From its second call on C++ hands the driver what it has read from the
    arguments at the first, where that is built.
    """

    __slots__ = ("_args", "_changing", "_index", "_launch", "_programs", "_quick", "_where")

    def __init__(
        self,
        launch: Launch,
        programs: int,
        device: torch.device,
        args: tuple[Any, ...],
        changing: tuple[int, ...],
    ) -> None:
        self._launch, self._programs, self._changing = launch, programs, changing
        self._where = device
        self._index = device.index
        # What is given at each call need not be held.
        self._args = tuple([0 if k in changing else arg for k, arg in enumerate(args)])
        self._quick: Callable[..., object] | None = None

    @property
    def quick(self) -> Callable[..., object] | None:
        """What launches it from C++, called with the stream and what has changed.

        It returns False, and has done nothing, in a thread that has not used the GPU yet. None
        before it has run, and where C++ launches nothing. Its device is to be the current one.
        """
        return self._quick

    def __call__(self, *changed: Any) -> None:
        """Runs it on the device's current stream; `changed` in the order of `changing`."""
        index, quick = self._index, self._quick
        if (
            quick is None
            or current_device() != index
            or quick(current_stream(index), *changed) is False
        ):
            args = list(self._args)
            for place, value in zip(self._changing, changed, strict=True):
                args[place] = value
            self._launch(self._programs, self._where, *args)
            if quick is None:
                self._quick = self._launch.quick(self._programs, index, self._args, self._changing)


def by_driver(compiled: Any, index: int, args: tuple[Any, ...]) -> Callable[..., object] | None:
    """What launches through the driver, from C++, called as `short_launcher`'s is.

    None without the native library, or if the kernel's own parameters, as the driver tells them,
    are not such as `args`. It returns False, and has done nothing, in a thread that has not used
    the GPU yet.
    """
    library, plain = native.library(), plain_launch(compiled)
    if library is None or plain is None:
        return None
    launch: Callable[..., object] | None = library.cuda_launch(*plain, index, args)
    return launch


_GUARD, _CELLS = 64, 8
"""Cells before and after those that the probe may touch, and cells that it reads or writes."""
_takes_addresses: dict[int, bool] = {}
_by_driver: set[int] = set()
"""The GPUs on which a launch through the driver has done what it should."""


def takes_addresses(device: torch.device) -> bool:
    """Whether the launcher on this device takes addresses in place of tensors; tried out once.

    All pointers of the probe are into a buffer with wide margins, and it writes only if they lie as
    far apart as they should, so that no mistake about its arguments can reach other memory. While a
    CUDA graph is captured nothing can be tried out: False, for the moment.
    """
    told = _takes_addresses.get(device.index)
    if told is None and not capturing():
        debugged = torch.cuda.get_sync_debug_mode()
        if debugged:  # It waits, this once, whatever the user has set.
            torch.cuda.set_sync_debug_mode(0)
        try:
            told = _probe(device)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # A launcher of another time may fail in any way.
            told = False
        finally:
            if debugged:
                torch.cuda.set_sync_debug_mode(debugged)
        _takes_addresses[device.index] = told
    return bool(told)


def _probe(device: torch.device) -> bool:
    cells = torch.full((2 * _GUARD + 2 * _CELLS,), -1, dtype=torch.int64, device=device)
    source, out = cells[_GUARD : _GUARD + _CELLS], cells[_GUARD + _CELLS : -_GUARD]
    source.copy_(torch.arange(_CELLS, device=device))
    expected = cells.clone()
    expected[_GUARD + _CELLS :][:3] = 7 * source[:3] + 5
    options = {"APART": 8 * _CELLS, "CELLS": _CELLS}
    launch = Launch(_probe_kernel, 1, tuple(options.items()))
    compiled = compile_kernel(_probe_kernel, (source, out, 7, 5), num_warps=1, **options)
    launch.compiled[device.index] = compiled
    constants = launch.launch_and_compare(3, device.index, (source, out, 7, 5))
    if constants is None or not torch.equal(cells, expected):
        return False
    args, stream = (source, out, 7, 5), current_stream(device.index)
    out.fill_(-1)
    short_launcher(compiled, constants)(3, stream, *args)
    if not torch.equal(cells, expected):
        return False
    quick = by_driver(compiled, device.index, args)
    if quick is not None:
        out.fill_(-1)
        if quick(3, stream, *args) and torch.equal(cells, expected):
            _by_driver.add(device.index)
    return True


def unspecialized(function):
    """triton.jit, compiled alike whatever the numbers and however the tables are aligned."""
    names = list(inspect.signature(function).parameters)
    return triton.jit(
        function,
        do_not_specialize=[name for name in names if name.islower() and name[-4:] != "_ptr"],
        do_not_specialize_on_alignment=[name for name in names if name[-4:] == "_ptr"],
    )


@unspecialized
def _probe_kernel(source_ptr, out_ptr, factor, more, APART: tl.constexpr, CELLS: tl.constexpr):
    """out = source * factor + more, if `out` lies APART bytes behind `source`; a program a cell."""
    cell = tl.program_id(0)
    inside = (out_ptr.to(tl.int64) - source_ptr.to(tl.int64) == APART) & (cell < CELLS)
    value = tl.load(source_ptr + cell, mask=inside, other=0)
    tl.store(out_ptr + cell, value * factor + more, mask=inside)


@functools.cache
def launch_for(kernel: Any, warps: int, like: Hashable = None, **constants: Any) -> Launch:
    """The Launch of a kernel with these constants, made once.

    Args:
        kernel: made by triton.jit.
        warps: how many warps a program has.
        like: the dtypes of those arguments that do not always have the same.
        constants: by name.
    """
    return Launch(kernel, warps, tuple(constants.items()))
