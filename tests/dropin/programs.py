"""Random programs of scaler operations, run on torch's classes and on ours.

A program is a Setup (optimizers, dtypes, scaler settings) and a list of operations. `run` executes it on both sides and
compares them after every operation: parameters, gradients, optimizer state, scale, growth tracker, return values and
errors. Situations in which torch is defective are left out, because test_scaler_defects.py tests each of them.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.amp.grad_scaler import OptState

import gradilocks

STABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""A fixed seed and no database: every run draws the same programs."""

KINDS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD, momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.01),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=False),
    "fused SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "fused SGD, momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "fused Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, fused=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "fused Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}


@dataclass(frozen=True)
class Setup:
    """Optimizers with the dtype of their parameters, and the settings of the scaler."""

    kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    large: bool = False
    enabled: bool = True
    init_scale: float = 1024.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 3


@dataclass(frozen=True)
class Op:
    """One operation: its name, the index of an optimizer (the count of optimizers for all), and two arguments."""

    name: str
    which: int = 0
    what: Any = None
    how: Any = None


class Side:
    """Parameters, optimizers, scaler and clip functions of one contender."""

    def __init__(self, setup: Setup, scaler_class: type, clip: Any) -> None:
        self.setup, self.scaler_class, self.clip = setup, scaler_class, clip
        generator = torch.Generator().manual_seed(7)
        shapes = ((3,), (70_000,)) if setup.large else ((3,), (2, 2))
        self.params = [
            [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
            for dtype in setup.dtypes
        ]
        self.optimizers = [KINDS[kind](params) for kind, params in zip(setup.kinds, self.params, strict=True)]
        self.scaler = self.new_scaler(
            init_scale=setup.init_scale,
            growth_factor=setup.growth_factor,
            backoff_factor=setup.backoff_factor,
            growth_interval=setup.growth_interval,
        )
        self.saved = self.scaler.state_dict()

    def new_scaler(self, **options: Any) -> Any:
        return self.scaler_class("cpu", enabled=self.setup.enabled, **options)

    def loss(self, which: int) -> Tensor:
        chosen = self.params if which >= len(self.params) else [self.params[which]]
        total = torch.zeros(())
        for number, params in enumerate(chosen):
            for place, param in enumerate(params):
                weight = torch.linspace(-1.0, 1.5 + which + number, param.numel())
                wide = param if param.dtype is torch.float64 else param.float()
                total = total + (wide.reshape(-1) * weight * (place + 1)).sum() + (wide * wide).mean()
        return total

    def of(self, which: int) -> list[Tensor]:
        return self.params[which] if which < len(self.params) else [p for params in self.params for p in params]


# --- operations -------------------------------------------------------------------------------------------------------


def _backward(side: Side, op: Op) -> None:
    losses = [side.loss(op.which), side.loss(len(side.params))] if op.how == "list" else [side.loss(op.which)]
    for loss in side.scaler.scale(losses):
        loss.backward()


def _plant(side: Side, op: Op) -> None:
    param = side.of(op.which)[op.how]
    if param.grad is not None:
        param.grad[(0,) * param.dim()] = op.what


def _write(side: Side, op: Op) -> None:
    for param in side.of(op.which):
        if param.grad is not None and op.how == "in place":
            param.grad.mul_(0.5)
        elif param.grad is not None and op.how == "data":
            param.grad.data.mul_(0.5)
        elif param.grad is not None:
            param.grad = param.grad * 0.5


def _step(side: Side, op: Op) -> Any:
    positional = {"positional closure": (lambda: 1.5,), "positional None": (None,)}.get(op.how, ())
    keywords = {"closure": None} if op.how == "keyword closure" else {}
    return side.scaler.step(side.optimizers[op.which], *positional, **keywords)


def _zero_grad(side: Side, op: Op) -> None:
    for optimizer in side.optimizers if op.which >= len(side.optimizers) else [side.optimizers[op.which]]:
        optimizer.zero_grad(set_to_none=op.how)


def _update(side: Side, op: Op) -> None:
    values: dict[str, Callable[[], Any]] = {
        "tensor": lambda: torch.tensor(op.what),
        "two elements": lambda: torch.ones(2),
        "requires grad": lambda: torch.ones((), requires_grad=True),
        "value": lambda: op.what,
    }
    side.scaler.update(*([values[op.how]()] if op.how in values else []))


def _clip_value(side: Side, op: Op) -> None:
    params = [p for p in side.of(op.which) if p.grad is not None]
    if params:  # torch raises on an empty list.
        side.clip.clip_grad_value_(params, op.what)


def _set(side: Side, op: Op) -> None:
    value = op.what
    if op.name == "set_growth_interval":  # Defect B6 is an interval below the tracker.
        value = max(value, side.scaler._get_growth_tracker() + 1)
    getattr(side.scaler, op.name)(value)


def _pickle(side: Side, op: Op) -> None:
    side.scaler = pickle.loads(pickle.dumps(side.scaler))


def _save(side: Side, op: Op) -> dict[str, Any]:
    side.saved = side.scaler.state_dict()
    return side.saved


_OPERATIONS: dict[str, Callable[[Side, Op], Any]] = {
    "backward": _backward,
    "plant": _plant,
    "write": _write,
    "unscale_": lambda side, op: side.scaler.unscale_(side.optimizers[op.which]),
    "step": _step,
    "update": _update,
    "zero_grad": _zero_grad,
    "clip_value": _clip_value,
    "set_growth_interval": _set,
    "set_growth_factor": _set,
    "set_backoff_factor": _set,
    "get_scale": lambda side, op: side.scaler.get_scale(),
    "found_inf": lambda side, op: [
        float(flag) for flag in side.scaler._check_inf_per_device(side.optimizers[op.which]).values()
    ],
    "pickle": _pickle,
    "save": _save,
    "load saved": lambda side, op: side.scaler.load_state_dict(side.saved),
    "load empty": lambda side, op: side.scaler.load_state_dict({}),
}


def _load_into_new_scalers(torchs: Side, ours: Side, how: str) -> None:
    """Continues on both sides with a new scaler that has loaded its own or the other side's state."""
    states = [torchs.scaler.state_dict(), ours.scaler.state_dict()]
    assert states[0] == states[1]
    for side, state in zip((torchs, ours), states[::-1] if how == "crosswise" else states, strict=True):
        side.scaler = side.new_scaler(init_scale=2.0, growth_factor=8.0, backoff_factor=0.125, growth_interval=77)
        side.scaler.load_state_dict(state)


# --- comparison -------------------------------------------------------------------------------------------------------


def run(setup: Setup, ops: list[Op], counts: Counter[str]) -> None:
    """Runs `ops` on both sides and compares after each.

    `counts` receives what happened, so that a test can assert that the programs were not idle.
    """
    torchs, ours = Side(setup, torch.amp.GradScaler, torch.nn.utils), Side(setup, gradilocks.GradScaler, gradilocks)
    for number, op in enumerate(ops):
        where = f"after operation {number}, {op}"
        if op.name == "new scaler":
            _load_into_new_scalers(torchs, ours, op.how)
            counts["state loaded " + op.how] += 1
        elif not _torch_is_defective(torchs, op):
            expected, got = _attempt(torchs, op), _attempt(ours, op)
            _compare_results(expected, got, where)
            counts[op.name if expected[1] is None else str(expected[1])[:40]] += 1
        _compare_sides(torchs, ours, where)


def _attempt(side: Side, op: Op) -> tuple[Any, Exception | None]:
    """The value or the error of an operation."""
    try:
        return _OPERATIONS[op.name](side, op), None
    except Exception as error:
        return None, error


def _torch_is_defective(side: Side, op: Op) -> bool:
    grads = [p.grad for p in side.of(op.which) if p.grad is not None]
    is_finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
    if op.name != "step" or not side.setup.enabled:
        return False
    kind, optimizer = side.setup.kinds[op.which], side.optimizers[op.which]
    state = side.scaler._per_optimizer_states.get(id(optimizer))
    flags = state["found_inf_per_device"].values() if state else ()
    if kind.startswith("fused") and state and state["stage"] is OptState.UNSCALED and not flags:
        return bool(grads)  # unscale_ before backward: the optimizer raises, and B5 leaves grad_scale behind.
    if kind != "fused SGD, momentum" or any("momentum_buffer" in optimizer.state.get(p, {}) for p in side.of(op.which)):
        return False
    return not is_finite or any(flag.item() for flag in flags)  # B14: a skipped first step.


def _compare_results(expected: tuple[Any, Any], got: tuple[Any, Any], where: str) -> None:
    (value, error), (own_value, own_error) = expected, got
    if error is not None:
        assert isinstance(own_error, type(error)), f"torch raised {error!r}, ours {own_error!r} {where}"
        assert str(own_error).startswith(str(error)), f"{own_error!r} {where}"
    elif own_error is not None:
        raise AssertionError(f"only ours raised, {where}") from own_error
    elif isinstance(value, Tensor):
        compare_tensors(value, own_value, f"the value {where}")
    else:
        assert own_value == value, where


def _compare_sides(torchs: Side, ours: Side, where: str) -> None:
    assert ours.scaler.get_scale() == torchs.scaler.get_scale(), f"scale {where}"
    assert ours.scaler._get_growth_tracker() == torchs.scaler._get_growth_tracker(), f"tracker {where}"
    assert ours.scaler.state_dict() == torchs.scaler.state_dict(), f"state_dict {where}"
    for theirs, mine in zip(torchs.optimizers, ours.optimizers, strict=True):
        if torchs.setup.enabled:
            expected = torchs.scaler._per_optimizer_states.get(id(theirs), {})
            got = ours.scaler._per_optimizer_states.get(id(mine), {})
            assert got.get("stage") == expected.get("stage"), f"stage {where}"
        states = list(theirs.state.values()), list(mine.state.values())
        for expected, got in zip(*states, strict=True):
            assert expected.keys() == got.keys(), f"optimizer state {where}"
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    compare_tensors(value, got[key], f"optimizer state {key} {where}")
                else:
                    assert got[key] == value, f"optimizer state {key} {where}"
    for place, (expected, got) in enumerate(zip(torchs.of(9), ours.of(9), strict=True)):
        compare_tensors(expected, got, f"parameter {place} {where}")
        assert (expected.grad is None) == (got.grad is None), f"gradient {place} {where}"
        if expected.grad is not None:
            compare_tensors(expected.grad, got.grad, f"gradient {place} {where}")


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def compare_tensors(expected: Tensor, got: Tensor, what: str) -> None:
    """Asserts equality bit for bit; any NaN equals any other."""
    expected, got = expected.detach(), got.detach()
    assert got.dtype is expected.dtype, what
    assert got.shape == expected.shape, what
    bits = _BITS[expected.dtype]
    same = (expected.view(bits) == got.view(bits)) | (expected.isnan() & got.isnan())
    assert bool(same.all()), f"{what}: expected {expected}, got {got}"


# --- drawing programs -------------------------------------------------------------------------------------------------
# Strategies are cached, because making one takes longer than drawing from it.

_SPECIAL = st.sampled_from([math.inf, -math.inf, math.nan])
_ONE_IN_TEN = st.integers(0, 9)


@functools.cache
def below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


@functools.cache
def setups() -> st.SearchStrategy[Setup]:
    """One to three optimizers."""
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3)

    @st.composite
    def draw_setup(draw: Any) -> Setup:
        chosen, large = draw(kinds), draw(_ONE_IN_TEN) == 7
        return Setup(
            kinds=tuple(chosen),
            dtypes=tuple(torch.float32 if large else draw(dtypes) for _ in chosen),
            large=large,
            enabled=draw(_ONE_IN_TEN) != 7,
            init_scale=draw(st.sampled_from([1.0, 3.0, 1024.0, 65536.0])),
            growth_factor=draw(st.sampled_from([2.0, 1.5, 16.0])),
            backoff_factor=draw(st.sampled_from([0.5, 0.3])),
            growth_interval=draw(st.sampled_from([1, 2, 3, 2000])),
        )

    return draw_setup()


def _ops(name: str, which: Any = None, what: Any = None, how: Any = None) -> st.SearchStrategy[Op]:
    choose = [st.just(given) if not isinstance(given, list) else st.sampled_from(given) for given in (what, how)]
    return st.builds(Op, st.just(name), st.just(0) if which is None else which, *choose)


@functools.cache
def any_op(count: int) -> st.SearchStrategy[Op]:
    """One operation, whatever came before it."""
    one, one_or_all = below(count), below(count + 1)
    ops = [
        _ops("backward", one_or_all, None, ["one", "list"]),
        _ops("plant", one, [math.inf, -math.inf, math.nan], [0, 1]),
        _ops("write", one_or_all, None, ["in place", "data", "new"]),
        _ops("unscale_", one),
        _ops("step", one, None, ["plain", "positional closure", "positional None", "keyword closure"]),
        _ops(
            "update",
            None,
            [0.25, 1.0, 3.0, 128.0, 2.0**18],
            ["plain", "value", "tensor", "two elements", "requires grad"],
        ),
        _ops("zero_grad", one_or_all, None, [False, True]),
        _ops("clip_value", one_or_all, [0.5, 100.0]),
        _ops("set_growth_interval", None, [1, 2, 5, 2000]),
        _ops("set_growth_factor", None, [2.0, 3.0]),
        _ops("set_backoff_factor", None, [0.5, 0.9]),
        _ops("get_scale"),
        _ops("found_inf", one),
        st.builds(Op, st.sampled_from(["pickle", "save", "load saved", "load empty"])),
        _ops("new scaler", None, None, ["crosswise", "its own"]),
    ]
    return st.one_of(ops)


@functools.cache
def iterations(count: int) -> st.SearchStrategy[list[list[Op]]]:
    """Training iterations in the right order, with and without overflows."""
    often, sometimes, order = st.booleans(), st.integers(0, 3), st.permutations(range(count))

    @st.composite
    def draw_iteration(draw: Any) -> list[Op]:
        ops = [Op("backward", count)]
        ops += [Op("backward", draw(below(count + 1)), None, "one") for _ in range(draw(st.integers(0, 2)))]
        if draw(sometimes) == 0:
            ops.append(Op("plant", draw(below(count)), draw(_SPECIAL), 1))
        for which in range(count):
            if draw(often):
                ops.append(Op("unscale_", which))
                if draw(sometimes) == 0:  # After unscale_ the scaler does not look again.
                    ops.append(Op("plant", which, draw(_SPECIAL), 0))
                if draw(often):
                    ops.append(Op("clip_value", which, 0.5))
        ops += [Op("step", which) for which in draw(order)]
        return [*ops, Op("update"), Op("zero_grad", count, None, draw(often))]

    return st.lists(draw_iteration(), min_size=2, max_size=5)


_BETWEEN = st.sampled_from(
    [
        [],
        [Op("new scaler", 0, None, "crosswise")],
        [Op("new scaler", 0, None, "its own")],
        [Op("pickle")],
        [Op("save")],
        [Op("load saved")],
    ]
)


@st.composite
def careful_programs(draw: Any) -> tuple[Setup, list[Op]]:
    """Iterations in the right order, with up to three operations inserted anywhere."""
    setup = draw(setups())
    count = len(setup.kinds)
    ops: list[Op] = []
    for iteration in draw(iterations(count)):
        ops += iteration + draw(_BETWEEN)
    for _ in range(draw(st.integers(0, 3))):
        ops.insert(draw(below(len(ops) + 1)), draw(any_op(count)))
    return setup, ops


@functools.cache
def phrases(count: int) -> st.SearchStrategy[list[list[Op]]]:
    """Single operations, and pairs of them that are a mistake only together."""
    usual = st.builds(Op, st.sampled_from(["backward", "unscale_", "step", "step", "update"]), below(count))
    single = st.one_of(usual, usual, any_op(count)).map(lambda op: [op])
    without_gradients = below(count).map(lambda which: [Op("zero_grad", which, None, True), Op("step", which)])
    pickled_early = below(count).map(lambda which: [Op("unscale_", which), Op("pickle")])
    phrase = st.one_of(single, single, single, single, without_gradients, pickled_early)
    return st.lists(phrase, min_size=8, max_size=25)


@st.composite
def careless_programs(draw: Any) -> tuple[Setup, list[Op]]:
    """Operations in any order, most of them mistakes."""
    setup = draw(setups())
    count = len(setup.kinds)
    ops = [] if draw(below(5)) == 4 else [Op("backward", count)]
    for phrase in draw(phrases(count)):
        ops += phrase
    return setup, ops
