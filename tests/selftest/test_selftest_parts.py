"""The parts of the selftest that need no ranks: seats, what fits, results, what is published."""

from __future__ import annotations

import socket

import pytest
import torch

from gradilocks.selftest import CannotRun, CheckResult, Seat, find_seat, verdict_of
from gradilocks.selftest.check_list import checks_for
from gradilocks.selftest.check_result import Found, combined, published
from gradilocks.selftest.rank_worker import _check_gpus

TOLD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


def test_a_process_without_a_launcher_is_alone() -> None:
    assert find_seat({}) == Seat()
    assert find_seat({"MASTER_ADDR": "10.0.0.7"}) == Seat()


def test_the_seat_is_what_the_launcher_says() -> None:
    seat = find_seat({**TOLD, "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (seat.rank, seat.ranks, seat.local_rank, seat.hosted) == (1, 4, 0, True)
    assert (seat.address, seat.port) == ("10.0.0.7", 29500)
    assert find_seat(TOLD).local_rank == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set. Start the ranks with torchrun"),
        ({"RANK": "first"}, "whole numbers, and one is not"),
        ({"RANK": "4"}, "RANK is 4 of WORLD_SIZE 4; expected 0 to 3"),
    ],
)
def test_variables_that_make_no_sense_are_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(CannotRun, match=said):
        find_seat({**TOLD, **changed})


def test_more_ranks_than_gpus_is_an_error_with_the_way_out(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _check_gpus(Seat(1, 4, 1))
    with pytest.raises(ValueError, match="has 2 GPUs, and NCCL needs one a rank") as caught:
        _check_gpus(Seat(2, 4, 2))
    assert "--nproc-per-node 2 -m gradilocks selftest; or take --device cpu" in str(caught.value)


@pytest.mark.parametrize(("ranks", "fitting"), [(1, 6), (2, 14), (3, 14), (4, 23), (8, 23)])
def test_what_fits_so_many_ranks(ranks: int, fitting: int) -> None:
    checks = [check for check in checks_for(ranks, "cpu") if check.group == "ranks"]
    assert len({check.name for check in checks}) == len(checks) == 24
    assert sum(not check.unfit for check in checks) == fitting
    unfit = {check.unfit for check in checks if check.unfit}
    assert "needs GPUs" in unfit
    assert ("needs an even number of ranks" in unfit) == (ranks == 5)


def test_an_odd_number_of_ranks_has_no_grid() -> None:
    why = {check.name: check.unfit for check in checks_for(5, "cuda")}
    assert why["HSDP"] == "needs an even number of ranks"
    assert why["FSDP2, offloaded"] == ""


def test_ranks_that_differ_are_found_though_each_is_content() -> None:
    tables = [[[0.5, 1], [1.0, 1]]], [[[0.5, 1], [1.0, 0]]]
    result = combined("FSDP2", "ranks", [Found(alike={"all": table}) for table in tables])
    assert result.state == "wrong"
    assert result.problems == ("ranks 0 and 1 differ: [1.0, 1] and [1.0, 0]",)
    apart = [Found(alike={"half 0": [1]}), Found(alike={"half 1": [2]}), Found()]
    assert combined("two models", "ranks", apart).state == "ok"


def test_the_worst_state_counts_and_equal_problems_are_told_once() -> None:
    found = [Found(["off"], state="wrong"), Found(["off"], state="wrong"), Found(state="hung")]
    result = combined("TP", "ranks", found)
    assert (result.state, result.problems) == ("hung", ("ranks 0, 1: off",))


def test_the_verdict_names_what_failed() -> None:
    fine = CheckResult("DDP", "ranks", "ok", 1.0)
    bad = CheckResult("TP", "ranks", "hung", 1.0)
    left = CheckResult("HSDP", "ranks", "not tried", 0.0, why="needs 4 ranks or more")
    assert verdict_of([fine, left]) == (
        True,
        "All 1 checks passed. 1 was not tried.",
    )
    assert verdict_of([fine, bad]) == (False, "1 of 2 checks FAILED: TP.")
    assert verdict_of([left]) == (False, "Nothing was checked.")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("in /home/ann/env/site-packages/torch/optim/sgd.py:12", "in torch/optim/sgd.py:12"),
        ('File "/opt/ann/project/train.py"', 'File "train.py"'),
        (r"C:\Users\ann\x.py failed", "x.py failed"),
        ("peer [::ffff:10.1.2.3]:4242 and 192.168.0.7:99", "peer <address> and <address>"),
        (f"host {socket.gethostname()} is gone", "host <host> is gone"),
        ("1/2 of a/b, 3 /s and p = 2", "1/2 of a/b, 3 /s and p = 2"),
    ],
)
def test_paths_hosts_and_addresses_are_not_published(text: str, kept: str) -> None:
    assert published(text) == kept
