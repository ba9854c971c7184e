"""Launching the same kernel again and again without asking Triton each time which one it is.

Triton looks at every argument of every launch to find the compiled kernel that fits: some 30 us a
launch. Here the search is done once. The kernels are declared so that
neither the value of a number nor the alignment of a pointer changes what is compiled, so what was
found the first time fits ever after.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
import triton

from gradilocks import kernels
from gradilocks._torch import compile_kernel, current_device, current_stream, launch_compiled
from gradilocks.kernels import KernelFailed
from gradilocks.kernels.captured import capturing

__all__ = ["Launch", "launch_for"]

# Before 3.3 a compiled kernel wants other arguments, and is searched for at every launch.
_SHORT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


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
        self._compiled: dict[int, Any] = {}
        self._short = _SHORT

    def prepare(self, device: torch.device, *args: Any) -> None:
        """Compiles without running, so that of several launches all are possible or none is tried.

        Raises:
            KernelFailed: it does not compile.
        """
        if device.type != "cuda" or device.index in self._compiled:
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
        self._compiled[device.index] = compiled

    def failed(self, device: torch.device, error: Exception) -> KernelFailed:
        """Says so, once, and has plain torch serve the device from here on."""
        name = getattr(self._kernel, "__name__", "a kernel")
        kernels.give_up(device, f"{name} does not compile", error)
        return KernelFailed(f"{name}: {error}")

    def __call__(self, programs: int, device: torch.device, *args: Any) -> None:
        """Runs `programs` programs on the device's current stream."""
        index = device.index
        compiled = self._compiled.get(index)
        if compiled is None and device.type == "cuda":
            self.prepare(device, *args)
            compiled = self._compiled[index]
        if compiled is None:
            self._search(programs, args)
        elif current_device() == index:
            if not self._short:
                self._search(programs, args)
                return
            # Addresses, not tensors: for a tensor the launcher asks the driver whose memory it is.
            try:
                addresses = [arg if type(arg) is int else arg.data_ptr() for arg in args]
                launch_compiled(compiled, programs, current_stream(index), addresses, self._tail)
            except TypeError:  # A Triton that wants other arguments again.
                self._short = False
                self._search(programs, args)
        else:
            with torch.cuda.device(index):
                self(programs, device, *args)

    def _search(self, programs: int, args: tuple[Any, ...]) -> Any:
        return self._kernel[(programs,)](*args, num_warps=self._warps, **self._constants)


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
