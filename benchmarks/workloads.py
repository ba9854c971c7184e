"""What is measured: the shapes of models, and a workload of parameters and scaled gradients.

The unscaled gradients of every workload have the norm 10, so a limit of 1 clips ten times and a
limit of 1e9 never does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Shapes = list[tuple[int, ...]]

SCALE = 2.0**16
NORM = 10.0


def gpt(vocabulary: int, width: int, layers: int, context: int) -> Iterator[tuple[int, ...]]:
    """A GPT-2-like model: 148 tensors with 12 layers."""
    yield from ((vocabulary, width), (context, width))
    for _ in range(layers):
        yield from ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width))
        yield (width,)
    yield from ((width,), (width,))


def llama(
    vocabulary: int, width: int, inner: int, narrow: int, layers: int
) -> Iterator[tuple[int, ...]]:
    """A LLaMA-like model with grouped keys and values: 201 tensors with 22 layers."""
    yield (vocabulary, width)
    for _ in range(layers):
        yield from ((width, width), (narrow, width), (narrow, width), (width, width))
        yield from ((inner, width), (inner, width), (width, inner), (width,), (width,))
    yield from ((width,), (vocabulary, width))


def vit(width: int, layers: int, classes: int) -> Iterator[tuple[int, ...]]:
    """A vision transformer with extra tokens and a distilled head: 160 tensors with 12 layers."""
    yield from ((1, 1, width), (1, 1, width), (1, 4, width), (1, 197, width))
    yield from ((width, 3, 16, 16), (width,), (width,), (width,))
    for _ in range(layers):
        yield from ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width))
        yield (width,)
    yield from ((width,), (width,), (width, width), (width,))
    yield from ((classes, width), (classes,), (classes // 10, width), (classes // 10,))


def small(width: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Two small linear layers, again and again."""
    for _ in range(layers):
        yield from ((width, width), (width,), (width, width), (width,))


def many(tensors: int, elements: int) -> Iterator[tuple[int, ...]]:
    """As many tensors, a third of them with an odd number of elements."""
    for place in range(tensors):
        yield (elements - place % 3,)


def experts(
    vocabulary: int, width: int, inner: int, layers: int, count: int
) -> Iterator[tuple[int, ...]]:
    """A mixture of experts whose sizes are odd numbers."""
    yield (vocabulary, width)
    for _ in range(layers):
        yield from ((width, width), (width, width), (width, width), (width, width))
        yield from ((width,), (width,), (count, width))
        for _ in range(count):
            yield from ((inner, width), (inner, width), (width, inner))
    yield (width,)


SIZES: dict[str, Callable[[], Shapes]] = {
    "1.1B": lambda: list(llama(32000, 2048, 5632, 256, 22)),
    "124M": lambda: list(gpt(50257, 768, 12, 1024)),
    "22M": lambda: list(vit(384, 12, 1000)),
    "0.3M": lambda: list(small(96, 16)),
    "8M": lambda: list(many(2000, 4000)),
    "1M": lambda: list(gpt(2048, 80, 12, 256)),
    "tiny": lambda: list(small(41, 4)),
    "12 tensors": lambda: list(small(41, 3)),
    "2 tensors": lambda: list(small(41, 1))[:2],
}

EXPERTS: dict[str, Callable[[], Shapes]] = {
    "2.5B": lambda: list(experts(32003, 1031, 501, 24, 64)),
    "tiny": lambda: list(experts(31, 33, 17, 2, 3)),
}


class Workload:
    """Parameters, and the scaled gradients that every round starts from.

    Args:
        shapes: of the parameters.
        device: where all of it lies.
        dtype: of parameters and gradients.
        scale: what the gradients carry.
        fresh: whether the gradients lie elsewhere in memory every round.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        scale: float = SCALE,
        fresh: bool = False,
    ) -> None:
        self._shapes, self._fresh = shapes, fresh
        self._shuffle = random.Random(0)
        self.device, self.dtype = device, dtype
        self.count = sum(math.prod(shape) for shape in shapes)
        self.norm = NORM
        """Of the gradients without their scale."""
        self.scaled = list(self._drawn(seed=1, deviation=NORM / math.sqrt(self.count) * scale))
        self.loss = torch.ones((), device=device, requires_grad=True)

    @property
    def eps(self) -> float:
        """AdamW's, as large as a clipped gradient: a wrong multiplier then shows in the result.

        With the usual 1e-8 AdamW divides by the gradients' own size and nearly any would do.
        """
        return 1.0 / math.sqrt(self.count)

    def start(self) -> Iterator[Tensor]:
        """What the parameters are before the first step; drawn again each time, to save memory."""
        return self._drawn(seed=0, deviation=0.02)

    def parameters(self) -> list[Tensor]:
        """A fresh set of parameters, with room for gradients."""
        made = [tensor.requires_grad_() for tensor in self.start()]
        for param in made:
            param.grad = torch.zeros_like(param)
        return made

    def put_gradients(self, params: list[Tensor]) -> None:
        """Scaled gradients, as backward would leave them."""
        if self._fresh:
            self._put_fresh_gradients(params)
        else:
            torch._foreach_copy_([param.grad for param in params], self.scaled)

    def _put_fresh_gradients(self, params: list[Tensor]) -> None:
        """In tensors that are new, at addresses that the last ones did not have.

        The last ones live until all new ones are there, and the order of allocation is another
        every time, so that hardly an address comes back to a parameter that had it.
        """
        places = list(range(len(params)))
        self._shuffle.shuffle(places)
        fresh = {place: self.scaled[place].clone() for place in places}
        for place, param in enumerate(params):
            param.grad = fresh[place]

    def describe(self, limit: float) -> str:
        """The workload in a few words: `124.4 M in 148 tensors, clipping`."""
        size = f"{self.count / 1e9:.2f} B" if self.count >= 1e9 else f"{self.count / 1e6:.1f} M"
        if self.count < 1e5:
            size = f"{self.count:,}"
        words = [f"{size} in {len(self._shapes)} tensors"]
        if self.dtype is not torch.float32:
            words.append(str(self.dtype).removeprefix("torch."))
        if self._fresh:
            words.append("new gradients every step")
        words.append("clipping" if limit < self.norm else "nothing to clip")
        return ", ".join(words)

    def _drawn(self, *, seed: int, deviation: float) -> Iterator[Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        for shape in self._shapes:
            drawn = torch.randn(shape, generator=generator, device=self.device)
            yield drawn.mul_(deviation).to(self.dtype)
