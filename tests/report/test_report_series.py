"""What the plots show, as data: nothing of note is lost where a column is too long for a screen."""

from __future__ import annotations

import math

import pytest

from gradilocks.report.formatting import (
    clean,
    count,
    duration,
    listed,
    number,
    percent,
    power,
    short_name,
    short_names,
    size,
)
from gradilocks.report.series import (
    BUCKETS,
    MOST_COLUMNS,
    MOST_MARKS,
    MOST_ROWS,
    Line,
    Places,
    buckets,
    clipped_share,
    heat,
    line,
    skip_marks,
    staircase,
    turns,
    waiting_share,
)
from gradilocks.report.tracks import Track, tracks
from gradilocks.runfile import Culprit, Run
from tests.report.made_runs import NAMES, SKIPPED, made_run

NAN = math.nan


def track(run: Run) -> Track:
    (made,) = tracks(run)
    return made


@pytest.mark.parametrize(("length", "most"), [(10, 3), (3, 10), (1, 1), (0, 5), (1000, 7)])
def test_buckets_cover_every_place_once(length: int, most: int) -> None:
    made = list(buckets(length, most))
    assert [i for bucket in made for i in bucket] == list(range(length))
    assert len(made) == min(length, most)
    assert all(len(bucket) > 0 for bucket in made)


def test_a_long_line_is_the_median_of_neighbours_with_a_band_that_keeps_every_spike() -> None:
    spikes = {3: 7.0, 50_001: 9.0, 99_999: 8.0, 70_007: -7.0}
    values = [spikes.get(place, 1.0 + place % 2 / 10) for place in range(100_000)]
    made = line(Places(range(1, 100_001), [0.5 * place for place in range(100_000)]), values)
    assert made is not None
    assert (len(made.x), made.thinned) == (BUCKETS, 100_000)
    assert set(made.y) <= {1.0, 1.05, 1.1}  # A spike is no median of its neighbours.
    assert sorted(value for value in made.high if value and value > 1.1) == [7.0, 8.0, 9.0]
    assert [value for value in made.low if value and value < 1.0] == [-7.0]
    assert made.x == sorted(made.x)
    assert [0.5 * (step - 1) for step in made.x] == made.t


def test_a_long_gap_stays_a_gap_and_a_short_one_costs_no_neighbour() -> None:
    values = [1.0] * 5_000 + [NAN] * 5_000 + [2.0] * 10_000
    values[15_000] = NAN
    made = line(Places(range(20_000), [float(place) for place in range(20_000)]), values)
    assert made is not None
    missing = [x for x, y in zip(made.x, made.y, strict=True) if y is None]
    assert 4_900 < min(missing) < max(missing) < 10_100
    assert len(missing) == pytest.approx(BUCKETS / 4, abs=2)
    assert [y is None for y in made.y] == [y is None for y in made.low]


def test_points_that_no_line_reaches_are_known() -> None:
    def of(values: list[float]) -> Line:
        made = line(Places(range(len(values)), [float(i) for i in range(len(values))]), values)
        assert made is not None
        return made

    assert not of([1.0, 2.0, NAN, 3.0, 4.0]).has_loose_points
    assert of([1.0, 2.0, NAN, 3.0, NAN, 4.0, 5.0]).has_loose_points
    assert of([1.0]).has_loose_points
    assert (of([1.0, NAN]).known, of([1.0, 2.0]).known) == (1, 2)


def test_a_column_that_jumps_keeps_its_jumps() -> None:
    assert turns([4.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0]) == [0, 2, 5, 6]
    assert turns([]) == []
    assert turns([NAN, NAN, 1.0]) == [0, 2]


def test_a_short_line_is_whole_and_a_gap_is_none() -> None:
    of = track(made_run(100, plant={50: SKIPPED}))
    made = line(of, of.norm)
    assert made is not None
    assert (made.x, made.thinned) == (list(range(1, 101)), 0)
    assert made.t == [float(f"{0.1 * step:.7g}") for step in made.x]
    assert [i for i, y in enumerate(made.y) if y is None] == [49]


def test_a_column_without_a_value_makes_no_line() -> None:
    of = track(made_run(always=lambda n: {"loss": None, "scale": None, "limit": None}))
    assert line(of, of.loss) is None
    assert staircase(of, of.scale) is None
    of = track(made_run(always=lambda n: {"limit": None, "clipped": False}))
    assert clipped_share(of) is None


def test_a_staircase_is_its_jumps() -> None:
    of = track(made_run(always=lambda n: {"scale": 2.0 ** (16 + n // 100)}))
    made = staircase(of, of.scale)
    assert made is not None
    assert made.x == [1, 100, 200, 300]
    assert made.y == [2.0**16, 2.0**17, 2.0**18, 2.0**19]


def test_every_skip_is_marked_with_its_reason_and_culprits() -> None:
    culprits = tuple(Culprit(name, 1, 0) for name in ("a", "b", "c"))
    rejected = {"skipped": True, "reason": "rejected"}
    bad = {**SKIPPED, "culprits": culprits}
    told = {"finite_gradients": 7, "finite_after": "d"}
    taken = {"nan": 1, "norm": None}
    unknown = {"loss": None, "loss_nonfinite": False}
    plant = {7: bad, 9: rejected, 11: {**bad, **told}, 12: {**bad, **told, **unknown}, 20: taken}
    plant |= {21: {**bad, **told}, 23: {**bad, **told}}
    marks = skip_marks(track(made_run(plant=plant)))
    assert marks is not None
    assert marks.x == [7, 9, 11, 12, 21, 23]
    assert marks.words == [
        "Inf in 3 gradients",
        "rejected by the clip policy",
        "NaN in a, NaN in b (+1 more)",
        "Inf in 3 gradients",
        "NaN or Inf, and the weights are spoilt since step 20",
        "NaN in a, NaN in b (+1 more)",
    ]


def test_too_many_skips_share_marks_and_none_is_forgotten() -> None:
    of = track(made_run(4000, detail_every=0, always=lambda n: SKIPPED))
    marks = skip_marks(of)
    assert marks is not None
    assert (len(marks.x), marks.thinned) == (MOST_MARKS, 4000)
    more = sum(int(words.split("and ")[1].split(" more")[0]) for words in marks.words)
    assert more + len(marks.x) == 4000


def test_the_clipped_share_is_of_steps_that_were_taken() -> None:
    skipped = {n: {**SKIPPED, "clipped": True} for n in range(1, 6)}
    of = track(made_run(100, plant=skipped, always=lambda n: {"clipped": n <= 10}))
    made = clipped_share(of)
    assert made is not None
    assert made.y[0] == 1.0
    assert set(made.y[1:]) == {0.0}
    assert clipped_share(track(made_run(100, always=lambda n: {"clipped": False}))) is None
    assert clipped_share(track(made_run(19, always=lambda n: {"clipped": True}))) is None


def test_the_share_between_steps_is_of_the_time_of_the_steps_that_know_it() -> None:
    def always(n: int) -> dict[str, object]:
        return {"waited": None if n > 50 else 0.05 if n <= 30 else 0.02}

    of = track(made_run(60, always=always))  # A step takes 0.1 seconds.
    made = waiting_share(of, of.waited, of.seconds)
    assert made is not None
    assert made.y == pytest.approx([0.5, 0.5, 0.5, 0.2, 0.2, None, None])
    assert waiting_share(of, [NAN] * 60, of.seconds) is None


def test_the_time_of_a_step_is_not_known_where_a_session_begins() -> None:
    run = made_run(6)
    run = Run(run.path, run.header, run.optimizers, run.steps, begins=(3,), end=run.end)
    seconds = track(run).seconds
    assert [place for place, each in enumerate(seconds) if math.isnan(each)] == [0, 3]
    assert seconds[1] == pytest.approx(0.1)


def test_nan_begins_where_it_is_in_the_loss_or_goes_into_the_weights() -> None:
    caught = {20: SKIPPED, 30: SKIPPED}  # Overflows that the scale is for.
    lost = {**SKIPPED, "loss": None, "loss_nonfinite": True}
    taken = {"norm": None, "nan": 3}
    assert track(made_run(plant=caught)).nan_begins is None
    assert track(made_run(plant={**caught, 61: lost, 70: taken})).nan_begins == 60
    assert track(made_run(plant={**caught, 50: taken, 61: lost})).nan_begins == 49


def test_a_heat_map_has_a_row_a_tensor_and_a_column_a_look() -> None:
    of = track(made_run(100, details={"norm": {NAMES[1]: None}}))
    made = heat(of, lambda tensor: tensor.norm, maps=3)
    assert made is not None
    assert made.rows == list(NAMES)
    assert made.edges == [10.0, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]
    assert made.z[1] == [None] * 10
    assert made.z[0] == [float(f"{value:.3g}") for value in of.tensors[0].norm]
    assert (made.thinned, made.folded) == (0, 0)


def test_a_long_and_tall_heat_map_keeps_the_largest_of_each_cell() -> None:
    names = tuple(f"layer.{i}" for i in range(MOST_ROWS * 2))
    run = made_run(300, names=names, detail_every=1)
    of = track(run)
    spiked = of.tensors[333].norm
    spiked[250] = 99.0  # type: ignore[index]
    made = heat(of, lambda tensor: tensor.norm, maps=3)
    assert made is not None
    assert (made.thinned, made.folded) == (300, 800)
    assert len(made.rows) == MOST_ROWS
    assert made.rows[0] == "layer.0 … layer.1"
    assert len(made.columns) <= MOST_COLUMNS
    assert max(value or 0.0 for value in made.z[166]) == 99.0


def test_two_tensors_of_one_name_have_two_rows() -> None:
    of = track(made_run(names=("w", "w", "v")))
    made = heat(of, lambda tensor: tensor.norm, maps=3)
    assert made is not None
    assert made.rows == ["w", "w (2)", "v"]


def test_the_update_of_a_skipped_step_is_missing_not_zero() -> None:
    of = track(made_run(100, plant={50: {"skipped": True, "reason": "nonfinite"}}))
    assert math.isnan(of.tensors[0].update[4])


def test_steps_whose_numbers_go_back_stand_in_the_order_of_the_file() -> None:
    run = made_run(100)
    run.steps.extend(made_run(50).steps)
    of = track(run)
    assert of.renumbered
    assert list(of.at) == list(range(1, 151))


def test_names_are_cut_so_that_the_number_of_the_block_stays() -> None:
    names = [f"transformer.h.{i}.attn.c_attn.weight" for i in range(48)]
    for most in (34, 30, 24, 18, 14):
        short = [short_name(name, most) for name in names]
        assert max(map(len, short)) <= most
        assert len(set(short)) == 48
        assert all(f"{i}." in name for i, name in enumerate(short))
    assert short_name(names[3], 40) == names[3]
    assert short_name("x" * 90, 10) == "xxxx…xxxxx"
    assert len(short_name("1.2.3.4.5.6.7.8.9.10.11.12", 9)) == 9
    assert len(short_name("a." * 90 + "b", 10)) <= 10


def test_names_that_stand_together_stay_apart_when_they_are_cut() -> None:
    parts = ("ln_1", "attn", "ln_2", "mlp.c_fc", "mlp.c_proj")
    names = ["transformer.wte", "transformer.wpe"]
    names += [f"transformer.h.{number}.{part}" for number in (0, 11) for part in parts]
    for most in (12, 14, 18):
        short = short_names(names, most)
        assert len({*short}) == len(names), short
        assert max(map(len, short)) <= most
    assert short_names(names, 14)[2:5] == ["t.h.0.ln_1", "t.h.0.attn", "t.h.0.ln_2"]


@pytest.mark.parametrize("most", [13, 18, 30])
def test_no_two_layers_are_cut_to_the_same_name(most: int) -> None:
    parts = ["ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_proj.weight"]
    names = [f"transformer.h.{block}.{part}" for block in range(12) for part in parts]
    lora = [
        f"model.layers.{block}.self_attention.{which}_projection.lora_{half}.weight"
        for block in range(12)
        for which in ("query", "quality", "value")
        for half in "AB"
    ]
    for several in (names, names + lora):
        short = short_names(several, most)
        assert len({*short}) == len(several)
        assert max(map(len, short)) <= most
    if most == 18:
        assert short_names(names, most)[2:4] == ["t.h.0.a.c_proj.w", "t.h.0.m.c_proj.w"]


def test_words_are_short_and_true() -> None:
    assert [number(x) for x in (0, 1.5, 1234567.0, 1e-9)] == ["0", "1.5", "1.23e6", "1e-9"]
    assert [power(x) for x in (1.0, 4.0, 65536.0, 0.5, 100.0)] == ["1", "4", "2^16", "2^-1", "100"]
    assert [percent(x) for x in (0.0, 1e-6, 0.0123, 0.5, 0.99999, 1.0)] == [
        "0 %",
        "< 0.01 %",
        "1.2 %",
        "50 %",
        "> 99.9 %",
        "100 %",
    ]
    assert [duration(x) for x in (1.0, 61.0, 3700.0, 90_000.0)] == [
        "1.0 s",
        "1 min 1 s",
        "1 h 1 min",
        "1 d 1 h",
    ]
    assert (count(1, "step"), count(2, "step")) == ("1 step", "2 steps")
    assert [size(x) for x in (2**19, 1.5 * 2**30, 2**41)] == ["512 KiB", "1.5 GiB", "2 TiB"]
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert clean("a\u2028\ud800b") == "a\\u2028\\ud800b"
