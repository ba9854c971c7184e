"""A Measurement in, a ClipLimit out: how far the gradients are pulled down, policy by policy."""

from gradilocks.clip.adagc import AdaGC
from gradilocks.clip.chained import Chain, chain
from gradilocks.clip.history import QuantileClip, SkipSpikes, ZScoreClip
from gradilocks.clip.parts import ClipPerGroup, ClipPerTensor
from gradilocks.clip.policy import (
    ClipByNorm,
    ClipByValue,
    ClipPolicy,
    MovingClip,
    NoClip,
    check_max_norm,
    clip_coefficient,
    resolve_clip,
)
from gradilocks.clip.units import AdaptiveClip

__all__ = [
    "AdaGC",
    "AdaptiveClip",
    "Chain",
    "ClipByNorm",
    "ClipByValue",
    "ClipPerGroup",
    "ClipPerTensor",
    "ClipPolicy",
    "MovingClip",
    "NoClip",
    "QuantileClip",
    "SkipSpikes",
    "ZScoreClip",
    "chain",
    "check_max_norm",
    "clip_coefficient",
    "resolve_clip",
]
