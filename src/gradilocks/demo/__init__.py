"""The Goldilocks experiment: gradients too small, too large, and just right.

An Experiment enters, a folder with its run files, pages and verdicts leaves, and nothing here
prints: the command line does. Its files read in order: ``arms`` (what is compared) and
``small_gpt`` (what is trained, on which text) -> ``training`` (the loop, one arm and one seed) ->
``processes`` (two of them share the arms out) -> ``verdicts`` (what the numbers say about each
claim) -> ``folder`` (all of it on disk). Torch is imported in the processes only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gradilocks.demo.arms import ARMS, Arm, Experiment, Job, Result, Setup, Step

# Loaded on first use: `gradilocks --help` needs the arms' names and nothing more.
_HOME = {
    "PAGE": "folder",
    "SUMMARY": "folder",
    "News": "processes",
    "prepare": "folder",
    "work": "processes",
    "write_all": "folder",
}

__all__ = [
    "ARMS",
    "PAGE",
    "SUMMARY",
    "Arm",
    "Experiment",
    "Job",
    "News",
    "Result",
    "Setup",
    "Step",
    "prepare",
    "work",
    "write_all",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradilocks.demo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gradilocks.demo.{_HOME[name]}"), name)


if TYPE_CHECKING:
    from gradilocks.demo.folder import PAGE, SUMMARY, prepare, write_all
    from gradilocks.demo.processes import News, work
