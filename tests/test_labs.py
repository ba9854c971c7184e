"""The labs: each runs as a reader would run it, draws its picture, and is right in what it shows.

Their claims are held against the numbers that their functions return: bits in the first, norms and
angles in the second, and in the third that networks trained side by side are trained as if alone.
"""

import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import gradilocks

pytest.importorskip("matplotlib", reason="the labs draw with matplotlib: pip install '.[labs]'")

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "labs"
LABS = ["clipping_geometry", "manual_scaling", "temporal_order"]


@pytest.fixture(scope="module")
def lab():
    """Imports a lab by its name, as Python does when it runs the script: its folder comes first."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in [*LABS, "drawing"]:
        sys.modules.pop(name, None)


@pytest.fixture
def run_lab(script_server, tmp_path):
    """Runs a lab as a reader does, in an empty folder."""

    def run(name, *arguments):
        return script_server.run(FOLDER / f"{name}.py", *arguments, cwd=tmp_path)

    return run


def size_of_png(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


# --- as processes ------------------------------------------------------------------------------

HEADS = {
    "clipping_geometry": ["largest norm", "ClipByNorm", "ClipPerTensor", "ClipByValue", "Checked"],
    "manual_scaling": ["skipped", "fp16, by hand", "fp16, no scaling", "the same in all 60 steps"],
    "temporal_order": ["length", "SGD, lr 0.1, clipped", "of 6", "the paper"],
}


@pytest.mark.parametrize("name", LABS)
def test_a_lab_prints_its_table_and_draws_a_picture_of_its_size(name, tmp_path, lab, run_lab):
    done = run_lab(name, "--quick", "--output", "some/where")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Quick: few steps")
    assert [word for word in HEADS[name] if word not in done.stdout] == []
    picture = tmp_path / "some" / "where" / f"{name}.png"
    assert f"The picture: {picture.relative_to(tmp_path)}" in done.stdout
    assert size_of_png(picture) == tuple(round(100 * side) for side in lab(name).SIZE)
    assert len(set(picture.read_bytes()[1000:])) > 100  # Not a blank sheet.


@pytest.mark.parametrize("name", LABS)
def test_a_lab_is_long_enough_to_explain_and_short_enough_to_read(name):
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert 80 <= len(lines) <= 200


def test_the_help_of_a_lab_says_what_one_will_see(run_lab):
    done = run_lab("temporal_order", "--help")
    assert done.returncode == 0
    for word in ("--quick", "--output", "You will see", "Smaller here"):
        assert word in done.stdout


def test_without_matplotlib_a_lab_says_how_to_get_it_before_it_computes(tmp_path, script_server):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, {str(FOLDER)!r}]\n"
        "sys.argv = ['manual_scaling.py']\n"
        f"runpy.run_path({str(FOLDER / 'manual_scaling.py')!r}, run_name='__main__')",
        encoding="utf-8",
    )
    done = script_server.run(script, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "The labs draw with matplotlib, which is missing: pip install matplotlib"
    ]


def test_an_output_that_is_a_file_is_one_clear_line(tmp_path, run_lab):
    (tmp_path / "taken").write_text("", encoding="utf-8")
    done = run_lab("manual_scaling", "--quick", "--output", "taken")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("cannot make this folder: File exists.")
    assert "Traceback" not in done.stderr


# --- loss scaling by hand ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(lab):
    return lab("manual_scaling").run_lab(steps=60)


@pytest.mark.parametrize("other", ["fp16, gradilocks", "fp16, torch"])
def test_scaling_by_hand_is_the_same_in_every_bit_of_every_step(runs, lab, other):
    assert runs["fp16, by hand"] == runs[other]
    assert lab("manual_scaling").first_difference(runs["fp16, by hand"], runs[other]) is None


def test_the_scale_overflows_halves_and_grows_again_in_the_steps_shown(runs):
    run = runs["fp16, by hand"]
    assert run[0].scale == 2.0**32
    assert run[0].skipped
    pairs = list(itertools.pairwise(run))
    assert all(after.scale == before.scale / 2 for before, after in pairs if before.skipped)
    assert any(after.scale == before.scale * 2 for before, after in pairs)
    assert not all(step.skipped for step in run)


def test_without_scaling_nearly_all_gradients_are_lost_and_the_loss_stays_high(runs):
    def loss(name):
        return sum(step.loss for step in runs[name][-20:]) / 20

    assert runs["fp16, no scaling"][0].lost > 0.9
    assert runs["fp16, gradilocks"][-1].lost < 0.01
    assert loss("fp16, no scaling") > loss("fp32") + 0.3
    assert loss("fp16, gradilocks") < loss("fp32") + 0.1


def test_a_difference_is_found_at_its_step(runs, lab):
    run = runs["fp16, by hand"]
    altered = [*run[:6], run[6]._replace(weights="another bit"), *run[7:]]
    assert lab("manual_scaling").first_difference(run, altered) == 7


# --- what clipping does to a gradient ----------------------------------------------------------


@pytest.fixture(scope="module")
def geometry(lab):
    module = lab("clipping_geometry")
    batches = module.real_gradients(40)
    return module, batches, module.measure(batches)


def test_by_norm_a_long_gradient_gets_the_limit_as_its_norm(geometry):
    module, _, measured = geometry
    one = measured["ClipByNorm"]
    long = one.before > module.MAX_NORM
    assert long.sum() > 0
    assert torch.allclose(
        one.after[long], torch.tensor(module.MAX_NORM, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert torch.equal(one.after[~long], one.before[~long])


def test_by_norm_the_cosine_is_one_and_by_value_and_by_tensor_it_is_not(geometry):
    _, _, measured = geometry
    assert measured["ClipByNorm"].turned.max() <= 2.0**-23
    assert measured["ClipPerTensor"].turned.rad2deg().max() > 5
    assert measured["ClipByValue"].turned.rad2deg().max() > 5


def test_the_lab_refuses_a_norm_that_is_off_by_more_than_rounding(geometry):
    module, batches, measured = geometry
    one = measured["ClipByNorm"]
    wrong = module.Geometry(before=one.before, after=one.after * (1 + 1e-6), turned=one.turned)
    module.check(batches[:2], measured)
    with pytest.raises(AssertionError):
        module.check(batches[:2], {**measured, "ClipByNorm": wrong})


def test_the_angle_is_right_for_large_and_for_tiny_ones(lab):
    angle = lab("clipping_geometry").angle
    right = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for radians in (1e-9, 1e-3, 1.0, math.pi / 2):
        other = torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)
        assert angle(right, 3.0 * other) == pytest.approx(radians, rel=1e-6)


# --- the temporal-order problem ----------------------------------------------------------------


def test_a_sequence_has_its_two_letters_where_the_task_puts_them(lab):
    symbols, orders = lab("temporal_order").sequences(torch.Generator().manual_seed(0), 200, 30)
    assert symbols.shape == (200, 30)
    letters = symbols < 2
    assert (letters.sum(dim=1) == 2).all()
    first, second = letters.nonzero()[:, 1].view(200, 2).unbind(1)
    assert set(first.tolist()) == {3, 4, 5}
    assert set(second.tolist()) == {15, 16, 17}
    rows = torch.arange(200)
    assert torch.equal(orders, symbols[rows, first] + 2 * symbols[rows, second])
    assert set(orders.tolist()) == {0, 1, 2, 3}


def test_networks_side_by_side_are_trained_and_clipped_as_if_each_were_alone(lab, monkeypatch):
    module = lab("temporal_order")
    tight = module.Arm("a limit that early steps reach", 0.1, 0.2, "black")
    monkeypatch.setattr(module, "ARMS", (*module.ARMS[:2], tight))
    length, steps = 12, 20
    together = module.all_networks()
    module.train(together, length, steps, test_every=steps)
    clipped = 0
    for index, arm in enumerate(module.ARMS):
        for seed in (0, module.SEEDS - 1):
            alone = module.Network(seed)
            optimizer = torch.optim.SGD(alone.parameters(), lr=arm.lr)
            draw = torch.Generator().manual_seed(1000 + seed)
            for _ in range(steps):
                symbols, orders = module.sequences(draw, module.BATCH, length)
                said = module.answers([alone], symbols[None])[0]
                optimizer.zero_grad()
                F.cross_entropy(said, orders).backward()
                limit = math.inf if arm.max_norm is None else arm.max_norm
                clipped += gradilocks.clip_grad_norm_(alone.parameters(), limit).item() > limit
                optimizer.step()
            twin = together[module.SEEDS * index + seed]
            for mine, other in zip(alone.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
    assert clipped > 0  # Else the limit was never put to the test.
