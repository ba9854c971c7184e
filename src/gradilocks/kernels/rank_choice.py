"""A choice of this rank enters; the one that the first of all ranks has made leaves.

Ranks that compute with different kernels differ in the last bit, and the copies of a model drift
apart. A collective would wait for ranks that never ask: a program may clip on one of them alone. So
the first to choose writes it into the store of the default process group, and the others follow.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from gradilocks._torch import default_store

__all__ = ["first_choice", "has_company"]

_logger = logging.getLogger("gradilocks")


def has_company() -> bool:
    """Whether other ranks have met this one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def first_choice(subject: str, mine: str) -> str:
    """What the first rank that came here has chosen; `mine` where there is no other.

    Args:
        subject: what is chosen, in the words that all ranks use.
        mine: what this rank would choose.
    """
    if not has_company():
        return mine
    store = default_store()
    if store is None:
        return mine
    try:
        told = store.compare_set(f"gradilocks/choice/{subject}", "", mine)
    except Exception as error:  # A store of somebody else, or one whose server has gone.
        _logger.debug("the ranks cannot tell each other their %s: %s", subject, error)
        return mine
    chosen = told.decode() if isinstance(told, bytes) else str(told)
    return chosen or mine
