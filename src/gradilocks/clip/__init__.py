"""A Measurement in, a ClipLimit out: how far the gradients are pulled down, policy by policy."""

from gradilocks.clip.adaptive import AdaptiveClip, unit_norms, weights_of
from gradilocks.clip.chained import Chain, chain
from gradilocks.clip.clip_policy import (
    ClipByNorm,
    ClipByValue,
    ClipPolicy,
    ClipRules,
    Memory,
    NoClip,
    check_max_norm,
    clip_coefficient,
    remap_memory,
    resolve_clip,
    same_parameters,
)
from gradilocks.clip.history import AdaGC, QuantileClip, SkipSpikes, ZScoreClip
from gradilocks.clip.per_group import ClipPerGroup, ClipPerTensor

__all__ = [
    "AdaGC",
    "AdaptiveClip",
    "Chain",
    "ClipByNorm",
    "ClipByValue",
    "ClipPerGroup",
    "ClipPerTensor",
    "ClipPolicy",
    "ClipRules",
    "Memory",
    "NoClip",
    "QuantileClip",
    "SkipSpikes",
    "ZScoreClip",
    "chain",
    "check_max_norm",
    "clip_coefficient",
    "remap_memory",
    "resolve_clip",
    "same_parameters",
    "unit_norms",
    "weights_of",
]
