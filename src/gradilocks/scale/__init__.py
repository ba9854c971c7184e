"""Loss in, scaled loss out; and the policies that say by how much."""

from gradilocks.scale.dynamic import DynamicScale, advance_dynamic, resolve_scale
from gradilocks.scale.headroom import HeadroomScale
from gradilocks.scale.policy import (
    LARGEST,
    SMALLEST,
    NoScale,
    ScalePolicy,
    StaticScale,
    scale_loss,
)

__all__ = [
    "LARGEST",
    "SMALLEST",
    "DynamicScale",
    "HeadroomScale",
    "NoScale",
    "ScalePolicy",
    "StaticScale",
    "advance_dynamic",
    "resolve_scale",
    "scale_loss",
]
