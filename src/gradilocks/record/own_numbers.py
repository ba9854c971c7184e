"""Numbers of the user's own enter, by name; what a recorder can hold leaves, or an error.

`gradilocks.log`, `Recorder.log` and `GradientControl.log` take the same: numbers of Python and of
NumPy, and tensors of one element, which stay on their device until the recorder's next batch. What
cannot be recorded is refused also where nobody records, so that a script fails where it is written
and not when it is first watched.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from gradilocks.ranks.layout import is_distributed

__all__ = ["checked_numbers"]

LONGEST_NAME = 200


def checked_numbers(
    values: object, more: Mapping[str, object], *, step: object
) -> dict[str, Tensor | float]:
    """What was handed to `log`: its numbers by name; tensors that are not on the CPU as they are.

    Raises:
        TypeError: a name is no text, or a value is no number.
        ValueError: a tensor of several elements, a name that cannot be shown, or given twice.
    """
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(
            "log takes a mapping from names to numbers, or name=number, got "
            f"{type(values).__name__}. Write log(val_loss=loss)."
        )
    given: dict[Any, object] = {**(values or {}), **more}
    if len(given) < len(values or {}) + len(more):
        twice = next(name for name in more if name in (values or {}))
        raise ValueError(f"log was given {twice!r} twice: in the mapping and by name.")
    if not given:
        raise TypeError("log needs at least one number, as in log(val_loss=loss).")
    if step is not None:
        _check_step(step)
    return {_checked_name(name): _number(name, value) for name, value in given.items()}


def _check_step(step: object) -> None:
    try:
        number = -1 if isinstance(step, (bool, Tensor)) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        came = step if isinstance(step, (int, float, str)) else type(step).__name__
        raise (ValueError if isinstance(step, int) and not isinstance(step, bool) else TypeError)(
            f"step must be a whole number of at least 0, got {came!r}."
        )


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the names of logged numbers must be text, got {name!r}.")
    if not name or name != name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(
            f"the name of a logged number must be 1 to {LONGEST_NAME} printable characters without "
            f"space around them, got {name[:60]!r}{'...' if len(name) > 60 else ''}."
        )
    return name


def _number(name: str, value: object) -> Tensor | float:
    if isinstance(value, Tensor):
        return _from_tensor(name, value)
    # NumPy's scalars and arrays without dimensions know their shape; so do those of others.
    scalar = isinstance(value, Real) or getattr(value, "shape", None) == ()
    if scalar and not isinstance(value, (str, bytes, complex)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        except OverflowError as error:
            raise ValueError(f"{name} is too large for a float64.") from error
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        raise ValueError(f"{name} must be one number, got shape {shape}. Reduce it first: .mean()")
    raise TypeError(
        f"{name} must be a number, a NumPy scalar or a tensor of one element, got "
        f"{type(value).__name__}."
    )


def _from_tensor(name: str, value: Tensor) -> Tensor | float:
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be one number, got a tensor of shape {tuple(value.shape)}. Reduce it "
            "first, for example with .mean()."
        )
    if value.is_complex() or value.is_meta:
        kind = "a complex tensor" if value.is_complex() else "a tensor on the meta device"
        raise TypeError(f"{name} must be a real number, got {kind}.")
    if is_distributed(value):
        raise TypeError(
            f"{name} is a DTensor, of which each rank holds a part: log {name}.full_tensor()."
        )
    value = value.detach()
    return float(value) if value.device.type == "cpu" else value
