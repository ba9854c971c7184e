"""Shapes of models, and parameters with scaled gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

Shapes = list[tuple[int, ...]]

SCALE, NORM = 2.0**16, 10.0
"""Loss scale, and norm of the unscaled gradients."""


def gpt(vocabulary: int, width: int, layers: int, context: int) -> Shapes:
    """A GPT-2-like model: 12 tensors per layer and 4 more."""
    attention: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: Shapes = [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(attention + mlp) * layers, (width,), (width,)]


def llama(vocabulary: int, width: int, inner: int, kv_width: int, layers: int, head: int) -> Shapes:
    """A LLaMA-like model with grouped queries: 9 tensors per layer and 3 more."""
    attention: Shapes = [(width, width), (kv_width, width), (kv_width, width), (width, width), (width,)]
    mlp: Shapes = [(inner, width), (inner, width), (width, inner), (width,)]
    return [(vocabulary, width), *(attention + mlp) * layers, (width,), (head, width)]


class Workload:
    """Parameters, and the scaled gradients that every step starts from.

    Args:
        shapes: of the parameters.
        device, dtype: of parameters and gradients.
        scale: multiplies the gradients.
        mesh: makes DTensors on a mesh of one rank, as FSDP2 does; None for plain tensors.
    """

    def __init__(
        self, shapes: Shapes, *, device: torch.device, dtype: torch.dtype, scale: float, mesh: Any = None
    ) -> None:
        self.count = sum(map(math.prod, shapes))
        self._shapes, self._device, self._dtype, self._mesh = shapes, device, dtype, mesh
        self._random = random.Random(0)
        self._scaled = list(self._draw(seed=1, deviation=NORM / math.sqrt(self.count) * scale))

    @property
    def eps(self) -> float:
        """eps of AdamW, as large as a gradient clipped to norm 1, so that a wrong multiplier changes the result.

        With the usual 1e-8, AdamW divides by the gradients' own size.
        """
        return 1.0 / math.sqrt(self.count)

    def start(self) -> Iterator[Tensor]:
        """Values of the parameters before the first step, drawn again at each call to save memory."""
        return self._draw(seed=0, deviation=0.02)

    def parameters(self) -> list[nn.Parameter]:
        """New parameters with gradients."""
        params = [nn.Parameter(self._place(tensor)) for tensor in self.start()]
        for param in params:
            param.grad = torch.zeros_like(param)
        return params

    def refill_gradients(self, params: list[nn.Parameter]) -> None:
        """Writes the scaled gradients into the memory of the previous ones."""
        memory = [local(param.grad) for param in params]
        torch._foreach_copy_(memory, self._scaled)
        if self._mesh is not None:  # 0.2 recognizes new gradients of DTensors by the object.
            for param, tensor in zip(params, memory, strict=True):
                param.grad = self._place(tensor)

    def allocate_gradients(self, params: list[nn.Parameter]) -> None:
        """Writes the scaled gradients into new tensors, as after `zero_grad(set_to_none=True)`.

        The order is random, so that every gradient gets another address.
        """
        for i in self._random.sample(range(len(params)), len(params)):
            params[i].grad = self._place(self._scaled[i].clone())

    def _place(self, tensor: Tensor) -> Tensor:
        if self._mesh is None:
            return tensor
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(tensor, self._mesh, [Shard(0)], run_check=False)

    def _draw(self, *, seed: int, deviation: float) -> Iterator[Tensor]:
        generator = torch.Generator(self._device).manual_seed(seed)
        for shape in self._shapes:
            yield torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype).mul_(deviation)


def local(tensor: Any) -> Tensor:
    """The elements of a DTensor on this rank, in the same memory; any other tensor itself."""
    elements: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return elements
