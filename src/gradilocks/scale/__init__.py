"""Loss in, scaled loss out; and the policies that say by how much."""

from gradilocks.scale.headroom import HeadroomScale
from gradilocks.scale.policy import (
    LARGEST,
    SMALLEST,
    DynamicScale,
    NoScale,
    ScalePolicy,
    StaticScale,
    advance_dynamic,
    resolve_scale,
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
