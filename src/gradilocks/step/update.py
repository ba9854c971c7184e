"""A Decision in; an optimizer stepped, or left exactly as it was, comes out.

An optimizer that can take the decision inside its own pass gets `grad_scale` and `found_inf`, and
unscaling and clipping cost no pass of their own; so does the one inside a framework's wrapper that
is known to hand the step on. torch's fused Adam and AdamW step on the local tensors of DTensors
then: the same kernel on the same memory, without a dispatch of each tensor. Any other, and whatever
else wraps one, gets its gradients multiplied in place and is stepped or not, which the host has to
know: one of the two places where it waits.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks._torch import (
    AMP_FLAG,
    BEGINS_GROUP,
    dispatch_modes,
    function_modes,
    note_stepped,
)
from gradilocks.kernels import native
from gradilocks.kernels.host_numbers import numbers_on
from gradilocks.ranks.layout import dtensor_parts, is_distributed, lie_alike, local_of
from gradilocks.step.framework_wrappers import KINDS, refuse_second_scaler, steppers
from gradilocks.step.half_sgd import HALF, moving
from gradilocks.step.own_step import (
    has_own_amp_flag,
    is_ours,
    own_step,
    undecorated,
    why_not_inside,
)
from gradilocks.values import Decision, moved

_LARGEST = float(torch.finfo(torch.float32).max)

__all__ = [
    "apply_in_place",
    "handing_over",
    "must_skip_on_host",
    "refuse_unscaling_float16",
    "takes_decision",
    "takes_scaler",
    "update",
]


def update(
    optimizer: Any,
    decision: Decision,
    tensors: Sequence[Tensor],
    *,
    inside: bool,
    device: torch.device | None = None,
    begin: int = 0,
    dtypes: Collection[torch.dtype] | None = None,
    multiplied: Callable[[], None] = lambda: None,
    step: Callable[[], Any] | None = None,
    consume: bool = False,
) -> Any:
    """Steps `optimizer` on its gradients, or leaves it bit for bit as it was.

    Args:
        optimizer: any object with `param_groups` and `step`.
        decision: on one device, for the gradients of all optimizers.
        tensors: the elements of this optimizer's gradients.
        inside: whether it takes the decision inside its own pass (`takes_decision`).
        device: of all of `tensors`; None if they lie on several.
        begin: the place of the first of `tensors` among the gradients of all optimizers.
        dtypes: those that there are among the gradients of all optimizers; None if not known.
        multiplied: called when the gradients themselves have been made true, before the step.
        step: calls the optimizer's step; by default without arguments.
        consume: as in `handing_over`.

    Returns:
        What the step returned; None if the host knows that it was skipped.
    """
    if not tensors:
        return None
    if KINDS.get(type(optimizer)) is not None:
        refuse_second_scaler(optimizer, steps=True)
    if decision.factors is not None or decision.units is not None:
        _apply_factors(decision, tensors, begin=begin)
    if decision.bound is not None:
        _apply_bound(decision, tensors)
    step = optimizer.step if step is None else step
    if dtypes is None or not HALF.isdisjoint(dtypes):
        step = moving(optimizer, step, device)
    if inside and must_skip_on_host(optimizer, decision.skip, decision.multiplier):
        return None
    if inside and not _too_small(decision):
        grad_scale = decision.divisor
        if grad_scale is None:
            grad_scale = _as_divisor(decision.multiplier)
        on_host = (
            any(tensor.is_cpu for tensor in tensors) if device is None else device.type == "cpu"
        )
        found_inf: Tensor | None = decision.skip
        # With `consume` somebody has a scaler in mind, and may read it off the optimizer in a hook.
        if device is not None and on_host and decision.skip.is_cpu and not consume:
            # torch's Adam and AdamW take it off each parameter's count of steps again, whatever it
            # is: of 148 parameters 0.06 ms, beside 0.08 for measuring and deciding (1.1 M elements,
            # AMD Zen 5). A step that the host sees taken goes without.
            own = own_step(optimizer)
            if own is not None and own.code in _ELEMENTWISE and not decision.skip.item():
                found_inf = None
        with handing_over(
            optimizer,
            grad_scale=grad_scale,
            found_inf=found_inf,
            consume=consume,
            on_host=on_host,
        ):
            return step()
    if decision.skip.item():
        return None
    if device is not None and device == decision.multiplier.device:
        kernels.BACKENDS[device.type].multiply_(tensors, decision.multiplier)
    else:
        _multiply(decision, tensors)
    multiplied()
    if not inside:
        return step()
    with handing_over(optimizer, grad_scale=None, found_inf=None, consume=consume):
        return step()


def _too_small(decision: Decision) -> bool:
    """Whether 1 / multiplier is more than float32 holds, as a norm of 1e39 clipped to 1 makes it.

    Asked on the CPU alone, where asking is free. Elsewhere such a norm is clipped as far as float32
    goes, to 3e-39 of itself.
    """
    multiplier = decision.multiplier
    return multiplier.device.type == "cpu" and multiplier.item() < 1.0 / _LARGEST


def _as_divisor(multiplier: Tensor) -> Tensor:
    """1 / multiplier as fused optimizers take it; inf only for a multiplier of 0."""
    divisor = torch.reciprocal(multiplier)
    return torch.where(multiplier > 0, divisor.clamp(max=_LARGEST), divisor).to(torch.float32)


def apply_in_place(decision: Decision, tensors: Sequence[Tensor]) -> None:
    """Makes the gradients of one optimizer true: factors, bound and multiplier, in place."""
    _apply_factors(decision, tensors, begin=0)
    if decision.bound is not None:
        _apply_bound(decision, tensors)
    _multiply(decision, tensors)


def _multiply(decision: Decision, tensors: Sequence[Tensor]) -> None:
    """One pass, none if the multiplier is 1."""
    for device, places in kernels.by_device(tensors).items():
        on_device = tensors if len(places) == len(tensors) else [tensors[i] for i in places]
        kernels.BACKENDS[device.type].multiply_(on_device, decision.multiplier.to(device))


def _apply_bound(decision: Decision, tensors: Sequence[Tensor]) -> None:
    """Bounds the elements of the gradients as they stand."""
    assert decision.bound is not None
    for device, places in kernels.by_device(tensors).items():
        on_device = tensors if len(places) == len(tensors) else [tensors[i] for i in places]
        kernels.BACKENDS[device.type].clamp_(on_device, decision.bound.to(device))


def _apply_factors(decision: Decision, tensors: Sequence[Tensor], *, begin: int) -> None:
    """Multiplies each gradient by its own factor, and its parts by theirs, if there are any."""
    if decision.units is not None:
        for tensor, unit in zip(tensors, decision.units[begin:], strict=False):
            if unit is not None:
                _multiply_units(tensor, moved(unit, tensor.device))
    if decision.factors is None:
        return
    factors = decision.factors[begin : begin + len(tensors)]
    for device, places in kernels.by_device(tensors).items():
        on_device = tensors if len(places) == len(tensors) else [tensors[i] for i in places]
        mine = factors
        if len(places) != len(tensors):
            mine = factors[numbers_on(factors.device, tuple(places), torch.int64)]
        kernels.BACKENDS[device.type].multiply_each_(on_device, moved(mine, device))


def _multiply_units(tensor: Tensor, unit: Tensor) -> None:
    if not tensor.is_complex():
        tensor.copy_(tensor.to(unit.dtype) * unit)
        return
    # Part by part: a product of complex numbers would bring a NaN of one part into the other.
    parts = torch.view_as_real(tensor.resolve_conj()).to(unit.dtype) * unit.unsqueeze(-1)
    tensor.copy_(torch.view_as_complex(parts))


def refuse_unscaling_float16(
    optimizer: Any,
    params: Sequence[Tensor],
    tensors: Sequence[Tensor],
    name: Callable[[Tensor], str],
) -> None:
    """Refuses fp16 gradients that would have to be unscaled in fp16, before any step."""
    for param, tensor in zip(params, tensors, strict=True):
        if tensor.dtype is torch.float16:
            way_out = (
                "or use an optimizer with fused=True, which unscales in float32; or use "
                f"scale=None.{why_not_inside(optimizer)}"
            )
            if takes_decision(optimizer):
                way_out = (
                    f"or leave out unscale_(), and a closure: the step of this "
                    f"{type(optimizer).__name__} unscales and clips in float32 by itself."
                )
            raise ValueError(
                f"Attempting to unscale FP16 gradients. {name(param)} is float16, and dividing its "
                "gradient by the scale in float16 would round small values to zero again. Keep the "
                f"parameters in float32 and run the forward pass under torch.autocast; {way_out}"
            )


def takes_decision(optimizer: Any) -> bool:
    """Whether `step` reads `grad_scale` and `found_inf` off the optimizer, as torch's fused do.

    Only if that is proven (`own_step.OwnStep.reads_decision`), or if those inside a known wrapper
    do (`framework_wrappers.steppers`). Of any other wrapper the gradients are multiplied in place,
    and the host decides whether its step is called.
    """
    if KINDS.get(type(optimizer), optimizer) is not None:  # A wrapper, or not met before.
        inside = steppers(optimizer)
        if inside is not None:
            # ZeRO gives the one inside its own groups' settings at each step.
            groups = optimizer.param_groups
            unfused = any("fused" in group and not group["fused"] for group in groups)
            return not unfused and all(map(takes_decision, inside))
    if not getattr(optimizer, AMP_FLAG, False):
        return False
    step = own_step(optimizer)
    if step is None or not step.reads_decision:
        return False
    # A checkpoint of an unfused optimizer brings fused=None into the groups of a fused one, and
    # torch's own step then goes by the groups.
    for group in optimizer.param_groups if step.goes_by_groups else ():
        if "fused" in group and not group["fused"]:
            return False
    return True


def takes_scaler(optimizer: Any) -> bool:
    """Whether `step` has a parameter `grad_scaler`, the older contract of apex and others.

    And whether who steps says so itself: a wrapper may have such a parameter and hand nothing on.
    """
    if not getattr(optimizer, AMP_FLAG, False):
        return False
    step = getattr(optimizer.step, "__func__", optimizer.step)
    known = _takes_scaler.get(step)
    if known is None:
        known = _takes_scaler[step] = "grad_scaler" in inspect.signature(step).parameters
    return known and has_own_amp_flag(optimizer)


# By function, and only as long as it lives: a step that wraps its optimizer must not keep it alive.
_takes_scaler: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def must_skip_on_host(optimizer: Any, skip: Tensor, multiplier: Tensor) -> bool:
    """Whether a fused optimizer that cannot skip this one step by itself has to skip it.

    A fused SGD makes its momentum buffers without filling them, and a step that is then skipped
    leaves them so: the next one adds whatever was in that memory to the weights. So the host asks
    before a step that makes buffers. If it is to be taken, and a group has buffers for some
    parameters only, which torch's fused SGD cannot handle, the others get theirs here.

    Args:
        optimizer: takes the decision inside its own pass (`takes_decision`).
        skip: the step's flag.
        multiplier: what the gradients will be multiplied by.
    """
    inside = None if KINDS.get(type(optimizer)) is None else steppers(optimizer)
    if inside is not None:  # All of them, so that each gets the buffers that it lacks.
        asked = [must_skip_on_host(each, skip, multiplier) for each in inside]
        return any(asked)
    if not isinstance(optimizer, torch.optim.SGD) or is_ours(optimizer):
        return False
    lacking = [
        (group, fresh) for group in optimizer.param_groups if (fresh := _fresh(optimizer, group))
    ]
    if not lacking:
        return False
    if skip.item():
        note_stepped(optimizer)
        return True
    for group, fresh in lacking:
        if len(fresh) < sum(param.grad is not None for param in group["params"]):
            for param in fresh:
                optimizer.state[param]["momentum_buffer"] = _first_buffer(param, group, multiplier)
    return False


def _fresh(optimizer: Any, group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that have a gradient and no momentum yet."""
    if group["momentum"] == 0:
        return []
    nothing: dict[str, Any] = {}  # `state` would make an entry for whom it is asked.
    return [
        param
        for param in group["params"]
        if param.grad is not None
        and optimizer.state.get(param, nothing).get("momentum_buffer") is None
    ]


def _first_buffer(param: Tensor, group: dict[str, Any], multiplier: Tensor) -> Tensor:
    """What makes `momentum * buffer + (1 - dampening) * g` equal to g, which a first step is.

    Here g is what SGD makes of the gradient: turned round by `maximize`, with the weight decay.
    """
    assert param.grad is not None
    if group["dampening"] == 0:
        return torch.zeros_like(param.grad)
    gradient = param.grad.to(torch.promote_types(param.grad.dtype, torch.float32))
    gradient = gradient * (-multiplier if group["maximize"] else multiplier).to(gradient.device)
    gradient = gradient + group["weight_decay"] * param.detach()
    buffer: Tensor = gradient * (group["dampening"] / group["momentum"])
    return buffer.to(param.grad.dtype)


# torch's fused Adam and AdamW: what they compute of an element needs no other.
_ADAMS: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW)
_ELEMENTWISE = {undecorated(each.step).__code__ for each in _ADAMS}
_BEGINNINGS = {undecorated(getattr(each, BEGINS_GROUP)) for each in _ADAMS}


def _may_go_by_local_tensors(optimizer: Any) -> bool:
    """Whether an optimizer may be given the local tensors of its DTensors in their place.

    2,000 of them take torch 33 ms of the host's time for what is the same kernel on the same memory
    in the end, and 7 so (two AMD cores). Nobody may be there who sees the difference: a step, or a
    beginning of one, that is not torch's own; a mode that is told of every operator; a scale that
    is a DTensor itself.
    """
    step = own_step(optimizer)
    return (
        step is not None
        and step.code in _ELEMENTWISE
        # torch.compile wraps it, for all optimizers, once it has compiled anything.
        and undecorated(getattr(type(optimizer), BEGINS_GROUP)) in _BEGINNINGS
        and BEGINS_GROUP not in vars(optimizer)
        and not (dispatch_modes() or function_modes())
        and not is_distributed(optimizer.grad_scale)
    )


def _localizing(begin: Callable[..., Any]) -> Callable[..., Any]:
    """What begins a group as `begin` does, and leaves local tensors in its lists if they lie alike.

    Parameters, gradients and state have to be elements of the same ranks, and no summands. Plain
    parameters may be among them, beside which torch's step refuses DTensors.
    """

    def begun(group: dict[str, Any], *lists: Any) -> Any:
        answer = begin(group, *lists)
        filled = [each for each in lists if isinstance(each, list)]
        if any(map(is_distributed, group.values())):
            return answer
        found = _localized(filled)
        if found is not None and not any(_is_elsewhere(*laid) for laid in found[1]):
            for each, local in zip(filled, found[0], strict=True):
                each[:] = local
        return answer

    return begun


def _localized(lists: list[list[Tensor]]) -> tuple[list[list[Tensor]], Sequence[Any]] | None:
    """The local tensors of DTensors, and how these lie: mesh and placements of each.

    The first list has parameters, the others what belongs to each: to a DTensor others that lie as
    it does, or numbers of their own (0-d), which stay; to a plain tensor plain ones. Empty lists
    stay empty. None if it is not so.
    """
    library = native.library()
    if library is not None:
        answer: Any = library.localized(lists, dtensor_parts())
        return None if answer is None else (answer[0], answer[1])
    params = lists[0]
    found: list[list[Tensor]] = []
    for each in lists:
        if each and len(each) != len(params):
            return None
        found.append([])
        for param, tensor in zip(params, each, strict=False):
            spread, local = is_distributed(param), local_of(tensor)
            if local is tensor:
                if type(tensor) not in (Tensor, torch.nn.Parameter) or (spread and tensor.dim()):
                    return None
            elif not (spread and type(local) is Tensor and lie_alike(param, tensor)) or (
                local.requires_grad
            ):
                return None
            found[-1].append(local)
    spread_ones: Any = filter(is_distributed, params)
    laid = {(param.device_mesh, param.placements): None for param in spread_ones}
    return found, list(laid)


def _is_elsewhere(mesh: Any, placements: Sequence[Any]) -> bool:
    """Whether this rank has nothing of what lies so, or summands."""
    return mesh.get_coordinate() is None or any(each.is_partial() for each in placements)


_ABSENT = object()


@contextmanager
def handing_over(
    optimizer: Any,
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    consume: bool = False,
    on_host: bool = False,
) -> Iterator[None]:
    """Sets `grad_scale` and `found_inf` on the optimizer for one step, whatever becomes of it.

    On those inside if it is a known wrapper. A `grad_scale` that the user had set is multiplied in
    and put back afterwards; with `consume` it is put back only if the step raises, and taken away
    otherwise, as torch's scaler does.

    Args:
        optimizer: takes them inside its own pass.
        grad_scale, found_inf: 0-d.
        consume: see above.
        on_host: whether some of its gradients lie on the host. torch sends both numbers there
            without a wait, and reads what was there before: a step that is to be skipped may be
            taken. So they are fetched here.
    """
    if on_host:
        grad_scale, found_inf = (
            None if each is None else each.cpu() for each in (grad_scale, found_inf)
        )
    inside = None if KINDS.get(type(optimizer)) is None else steppers(optimizer)
    takers = (optimizer,) if inside is None else inside
    before = [
        (taker, name, getattr(taker, name, _ABSENT))
        for taker in takers
        for name in ("grad_scale", "found_inf")
    ]
    dtensors: Any = sys.modules.get("torch.distributed.tensor")
    localized: list[Any] = []
    for taker in takers:
        preset = getattr(taker, "grad_scale", None)
        mine: Any = grad_scale
        if preset is not None:
            mine = preset if grad_scale is None else grad_scale * preset
        taker.grad_scale, taker.found_inf = mine, found_inf
        groups = taker.param_groups if dtensors is not None else ()
        kinds = set().union(*[set(map(type, group["params"])) for group in groups])
        spread = any(issubclass(kind, dtensors.DTensor) for kind in kinds)
        if spread and _may_go_by_local_tensors(taker):
            localized.append(taker)
            setattr(taker, BEGINS_GROUP, _localizing(getattr(taker, BEGINS_GROUP)))
    try:
        yield
    except BaseException:
        consume = False
        raise
    finally:
        for taker in localized:
            delattr(taker, BEGINS_GROUP)
        for taker, name, value in before:
            if value is _ABSENT or consume:
                delattr(taker, name)
            else:
                setattr(taker, name, value)
