"""Recurrent layers and cells, taken apart into their products so that each is stored.

torch runs ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one call, and in half precision keeps the
hidden state, the cell state and what enters the gates in the format from one step to the next.
So it is here; the gates themselves are computed in float32. Weights are stored once a call, and
their gradients are summed over the steps in float32, as one product over all of them sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gradilocks.lab.emulate.rounding import Storage

__all__ = ["CELLS", "LAYERS", "recurrent_cell", "recurrent_layer"]

State = tuple[Tensor, ...]
"""The hidden state, and for an LSTM the cell state."""
Gates = Callable[[Tensor, Tensor, State], State]
"""What input and hidden state have become, and the state, enter; the next state leaves."""


def _lstm(entering: Tensor, hidden: Tensor, state: State) -> State:
    gate_in, gate_forget, new, gate_out = (entering + hidden).chunk(4, -1)
    cell = gate_forget.sigmoid() * state[1] + gate_in.sigmoid() * new.tanh()
    return gate_out.sigmoid() * cell.tanh(), cell


def _gru(entering: Tensor, hidden: Tensor, state: State) -> State:
    (reset, update, new), (h_reset, h_update, h_new) = entering.chunk(3, -1), hidden.chunk(3, -1)
    kept = (update + h_update).sigmoid()
    made = (new + (reset + h_reset).sigmoid() * h_new).tanh()
    return ((state[0] - made) * kept + made,)


def _tanh(entering: Tensor, hidden: Tensor, state: State) -> State:
    return ((entering + hidden).tanh(),)


def _relu(entering: Tensor, hidden: Tensor, state: State) -> State:
    return ((entering + hidden).relu(),)


LAYERS: dict[Callable[..., Any], Gates] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
}
CELLS: dict[Callable[..., Any], Gates] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}


class _Weights(NamedTuple):
    """Of one layer in one direction; `projection` makes the hidden state of an LSTM smaller."""

    entering: Tensor
    hidden: Tensor
    entering_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None = None

    def stored(self, storage: Storage) -> _Weights:
        rest = (None if each is None else storage.store(each) for each in self[2:])
        return _Weights(storage.store(self.entering), storage.store(self.hidden), *rest)


def recurrent_cell(
    storage: Storage,
    function: Callable[..., Any],
    /,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Stands for ``lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` and ``rnn_relu_cell``."""
    weights = _Weights(w_ih, w_hh, b_ih, b_hh).stored(storage)
    entered = _entered(storage, input, weights)
    after = _step(storage, CELLS[function], weights, entered, _state(storage, hx))
    return after if len(after) > 1 else after[0]


def recurrent_layer(
    storage: Storage, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Stands for ``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``, padded or packed.

    The two take other arguments: input, state, weights, ... or data, sizes of the batches, state,
    weights, ...
    """
    first, second = [*args, *kwargs.values()][:2]
    if not first.numel():  # Nothing to round; what is wrong with it torch says.
        return function(*args, **kwargs)
    packed = isinstance(second, Tensor) and not second.is_floating_point()
    return (_packed if packed else _padded)(storage, LAYERS[function], *args, **kwargs)


def _padded(
    storage: Storage,
    gates: Gates,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    if batch_first:
        input = input.transpose(0, 1)
    length, rows = input.shape[:2]
    sizes = torch.full((length,), rows, device="cpu")
    settings = has_biases, num_layers, dropout, train, bidirectional
    done, *states = _packed(storage, gates, input.flatten(0, 1), sizes, hx, params, *settings)
    done = done.view(length, rows, -1)
    return (done.transpose(0, 1) if batch_first else done, *states)


def _packed(
    storage: Storage,
    gates: Gates,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Rows of all steps, one step after the other, enter; theirs and the last states leave."""
    directions = 2 if bidirectional else 1
    sizes, state = batch_sizes.tolist(), _state(storage, hx)
    last: list[State] = []
    for number, weights in enumerate(_by_layer(params, has_biases, num_layers * directions)):
        if number % directions == 0:
            if number and dropout and train:
                data = F.dropout(data, dropout)
            entering, made = data, []
        start = tuple(part[number] for part in state)
        backward = bidirectional and number % 2 == 1
        stored = weights.stored(storage)
        rows, end = _direction(storage, gates, entering, sizes, start, stored, backward)
        made.append(rows)
        last.append(end)
        if len(made) == directions:
            data = torch.cat(made, -1) if bidirectional else rows
    return (data, *(torch.stack(parts) for parts in zip(*last, strict=True)))


def _by_layer(params: Sequence[Tensor], has_biases: bool, count: int) -> Iterator[_Weights]:
    """torch's flat list, cut into one entry a layer and direction."""
    size = len(params) // count
    for at in range(0, len(params), size):
        entering, hidden, *rest = params[at : at + size]
        entering_bias, hidden_bias = rest[:2] if has_biases else (None, None)
        projection = rest[-1] if size % 2 else None
        yield _Weights(entering, hidden, entering_bias, hidden_bias, projection)


def _direction(
    storage: Storage,
    gates: Gates,
    data: Tensor,
    sizes: list[int],
    start: State,
    weights: _Weights,
    backward: bool,
) -> tuple[Tensor, State]:
    """One layer in one direction. In a packed sequence the shorter ones end, or begin, later."""
    steps = torch.split(_entered(storage, data, weights), sizes)
    made: list[Tensor] = []
    ended: list[State] = []
    state = tuple(part[: sizes[-1] if backward else sizes[0]] for part in start)
    for step in reversed(steps) if backward else steps:
        rows, held = step.shape[0], state[0].shape[0]
        if rows < held:
            ended.append(tuple(part[rows:] for part in state))
            state = tuple(part[:rows] for part in state)
        elif rows > held:
            state = tuple(
                torch.cat((part, first[held:rows]))
                for part, first in zip(state, start, strict=True)
            )
        state = _step(storage, gates, weights, step, state)
        made.append(state[0])
    if backward:
        made.reverse()
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(made), state


def _step(
    storage: Storage, gates: Gates, weights: _Weights, entering: Tensor, state: State
) -> State:
    from_hidden = storage.store(F.linear(state[0], weights.hidden, weights.hidden_bias))
    hidden, *cell = (storage.store(part) for part in gates(entering, from_hidden, state))
    if weights.projection is not None:
        hidden = storage.store(F.linear(hidden, weights.projection))
    return (hidden, *cell)


def _entered(storage: Storage, data: Tensor, weights: _Weights) -> Tensor:
    """What the input becomes before it meets the hidden state, for all steps at once."""
    return storage.store(F.linear(storage.store(data), weights.entering, weights.entering_bias))


def _state(storage: Storage, state: Tensor | Sequence[Tensor]) -> State:
    return tuple(map(storage.store, (state,) if isinstance(state, Tensor) else state))
