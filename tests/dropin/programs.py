"""Programs of scaler operations, run step by step on torch's classes and on ours.

A program is a Setup (which optimizers, which dtypes, which scaler settings) and a list of
operations. `run` carries it out on both sides and compares them after every operation: parameters,
gradients, optimizer state, scale, growth tracker, return values and errors.

Situations in which torch is at fault are left out here, because each has a test of its own in
test_scaler_faults.py; where one is left out, its number in the list of faults is named.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.amp.grad_scaler import OptState

import gradilocks

# A fixed seed and no memory of earlier runs: the suite draws the same programs everywhere.
STABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

KINDS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD, momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.01
    ),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=False),
    "fused SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "fused SGD, momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, fused=True
    ),
    "fused Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, fused=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "fused Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}

SMALL = ((3,), (2, 2))
LARGE = ((3,), (70_000,))  # Above the size from which unscale_ keeps a norm for the clip.


@dataclass(frozen=True)
class Setup:
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
    """One operation; `what` and `how` mean something to it or nothing."""

    name: str
    which: int = 0
    what: Any = None
    how: Any = None


class Side:
    """Everything one contender owns: parameters, optimizers, scaler, clip functions."""

    def __init__(self, setup: Setup, scaler_class: type, clip: Any) -> None:
        self.setup = setup
        self.scaler_class = scaler_class
        self.clip = clip
        values = torch.Generator().manual_seed(7)
        shapes = LARGE if setup.large else SMALL
        self.params = [
            [torch.randn(s, generator=values).to(dtype).requires_grad_() for s in shapes]
            for dtype in setup.dtypes
        ]
        self.optimizers = [
            KINDS[kind](params) for kind, params in zip(setup.kinds, self.params, strict=True)
        ]
        self.scaler = self.fresh_scaler(
            init_scale=setup.init_scale,
            growth_factor=setup.growth_factor,
            backoff_factor=setup.backoff_factor,
            growth_interval=setup.growth_interval,
        )
        self.saved = self.scaler.state_dict()

    def fresh_scaler(self, **settings: Any) -> Any:
        return self.scaler_class("cpu", enabled=self.setup.enabled, **settings)

    def loss(self, which: int) -> Tensor:
        """Loss k is for optimizer k alone; the one after the last is for all of them."""
        chosen = self.params if which >= len(self.params) else [self.params[which]]
        total = torch.zeros(())
        for number, params in enumerate(chosen):
            for place, param in enumerate(params):
                weight = torch.linspace(-1.0, 1.5 + which + number, param.numel())
                wide = param if param.dtype is torch.float64 else param.float()
                total = total + (wide.reshape(-1) * weight * (place + 1)).sum()
                total = total + (wide * wide).mean()
        return total

    def of(self, which: int) -> list[Tensor]:
        if which >= len(self.params):
            return [p for params in self.params for p in params]
        return self.params[which]

    def tracker(self) -> int:
        return self.scaler._get_growth_tracker()


def torch_side(setup: Setup) -> Side:
    return Side(setup, torch.amp.GradScaler, torch.nn.utils)


def our_side(setup: Setup) -> Side:
    return Side(setup, gradilocks.GradScaler, gradilocks)


# --- what an operation does to one side ------------------------------------------------------


def _backward(side: Side, op: Op) -> None:
    if op.how == "list":
        first, second = side.scaler.scale([side.loss(op.which), side.loss(len(side.params))])
        first.backward()
        second.backward()
    else:
        side.scaler.scale(side.loss(op.which)).backward()


def _plant(side: Side, op: Op) -> None:
    param = side.of(op.which)[op.how]
    if param.grad is not None:
        param.grad[(0,) * param.dim()] = op.what


def _write(side: Side, op: Op) -> None:
    for param in side.of(op.which):
        grad = param.grad
        if grad is None:
            continue
        if op.how == "in place":
            grad.mul_(0.5)
        elif op.how == "data":
            grad.data.mul_(0.5)
        else:
            param.grad = grad * 0.5


def _step(side: Side, op: Op) -> Any:
    optimizer = side.optimizers[op.which]
    if op.how == "positional closure":
        return side.scaler.step(optimizer, lambda: 1.5)
    if op.how == "positional None":
        return side.scaler.step(optimizer, None)
    if op.how == "keyword closure":
        return side.scaler.step(optimizer, closure=None)
    return side.scaler.step(optimizer)


def _zero_grad(side: Side, op: Op) -> None:
    chosen = side.optimizers if op.which >= len(side.optimizers) else [side.optimizers[op.which]]
    for optimizer in chosen:
        optimizer.zero_grad(set_to_none=op.how)


def _update(side: Side, op: Op) -> None:
    if op.how == "tensor":
        side.scaler.update(torch.tensor(op.what))
    elif op.how == "two elements":
        side.scaler.update(torch.ones(2))
    elif op.how == "requires grad":
        side.scaler.update(torch.ones((), requires_grad=True))
    elif op.how == "value":
        side.scaler.update(op.what)
    else:
        side.scaler.update()


def _clip_norm(side: Side, op: Op) -> Tensor:
    params = side.of(op.which)
    if side.setup.large and side.clip is torch.nn.utils:
        # torch adds 70,000 squares in one running float32 sum; measured in float64 it says what
        # it means, and the comparison can stay sharp.
        grads = [p.grad.double() for p in params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, op.how)
        torch.nn.utils.clip_grads_with_norm_(params, op.what, norm.float())
        return norm.float()
    return side.clip.clip_grad_norm_(params, op.what, norm_type=op.how)


def _clip_value(side: Side, op: Op) -> None:
    params = [p for p in side.of(op.which) if p.grad is not None]
    if params:  # torch's clip_grad_value_ fails on nothing at all.
        side.clip.clip_grad_value_(params, op.what)


def _set(side: Side, op: Op) -> None:
    value = op.what
    if op.name == "set_growth_interval":
        value = max(value, side.tracker() + 1)  # B6: an interval below the tracker.
    getattr(side.scaler, op.name)(value)


def _round_trip(side: Side, op: Op) -> None:
    side.scaler = pickle.loads(pickle.dumps(side.scaler))


def _save(side: Side, op: Op) -> dict[str, Any]:
    side.saved = side.scaler.state_dict()
    return side.saved


_DOES: dict[str, Callable[[Side, Op], Any]] = {
    "backward": _backward,
    "plant": _plant,
    "write": _write,
    "unscale_": lambda side, op: side.scaler.unscale_(side.optimizers[op.which]),
    "step": _step,
    "update": _update,
    "zero_grad": _zero_grad,
    "clip_norm": _clip_norm,
    "clip_value": _clip_value,
    "set_growth_interval": _set,
    "set_growth_factor": _set,
    "set_backoff_factor": _set,
    "get_scale": lambda side, op: side.scaler.get_scale(),
    "found_inf": lambda side, op: [
        float(flag)
        for flag in side.scaler._check_inf_per_device(side.optimizers[op.which]).values()
    ],
    "pickle": _round_trip,
    "save": _save,
    "load saved": lambda side, op: side.scaler.load_state_dict(side.saved),
    "load empty": lambda side, op: side.scaler.load_state_dict({}),
}


@dataclass(frozen=True)
class Result:
    value: Any = None
    error: Exception | None = None


def _attempt(side: Side, op: Op) -> Result:
    try:
        return Result(value=_DOES[op.name](side, op))
    except Exception as error:
        return Result(error=error)


def _fresh_scalers(torchs: Side, ours: Side, how: str) -> None:
    """Both sides go on with a new scaler that has loaded a state: its own, or the other side's."""
    states = {"torch": torchs.scaler.state_dict(), "ours": ours.scaler.state_dict()}
    assert states["torch"] == states["ours"]
    if not torchs.setup.enabled:
        assert states["torch"] == {}
    for side, own, other in ((torchs, "torch", "ours"), (ours, "ours", "torch")):
        # Other settings than the state's, so that a field that is not taken over shows.
        side.scaler = side.fresh_scaler(
            init_scale=2.0, growth_factor=8.0, backoff_factor=0.125, growth_interval=77
        )
        side.scaler.load_state_dict(states[other if how == "crosswise" else own])


# --- what is left out, because torch is at fault there ---------------------------------------


def _finite(tensors: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def _grads(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _is_at_fault(side: Side, op: Op) -> bool:
    if op.name == "clip_norm":
        return not _finite(_grads(side.of(op.which)))  # B11: a NaN or Inf spreads or zeroes.
    if op.name == "found_inf" and side.setup.enabled:
        state = side.scaler._per_optimizer_states.get(id(side.optimizers[op.which]))
        return bool(state) and state["stage"] is not OptState.READY
    if op.name == "step" and side.setup.enabled:
        kind, optimizer = side.setup.kinds[op.which], side.optimizers[op.which]
        state = side.scaler._per_optimizer_states.get(id(optimizer))
        unscaled = bool(state) and state["stage"] is OptState.UNSCALED
        if kind.startswith("fused") and unscaled and not state["found_inf_per_device"]:
            # unscale_ before backward: torch fails inside the optimizer, and by B5 a grad_scale
            # stays behind.
            return bool(_grads(side.params[op.which]))
        if kind != "fused SGD, momentum":
            return False
        # B14: the first step of a fused SGD with momentum is skipped.
        if any("momentum_buffer" in optimizer.state.get(p, {}) for p in side.params[op.which]):
            return False
        flagged = state and any(f.item() for f in state["found_inf_per_device"].values())
        return bool(flagged) or not _finite(_grads(side.params[op.which]))
    return False


# B4 (the scale falls to 0) takes 166 overflows in a row, more than a program has operations; B5 (a
# fused step raises) and B9 (a gradient unscaled for two optimizers) cannot happen, because every
# loss reaches all parameters of an optimizer and no parameter is in two.


# --- comparison ------------------------------------------------------------------------------


@dataclass
class Seen:
    """What happened in the programs that have run, so that a test can tell they were not idle."""

    counts: Counter[str] = field(default_factory=Counter)


def run(setup: Setup, ops: list[Op], seen: Seen, *, rtol: float = 0.0) -> None:
    """Runs `ops` on torch and on ours and compares after each; `rtol` is relative to a tensor."""
    torchs, ours = torch_side(setup), our_side(setup)
    for number, op in enumerate(ops):
        where = f"after operation {number}, {op}"
        if op.name == "fresh scaler":
            _fresh_scalers(torchs, ours, op.how)
            seen.counts["state loaded " + op.how] += 1
        elif _is_at_fault(torchs, op):
            seen.counts["left out"] += 1
            continue
        else:
            expected, got = _attempt(torchs, op), _attempt(ours, op)
            _compare_results(expected, got, where, rtol)
            _note(seen, setup, op, expected)
        _compare_sides(torchs, ours, where, rtol)
    seen.counts["programs"] += 1


def _note(seen: Seen, setup: Setup, op: Op, expected: Result) -> None:
    if expected.error is not None:
        seen.counts[str(expected.error)[:40]] += 1
    elif op.name == "found_inf" and expected.value and expected.value[0]:
        seen.counts["flag raised"] += 1
    else:
        seen.counts[op.name] += 1


def _compare_results(expected: Result, got: Result, where: str, rtol: float) -> None:
    if expected.error is not None:
        assert got.error is not None, f"torch raised {expected.error!r} {where}"
        assert isinstance(got.error, type(expected.error)), f"{got.error!r} {where}"
        assert str(got.error).startswith(str(expected.error)), f"{got.error!r} {where}"
        return
    if got.error is not None:
        raise AssertionError(f"only ours raised, {where}") from got.error
    if isinstance(expected.value, Tensor):
        # Half-precision norms are not compared: ours is measured in float32 on purpose (B11).
        compare_tensors(expected.value.double(), got.value.double(), f"the value {where}", rtol)
    else:
        assert got.value == expected.value, where


def _compare_sides(torchs: Side, ours: Side, where: str, rtol: float) -> None:
    assert ours.scaler.get_scale() == torchs.scaler.get_scale(), f"scale {where}"
    assert ours.tracker() == torchs.tracker(), f"tracker {where}"
    assert ours.scaler.state_dict() == torchs.scaler.state_dict(), f"state_dict {where}"
    if torchs.setup.enabled:
        # Optimizer by optimizer: ids differ between the sides, stages must not.
        for theirs, mine in zip(torchs.optimizers, ours.optimizers, strict=True):
            expected = torchs.scaler._per_optimizer_states.get(id(theirs))
            got = ours.scaler._per_optimizer_states.get(id(mine))
            assert (got or {}).get("stage") == (expected or {}).get("stage"), f"stage {where}"
    for which, (theirs, mine) in enumerate(zip(torchs.params, ours.params, strict=True)):
        for place, (expected, got) in enumerate(zip(theirs, mine, strict=True)):
            name = f"parameter {which}.{place} {where}"
            compare_tensors(expected, got, name, rtol)
            assert (expected.grad is None) == (got.grad is None), f"gradient of {name}"
            if expected.grad is not None:
                compare_tensors(expected.grad, got.grad, f"gradient of {name}", rtol)
    for theirs, mine in zip(torchs.optimizers, ours.optimizers, strict=True):
        expected, got = list(theirs.state.values()), list(mine.state.values())
        assert len(got) == len(expected), f"optimizer state {where}"
        for pair in zip(expected, got, strict=True):
            _compare_states(*pair, where, rtol)


def _compare_states(expected: Any, got: Any, where: str, rtol: float) -> None:
    assert expected.keys() == got.keys(), f"optimizer state {where}"
    for key, value in expected.items():
        if isinstance(value, Tensor):
            compare_tensors(value, got[key], f"optimizer state {key} {where}", rtol)
        else:
            assert got[key] == value, f"optimizer state {key} {where}"


def compare_tensors(expected: Tensor, got: Tensor, what: str, rtol: float = 0.0) -> None:
    """Bit for bit (NaN is NaN), or within `rtol` of the tensor's largest finite element."""
    expected, got = expected.detach(), got.detach()
    assert got.dtype is expected.dtype, what
    assert got.shape == expected.shape, what
    bits = _BITS[expected.dtype]
    if torch.equal(expected.view(bits), got.view(bits)):
        return
    if rtol:
        finite = expected[torch.isfinite(expected)].abs()
        atol = rtol * float(finite.max()) if finite.numel() else 0.0
        same = torch.isclose(got, expected, rtol=0.0, atol=atol, equal_nan=True)
    else:
        same = (expected.view(bits) == got.view(bits)) | (expected.isnan() & got.isnan())
    assert bool(same.all()), f"{what}: expected {expected}, got {got}"


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


# --- drawing programs ------------------------------------------------------------------------
# A strategy is made once and kept: to make and check one takes longer than to draw from it.

_SPECIAL = st.sampled_from([math.inf, -math.inf, math.nan])
_UP_TO_TWO, _UP_TO_THREE = st.integers(0, 2), st.integers(0, 3)
_NEW_SCALE = st.sampled_from([0.25, 1.0, 3.0, 128.0, 2.0**18])


@functools.cache
def setups(*, half: bool) -> st.SearchStrategy[Setup]:
    """Any mix of one to three optimizers; with `half` also half-precision parameters."""
    dtypes = [torch.float32, torch.float32, torch.float64]
    if half:
        dtypes += [torch.bfloat16, torch.float16]

    any_kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3)
    any_dtype, one_in_ten = st.sampled_from(dtypes), st.integers(0, 9)
    init_scale = st.sampled_from([1.0, 3.0, 1024.0, 65536.0])
    growth_factor, backoff_factor = st.sampled_from([2.0, 1.5, 16.0]), st.sampled_from([0.5, 0.3])
    growth_interval = st.sampled_from([1, 2, 3, 2000])

    @st.composite
    def draw_setup(draw: Any) -> Setup:
        kinds = draw(any_kinds)
        large = draw(one_in_ten) == 7
        chosen = [torch.float32 if large else draw(any_dtype) for _ in kinds]
        return Setup(
            kinds=tuple(kinds),
            dtypes=tuple(chosen),
            large=large,
            enabled=draw(one_in_ten) != 7,
            init_scale=draw(init_scale),
            growth_factor=draw(growth_factor),
            backoff_factor=draw(backoff_factor),
            growth_interval=draw(growth_interval),
        )

    return draw_setup()


@functools.cache
def any_op(count: int, *, norm_clip: bool) -> st.SearchStrategy[Op]:
    """One operation without regard to what came before it."""
    one = st.integers(0, count - 1)
    one_or_all = st.integers(0, count)
    ops = [
        st.builds(Op, st.just("backward"), one_or_all, st.none(), st.sampled_from(["one", "list"])),
        st.builds(Op, st.just("plant"), one, _SPECIAL, st.integers(0, 1)),
        st.builds(
            Op,
            st.just("write"),
            one_or_all,
            st.none(),
            st.sampled_from(["in place", "data", "new"]),
        ),
        st.builds(Op, st.just("unscale_"), one),
        st.builds(
            Op,
            st.just("step"),
            one,
            st.none(),
            st.sampled_from(["plain", "positional closure", "positional None", "keyword closure"]),
        ),
        st.builds(
            Op,
            st.just("update"),
            st.just(0),
            _NEW_SCALE,
            st.sampled_from(["plain", "value", "tensor", "two elements", "requires grad"]),
        ),
        st.builds(Op, st.just("zero_grad"), one_or_all, st.none(), st.booleans()),
        st.builds(Op, st.just("clip_value"), one_or_all, st.sampled_from([0.5, 100.0])),
        st.builds(Op, st.just("set_growth_interval"), st.just(0), st.sampled_from([1, 2, 5, 2000])),
        st.builds(Op, st.just("set_growth_factor"), st.just(0), st.sampled_from([2.0, 3.0])),
        st.builds(Op, st.just("set_backoff_factor"), st.just(0), st.sampled_from([0.5, 0.9])),
        st.builds(Op, st.just("get_scale")),
        st.builds(Op, st.just("found_inf"), one),
        st.builds(Op, st.sampled_from(["pickle", "save", "load saved", "load empty"])),
        st.builds(
            Op,
            st.just("fresh scaler"),
            st.just(0),
            st.none(),
            st.sampled_from(["crosswise", "its own"]),
        ),
    ]
    if norm_clip:
        ops.append(clip_op(one_or_all))
    return st.one_of(ops)


def clip_op(which: st.SearchStrategy[int]) -> st.SearchStrategy[Op]:
    return st.builds(
        Op,
        st.just("clip_norm"),
        which,
        st.sampled_from([0.0, 0.5, 13.0, 1e4, math.inf]),
        st.sampled_from([1.0, 2.0, 2.0, 2.0, 3.0, math.inf]),
    )


@functools.cache
def iterations(count: int, norm_clip: bool) -> st.SearchStrategy[list[Op]]:
    """One training iteration that a careful user would write, with or without an overflow."""
    one, one_or_all, order = one_of(count), one_of(count + 1), st.permutations(range(count))
    clips = [clip_op(st.just(which)) for which in range(count + 1)]
    often, seldom, sometimes = st.booleans(), st.integers(0, 4), st.integers(0, 3)

    @st.composite
    def draw_iteration(draw: Any) -> list[Op]:
        ops = [Op("backward", count)]
        for _ in range(draw(_UP_TO_TWO)):
            ops.append(Op("backward", draw(one_or_all), None, "one"))
        if draw(sometimes) == (3 if norm_clip else 0):
            ops.append(Op("plant", draw(one), draw(_SPECIAL), 1))
        for which in range(count):
            if draw(often):
                ops.append(Op("unscale_", which))
                if draw(seldom) == 0:  # After unscale_ nobody looks again.
                    ops.append(Op("plant", which, draw(_SPECIAL), 0))
                if norm_clip:
                    ops.append(draw(clips[which]))
                elif draw(often):
                    ops.append(Op("clip_value", which, 0.5))
        if norm_clip and draw(often):
            ops.append(draw(clips[count]))
        ops += [Op("step", which) for which in draw(order)]
        ops.append(Op("update"))
        ops.append(Op("zero_grad", count, None, draw(often)))
        return ops

    return draw_iteration()


_BETWEEN = st.sampled_from(
    [
        [],
        [Op("fresh scaler", 0, None, "crosswise")],
        [Op("fresh scaler", 0, None, "its own")],
        [Op("pickle")],
        [Op("save")],
        [Op("load saved")],
    ]
)


@functools.cache
def lists_of_iterations(count: int, norm_clip: bool) -> st.SearchStrategy[list[list[Op]]]:
    return st.lists(iterations(count, norm_clip), min_size=2, max_size=5)


@st.composite
def careful_programs(draw: Any, *, norm_clip: bool = False) -> tuple[Setup, list[Op]]:
    """Iterations in the right order, with up to three operations put in anywhere."""
    setup = draw(setups(half=not norm_clip))
    count = len(setup.kinds)
    ops = []
    for ops_of_one in draw(lists_of_iterations(count, norm_clip)):
        ops += ops_of_one + draw(_BETWEEN)
    for _ in range(draw(_UP_TO_THREE)):
        place = draw(one_of(len(ops) + 1))
        ops.insert(place, draw(any_op(count, norm_clip=norm_clip)))
    return setup, ops


@functools.cache
def phrases(count: int) -> st.SearchStrategy[list[list[Op]]]:
    """Operations alone, and pairs of them that are misuse only together."""
    one = one_of(count)
    usual = st.builds(Op, st.sampled_from(["backward", "unscale_", "step", "step", "update"]), one)
    single = st.one_of(usual, usual, any_op(count, norm_clip=False)).map(lambda op: [op])
    nothing_to_step_on = one.map(
        lambda which: [Op("zero_grad", which, None, True), Op("step", which)]
    )
    pickled_too_early = one.map(lambda which: [Op("unscale_", which), Op("pickle")])
    phrase = st.one_of(single, single, single, single, nothing_to_step_on, pickled_too_early)
    return st.lists(phrase, min_size=8, max_size=25)


@st.composite
def careless_programs(draw: Any) -> tuple[Setup, list[Op]]:
    """Operations in any order at all, most of them misuse."""
    setup = draw(setups(half=True))
    count = len(setup.kinds)
    ops = [] if draw(one_of(5)) == 4 else [Op("backward", count)]
    for each in draw(phrases(count)):
        ops += each
    return setup, ops


@functools.cache
def one_of(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)
