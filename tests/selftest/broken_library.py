"""`gradilocks selftest` over a library that is broken on purpose, each check in another way.

Run by the tests as a script, once a rank. What is patched is the library alone, so that what is
seen of it is what the selftest finds out by itself. The argument is a folder for notes.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gradilocks.cli import main
from gradilocks.kernels import reference
from gradilocks.ranks import layout, model_ranks
from gradilocks.ranks.parameter_table import ParameterTable
from gradilocks.scale import HeadroomScale
from gradilocks.step import table

SECRET = "/home/somebody/secret/plans.py"
RANK = int(os.environ.get("RANK", "0"))


def once(what):
    """Whether this has not been done yet, by whatever process of this rank."""
    note = Path(sys.argv[1]) / f"{what} {RANK}"
    done = note.exists()
    note.touch()
    return not done


def a_kernel_that_is_off():
    clamp = reference.clamp_
    reference.clamp_ = lambda tensors, bound: clamp(tensors, bound * 1.01)


def a_rank_that_is_not_counted():
    """Of plain parts: pipelines and FSDP1."""
    by_group = model_ranks._by_group

    def wrong(params, options, name):
        found = by_group(params, options, name)
        if found.plain_are_parts and RANK == 1:
            return dataclasses.replace(found, counting=dict.fromkeys(found.counting, False))
        return found

    model_ranks._by_group = wrong


def a_collective_too_many():
    """For policies that bound tensors apart."""
    whole_numbers = ParameterTable.whole_numbers

    def more(*args, **options):
        dist.all_reduce(torch.zeros(1))
        return whole_numbers(*args, **options)

    ParameterTable.whole_numbers = more


def a_rank_that_hangs():
    """With `copies=`, the first time."""
    with_copies = model_ranks._with_copies

    def waiting(known, copies, name, **options):
        if RANK == 1 and copies is not None and once("hang"):
            time.sleep(1000)
        return with_copies(known, copies, name, **options)

    model_ranks._with_copies = waiting


def an_error():
    def advance(*args, **options):
        raise RuntimeError(f"sabotage in {SECRET}")

    HeadroomScale.advance = advance


def a_process_that_dies():
    """Where a gradient is a summand: sequence parallel."""
    reduced = layout.with_sums_reduced

    def dying(param, grad, *more):
        if RANK == 0 and any(placed.is_partial() for placed in grad.placements):
            os.kill(os.getpid(), signal.SIGKILL)
        return reduced(param, grad, *more)

    layout.with_sums_reduced = table.with_sums_reduced = dying


if __name__ == "__main__":
    a_kernel_that_is_off()
    a_rank_that_is_not_counted()
    a_collective_too_many()
    a_rank_that_hangs()
    an_error()
    a_process_that_dies()
    sys.exit(main(["selftest", *sys.argv[2:]]))
