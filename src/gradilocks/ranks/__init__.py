"""Training on several ranks: one share per parameter, one collective per step."""

from gradilocks.ranks.replicas import check_replicas

__all__ = ["check_replicas"]
