"""Loss in, scaled loss out; and the policies that say by how much."""

from gradilocks.scale.dynamic import DynamicScale, advance_dynamic, resolve_scale
from gradilocks.scale.headroom import HeadroomScale
from gradilocks.scale.scale_policy import (
    LARGEST,
    SMALLEST,
    NoScale,
    ScalePolicy,
    ScaleRules,
    StaticScale,
    bounds_in_float32,
    in_float32,
    scale_gradient,
    scale_loss,
)

__all__ = [
    "LARGEST",
    "SMALLEST",
    "DynamicScale",
    "HeadroomScale",
    "NoScale",
    "ScalePolicy",
    "ScaleRules",
    "StaticScale",
    "advance_dynamic",
    "bounds_in_float32",
    "in_float32",
    "resolve_scale",
    "scale_gradient",
    "scale_loss",
]
