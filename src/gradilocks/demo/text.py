"""The corpus: Python's own documentation enters, batches of characters leave.

The text is what ``help("topics")`` prints, shipped with every full Python as ``pydoc_data.topics``,
so the demo downloads nothing. It differs a little between Python versions, and the vocabulary with
it; within one version the batches depend on the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradilocks.errors import GradilocksError


@dataclass(frozen=True)
class Text:
    """A text as numbers: ``codes[i]`` is the place of character ``i`` in ``vocabulary``."""

    vocabulary: str
    codes: torch.Tensor


def python_documentation() -> Text:
    """Reads the corpus: every help topic, in alphabetical order, joined into one text.

    Raises:
        GradilocksError: this Python was installed without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise GradilocksError(
            "The demo trains on Python's own documentation, the module pydoc_data.topics, and this "
            "Python came without it. Install the full standard library of this Python."
        ) from error
    return encode("".join(topics[name] for name in sorted(topics)))


def encode(text: str) -> Text:
    """Numbers the characters of a text by their place in its sorted vocabulary."""
    vocabulary = "".join(sorted(set(text)))
    place = {character: index for index, character in enumerate(vocabulary)}
    return Text(vocabulary, torch.tensor([place[character] for character in text]))


class Batches:
    """Endless random windows of a text, each with the same window one character later.

    Args:
        text: what to draw from.
        rows: how many windows a batch has.
        length: how many characters a window has.
        seed: batches are a function of the text, the shape and this number alone.
    """

    def __init__(self, text: Text, *, rows: int, length: int, seed: int) -> None:
        if len(text.codes) <= length:
            raise ValueError(
                f"length must be less than the {len(text.codes)} characters of the text, "
                f"got {length}."
            )
        self._codes = text.codes
        self._rows = rows
        self._window = torch.arange(length)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next batch: inputs and targets, both ``[rows, length]``."""
        last_start = len(self._codes) - len(self._window)
        starts = torch.randint(last_start, (self._rows, 1), generator=self._generator)
        places = starts + self._window
        return self._codes[places], self._codes[places + 1]
