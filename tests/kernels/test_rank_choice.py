"""All ranks compute with the same kernels: the first to choose chooses for all, without a wait."""

from __future__ import annotations

import types

import pytest
import torch.distributed as dist

from gradilocks import kernels
from gradilocks.kernels import rank_choice


@pytest.fixture
def store(monkeypatch):
    """The store of a group of two ranks, which this process plays both of."""
    made = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rank_choice, "default_store", lambda: made)
    return made


@pytest.mark.usefixtures("store")
def test_the_first_to_choose_chooses_for_all():
    assert rank_choice.first_choice("colour", "red") == "red"
    assert rank_choice.first_choice("colour", "green") == "red"
    assert rank_choice.first_choice("size", "small") == "small"


def test_a_process_alone_chooses_for_itself(monkeypatch, store):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert rank_choice.first_choice("colour", "red") == "red"
    assert rank_choice.first_choice("colour", "green") == "green"


def test_a_store_that_fails_or_says_nothing_leaves_everybody_his_choice(monkeypatch, store):
    def gone(*args):
        raise RuntimeError("Connection reset by peer")

    for answer in (gone, lambda *args: b""):
        broken = types.SimpleNamespace(compare_set=answer)
        monkeypatch.setattr(rank_choice, "default_store", lambda broken=broken: broken)
        assert rank_choice.first_choice("colour", "green") == "green"
    monkeypatch.setattr(rank_choice, "default_store", lambda: None)
    assert rank_choice.first_choice("colour", "green") == "green"


REAL_RANKS = """
import torch.distributed as dist
from gradilocks.kernels.rank_choice import first_choice

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:  # The others come later; nobody waits for them.
    assert first_choice("colour", "red") == "red"
dist.barrier()
assert first_choice("colour", f"that of rank {rank}") == "red"
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_of_a_process_group_learn_of_it_from_its_store(script_server, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(REAL_RANKS)
    done = script_server.run(script, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr


class Library:
    """A rank's library: there, there after a wait, or never."""

    def __init__(self, at_once, later):
        self.at_once, self.later = at_once, later
        self.waited = 0.0

    def library(self):
        return self.at_once

    def library_within(self, seconds):
        self.waited = 0.0 if self.at_once else seconds
        return self.at_once or self.later

    def is_coming(self):
        return self.at_once is None and self.later is not None

    def status(self):
        return "Python: no C++ compiler was found"


def chosen(monkeypatch, at_once, later=None):
    """What a rank with such a library computes with, and for how long it would wait."""
    mine = Library(at_once, later)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "native", mine)
        return kernels._without_native(), mine.waited


def test_a_rank_alone_takes_what_is_there_and_never_waits(monkeypatch):
    assert chosen(monkeypatch, "library") == ("", 0.0)
    why, waited = chosen(monkeypatch, None, "library")
    assert why.startswith("there was no C++ library yet")
    assert waited == 0.0


def test_a_rank_that_never_has_one_says_why_and_not_that_it_is_not_there_yet(monkeypatch):
    assert chosen(monkeypatch, None) == ("no C++ compiler was found", 0.0)


@pytest.mark.usefixtures("store")
def test_a_rank_whose_library_is_being_built_waits_for_it_where_another_has_one(monkeypatch):
    assert chosen(monkeypatch, "library") == ("", 0.0)
    assert chosen(monkeypatch, None, "library") == ("", 120.0)


@pytest.mark.usefixtures("store")
def test_a_rank_that_cannot_have_one_says_that_ranks_may_differ(monkeypatch):
    assert chosen(monkeypatch, "library") == ("", 0.0)
    with pytest.warns(RuntimeWarning, match="may differ in the last bit") as told:
        why, _ = chosen(monkeypatch, None)
    assert "GRADILOCKS_NATIVE=off for all ranks" in str(told[0].message)
    assert why.startswith("another rank has a C++ library")


@pytest.mark.usefixtures("store")
def test_ranks_follow_one_that_has_begun_with_plain_torch(monkeypatch):
    assert chosen(monkeypatch, None, "later")[0].startswith("there was no C++ library yet")
    why, waited = chosen(monkeypatch, "library")
    assert why == "another rank has begun with plain torch, and all compute alike"
    assert waited == 0.0


@pytest.mark.parametrize("others", ["reference", "native"])
def test_what_was_chosen_before_the_ranks_met_is_chosen_again_with_them(monkeypatch, store, others):
    native_backend = pytest.importorskip("gradilocks.kernels.native_backend")
    mine = native_backend if others == "reference" else kernels.reference
    reason = "fused: C++" if others == "reference" else "reference: plain torch serves cpu"
    monkeypatch.setitem(kernels.BACKENDS, "cpu", mine)
    monkeypatch.setitem(kernels._reasons, "cpu", reason)
    monkeypatch.setattr(kernels, "_has_agreed", False)
    rank_choice.first_choice("cpu kernels", others)  # Another rank has come first.
    kernels.agree_with_ranks()
    now = kernels.BACKENDS["cpu"]
    assert (now is kernels.reference) == (others == "reference")
    kernels.agree_with_ranks()
    assert kernels.BACKENDS["cpu"] is now


def test_a_process_alone_keeps_what_it_has_chosen(monkeypatch):
    monkeypatch.setattr(kernels, "_has_agreed", False)
    before = kernels.BACKENDS["cpu"]
    kernels.agree_with_ranks()
    assert kernels.BACKENDS["cpu"] is before
    assert not kernels._has_agreed
