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
from torch.nn import functional as F

from gradilocks.lab.emulate.storage import Storage

__all__ = ["CELLS", "LAYERS", "recurrent_cell", "recurrent_layer"]

Tensor = torch.Tensor
State = tuple[Tensor, ...]
"""The hidden state, and for an LSTM the cell state."""
Gates = Callable[[Tensor, Tensor, State], State]
"""What input and hidden state have become, and the state, enter; the next state leaves."""


class _Weights(NamedTuple):
    """Of one layer in one direction; `projection` makes the hidden state of an LSTM smaller."""

    entering: Tensor
    hidden: Tensor
    entering_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None


def recurrent_cell(
    storage: Storage, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Stands for ``lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` and ``rnn_relu_cell``."""
    return _cell(storage, CELLS[function], *args, **kwargs)


def recurrent_layer(
    storage: Storage, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Stands for ``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``, padded or packed.

    The two take other arguments: input, state, weights, ... or data, sizes of the batches, state,
    weights, ...
    """
    first, second = [*args, *kwargs.values()][:2]
    if not first.numel():  # Nothing to round; what is wrong with it torch says.
        return function(*args, **kwargs)
    if isinstance(second, Tensor) and not second.is_floating_point():
        return _packed(storage, LAYERS[function], *args, **kwargs)
    return _padded(storage, LAYERS[function], *args, **kwargs)


def _cell(
    storage: Storage,
    gates: Gates,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    weights = _stored(storage, _Weights(w_ih, w_hh, b_ih, b_hh, None))
    entered = _entered(storage, input, weights)
    after = _step(storage, gates, weights, entered, _state(storage, hx))
    return after if len(after) > 1 else after[0]


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
    done, *states = _layers(
        storage,
        gates,
        input.flatten(0, 1),
        [rows] * length,
        _state(storage, hx),
        _sorted(params, has_biases, num_layers * (2 if bidirectional else 1)),
        dropout if train else 0.0,
        bidirectional,
    )
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
) -> Any:
    return _layers(
        storage,
        gates,
        data,
        batch_sizes.tolist(),
        _state(storage, hx),
        _sorted(params, has_biases, num_layers * (2 if bidirectional else 1)),
        dropout if train else 0.0,
        bidirectional,
    )


def _layers(
    storage: Storage,
    gates: Gates,
    data: Tensor,
    sizes: list[int],
    state: State,
    weights: list[_Weights],
    dropout: float,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Rows of all steps, one step after the other, enter; theirs and the last states leave."""
    directions = 2 if bidirectional else 1
    last: list[State] = []
    for number, each in enumerate(weights):
        backward = bidirectional and number % 2 == 1
        if number % directions == 0:
            if number and dropout:
                data = F.dropout(data, dropout)
            entering, made = data, []
        start = tuple(part[number] for part in state)
        stored = _stored(storage, each)
        rows, end = _direction(storage, gates, entering, sizes, start, stored, backward)
        made.append(rows)
        last.append(end)
        if len(made) == directions:
            data = torch.cat(made, -1) if bidirectional else rows
    return (data, *(torch.stack(parts) for parts in zip(*last, strict=True)))


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


def _entered(storage: Storage, data: Tensor, weights: _Weights) -> Tensor:
    """What the input becomes before it meets the hidden state, for all steps at once."""
    return storage.store(F.linear(storage.store(data), weights.entering, weights.entering_bias))


def _step(
    storage: Storage, gates: Gates, weights: _Weights, entering: Tensor, state: State
) -> State:
    from_hidden = storage.store(F.linear(state[0], weights.hidden, weights.hidden_bias))
    hidden, *cell = (storage.store(part) for part in gates(entering, from_hidden, state))
    if weights.projection is not None:
        hidden = storage.store(F.linear(hidden, weights.projection))
    return (hidden, *cell)


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


def _state(storage: Storage, state: Tensor | Sequence[Tensor]) -> State:
    parts = (state,) if isinstance(state, Tensor) else state
    return tuple(storage.store(part) for part in parts)


def _stored(storage: Storage, weights: _Weights) -> _Weights:
    return _Weights(
        storage.store(weights.entering),
        storage.store(weights.hidden),
        *(None if each is None else storage.store(each) for each in weights[2:]),
    )


def _sorted(flat: Sequence[Tensor], biased: bool, count: int) -> list[_Weights]:
    """torch's flat list, cut into one entry a layer and direction."""
    each = len(flat) // count
    return [_one(iter(flat[at : at + each]), biased, each) for at in range(0, len(flat), each)]


def _one(weights: Iterator[Tensor], biased: bool, count: int) -> _Weights:
    entering, hidden = next(weights), next(weights)
    entering_bias = next(weights) if biased else None
    hidden_bias = next(weights) if biased else None
    projection = next(weights) if count % 2 else None
    return _Weights(entering, hidden, entering_bias, hidden_bias, projection)


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
