"""Optimizers that unscale, clip and step in one pass over memory."""

from gradilocks.optim.optimizers import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
