"""What a recorder writes is what happened."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, Recorder, SkipSpikes, read_run
from gradilocks.errors import BadRunFile, NonFiniteGradient
from gradilocks.record import Sample
from gradilocks.runfile import Culprit, Trace
from tests.control.gradient_scripts import loss_making, parameter
from tests.record.recorded import INF, NAN, recorded, small_model, train


def test_every_step_is_there_with_its_numbers(tmp_path):
    path = tmp_path / "deep" / "er" / "a.jsonl"
    control, _ = recorded(path, steps=12, clip=0.001)
    outcome_limit = 0.001
    control.recorder.close()
    run = read_run(path)
    assert [step.step for step in run.steps] == list(range(1, 13))
    assert all(step.limit == outcome_limit and step.clipped for step in run.steps)
    assert all(step.scale == 65536.0 and step.lr == 0.01 for step in run.steps)
    assert all(step.norm > outcome_limit and step.loss > 0 for step in run.steps)
    assert [step.step for step in run.steps if step.detail] == [1, 11]
    assert run.end.status == "finished"
    assert (control.recorder.steps, control.recorder.skipped) == (12, 0)
    assert run.optimizers[0].names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert run.header.settings["clip"].startswith("ClipByNorm")
    assert run.header.settings["detail_every"] == 10
    times = [step.time for step in run.steps]
    assert times == sorted(times)


def test_the_numbers_are_those_of_the_outcome_and_of_the_loss(tmp_path):
    model = small_model()
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=0.5, record=tmp_path / "a"
    )
    told = []
    for number in range(1, 4):
        loss = model(torch.ones(2, 6) * number).square().sum()
        control.backward(loss)
        outcome = control.step()
        told.append((loss.item(), outcome.norm, outcome.clipped, outcome.scale))
        control.zero_grad()
    control.recorder.close()
    steps = read_run(tmp_path / "a").steps
    assert [(s.loss, s.norm, s.clipped, s.scale) for s in steps] == told


def test_a_skipped_step_names_its_culprits_in_backward_order(tmp_path):
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1))
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, record=tmp_path / "a"
    )
    control.backward(
        loss_making(
            (model[0].weight, torch.tensor([[INF, NAN]])),
            (model[1].weight, 1.0),
            (model[1].bias, -INF),
        )
    )
    control.step()
    control.recorder.flush()
    (step,) = read_run(tmp_path / "a").steps
    assert (step.skipped, step.reason, step.nan, step.inf) == (True, "nonfinite", 1, 2)
    assert step.culprits == (Culprit("1.bias", 0, 1), Culprit("0.weight", 1, 1))
    assert step.norm is None
    assert step.detail.update == [0.0, 0.0, 0.0]
    assert step.detail.norm[1] == 1.0
    assert step.detail.norm[0] is None


def test_a_step_that_a_policy_rejected_says_so(tmp_path):
    weight = parameter(1.0, 1.0)
    control = GradientControl(
        torch.optim.SGD([weight], lr=0.0),
        clip=SkipSpikes(at_least=4, window=8),
        record=tmp_path / "a",
    )
    for size in [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 500.0]:
        control.backward(loss_making((weight, size)))
        control.step()
        control.zero_grad()
    control.recorder.close()
    steps = read_run(tmp_path / "a").steps
    assert [step.reason for step in steps] == [None] * 6 + ["rejected"]
    assert steps[-1].skipped
    assert steps[-1].culprits == ()


def test_detail_is_unscaled_and_none_where_there_was_no_gradient(tmp_path):
    used, unused = parameter(3.0, 4.0, 0.0, 0.0), parameter(1.0)
    optimizer = torch.optim.SGD([unused, used], lr=0.5)
    control = GradientControl(optimizer, scale=1024.0, record=tmp_path / "a")
    control.backward(loss_making((used, torch.tensor([0.0, 2.0, 0.0, 0.0]))))
    control.step()
    control.recorder.close()
    detail = read_run(tmp_path / "a").steps[0].detail
    assert detail.norm == [None, 2.0]
    assert detail.largest == [None, 2.0]
    assert detail.zeros == [None, 0.75]
    assert detail.nan == [None, 0]
    assert detail.weight == [None, 5.0]
    assert detail.update == [None, 0.2]


def test_a_double_precision_weight_that_hardly_moves_is_seen_to_move(tmp_path):
    weight = parameter(1.0, 1.0, dtype=torch.float64)
    optimizer = torch.optim.SGD([weight], lr=1e-12)
    control = GradientControl(optimizer, scale=None, record=tmp_path / "a")
    control.backward(loss_making((weight, 1.0)))
    control.step()
    control.recorder.close()
    (ratio,) = read_run(tmp_path / "a").steps[0].detail.update
    assert ratio == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("order", [1.0, math.inf])
def test_norms_of_tensors_are_two_norms_whatever_the_clip_measures(tmp_path, order):
    from gradilocks import ClipByNorm

    weight = parameter(1.0, 1.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    control = GradientControl(optimizer, clip=ClipByNorm(9.0, order=order), record=tmp_path / "a")
    control.backward(loss_making((weight, torch.tensor([3.0, 4.0]))))
    control.step()
    control.recorder.close()
    (step,) = read_run(tmp_path / "a").steps
    assert step.detail.norm == [5.0]
    assert step.norm == (7.0 if order == 1.0 else 4.0)


def test_gradients_that_were_unscaled_before_the_step_are_not_divided_again(tmp_path):
    weight = parameter(3.0, 4.0)
    control = GradientControl(torch.optim.SGD([weight], lr=0.1), record=tmp_path / "a")
    control.backward(loss_making((weight, torch.tensor([6.0, 8.0]))))
    control.unscale_()
    control.step()
    control.recorder.close()
    (step,) = read_run(tmp_path / "a").steps
    assert (step.norm, step.detail.norm, step.scale) == (10.0, [10.0], 65536.0)


@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_losses_whose_gradients_the_model_has_cleared_are_none_of_the_step(scale, tmp_path):
    model = small_model()
    settings = {} if scale else {"scale": None}
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, record=tmp_path / "a", **settings
    )
    told = []
    for number in range(1, 5):
        if number == 3:
            control.backward(model(torch.ones(2, 6)).sum() * NAN)
            model.zero_grad()
        losses = [model(torch.ones(2, 6) * number).square().sum() / 2 for _ in range(2)]
        for loss in losses:
            control.backward(loss)
        control.step()
        control.zero_grad()
        told.append(sum(loss.item() for loss in losses))
    control.recorder.close()
    assert [s.loss for s in read_run(tmp_path / "a").steps] == pytest.approx(told)


def test_losses_that_were_handed_out_before_any_backward_are_added_up(tmp_path):
    model = small_model()
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, record=tmp_path / "a"
    )
    losses = [model(torch.ones(2, 6) * number).square().sum() for number in (1, 2)]
    sum(control.scale_loss(loss) for loss in losses).backward()
    control.step()
    control.recorder.close()
    (step,) = read_run(tmp_path / "a").steps
    assert step.loss == pytest.approx(sum(loss.item() for loss in losses))


def test_losses_of_micro_batches_are_added_up(tmp_path):
    model = small_model()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), record=tmp_path / "a")
    sums = []
    for _ in range(2):
        total = 0.0
        for number in range(3):
            loss = model(torch.ones(1, 6) * number).square().sum() / 3
            total += loss.item()
            if number == 1:
                control.scale_loss(loss).backward()
            else:
                control.backward(loss)
        control.step()
        control.zero_grad()
        sums.append(total)
    control.recorder.close()
    assert [step.loss for step in read_run(tmp_path / "a").steps] == pytest.approx(sums)


def test_two_optimizers_have_a_line_each_and_share_norm_and_decision(tmp_path, caplog):
    body, head = parameter(3.0), parameter(4.0, 0.0)
    model = nn.ParameterDict({"body": body, "head": head})
    control = GradientControl(
        torch.optim.SGD([body], lr=0.5),
        torch.optim.AdamW([head], lr=0.25),
        model=model,
        record=Recorder(tmp_path / "a", flush_every=1),
    )
    control.backward(loss_making((body, 3.0), (head, torch.tensor([4.0, 0.0]))))
    control.step()
    control.zero_grad()
    control.backward(loss_making((body, 3.0), (head, torch.tensor([INF, 0.0]))))
    control.step()
    control.recorder.close()
    run = read_run(tmp_path / "a")
    assert [(s.optimizer, s.step, s.norm, s.lr) for s in run.steps[:2]] == [
        (0, 1, 5.0, 0.5),
        (1, 1, 5.0, 0.25),
    ]
    assert run.steps[0].detail.norm == [3.0]
    assert run.steps[1].detail.zeros == [0.5]
    assert [s.skipped for s in run.steps] == [False, False, True, True]
    assert [s.culprits for s in run.steps[2:]] == [(), (Culprit("head", 0, 1),)]
    assert [r.message for r in caplog.records] == [
        "step 2 skipped: Inf in head; scale 65536 → 32768"
    ]


def test_without_a_model_parameters_are_named_by_their_place(tmp_path, caplog):
    weight = parameter(1.0)
    control = GradientControl(torch.optim.SGD([weight], lr=0.1), record=tmp_path / "a")
    control.backward(loss_making((weight, NAN)))
    control.step()
    control.recorder.close()
    assert "NaN in param_groups[0]['params'][0]; scale 65536 → 32768" in caplog.text


def test_parameters_that_join_later_are_recorded_too(tmp_path):
    one, other = parameter(1.0), parameter(2.0)
    optimizer = torch.optim.SGD([one], lr=0.1)
    control = GradientControl(optimizer, record=Recorder(tmp_path / "a", detail_every=1))
    control.backward(loss_making((one, 1.0)))
    control.step()
    control.zero_grad()
    optimizer.add_param_group({"params": [other]})
    control.backward(loss_making((one, 1.0), (other, 2.0)))
    control.step()
    control.recorder.close()
    run = read_run(tmp_path / "a")
    assert [len(step.detail.norm) for step in run.steps] == [1, 2]
    assert [len(run.optimizers[step.optimizer].names) for step in run.steps] == [1, 2]


def test_a_step_with_a_closure_is_one_step_with_the_last_loss(tmp_path):
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    control = GradientControl(optimizer, model=model, record=tmp_path / "a")
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        control.backward(loss)
        losses.append(loss.item())
        return loss

    control.step(closure)
    control.recorder.close()
    (step,) = read_run(tmp_path / "a").steps
    assert len(losses) > 1
    assert step.loss == losses[-1]
    assert step.detail.update[0] > 0


def test_a_step_that_raises_is_recorded_too(tmp_path):
    weight = parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    control = GradientControl(optimizer, on_nonfinite="raise", record=tmp_path / "a")
    control.backward(loss_making((weight, NAN)))
    with pytest.raises(NonFiniteGradient):
        control.step()
    control.recorder.close()
    assert [step.skipped for step in read_run(tmp_path / "a").steps] == [True]


def test_sparse_gradients_are_measured_by_the_values_they_hold(tmp_path):
    table = nn.Embedding(10, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=table, scale=None, record=tmp_path / "a")
    control.backward(table(torch.tensor([1, 1, 3])).sum())
    control.step()
    control.recorder.close()
    detail = read_run(tmp_path / "a").steps[0].detail
    assert detail.zeros == [0.0]
    assert detail.largest == [2.0]


def test_a_compiled_training_step_is_recorded_too(tmp_path):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    control = GradientControl(optimizer, model=model, clip=1.0, record=tmp_path / "a")

    @torch.compile(backend="eager")
    def step(inputs):
        control.backward(model(inputs).square().mean())
        control.step()
        control.zero_grad()

    for number in range(4):
        step(torch.full((2, 6), 0.1 * number + 0.1))
    control.recorder.close()
    steps = read_run(tmp_path / "a").steps
    assert [s.step for s in steps] == [1, 2, 3, 4]
    assert all(s.loss > 0 and s.norm > 0 for s in steps)


def test_a_tensor_learning_rate_is_recorded(tmp_path):
    weight = parameter(1.0)
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.125), fused=True)
    control = GradientControl(optimizer, record=tmp_path / "a")
    control.backward(loss_making((weight, 1.0)))
    control.step()
    control.recorder.close()
    assert read_run(tmp_path / "a").steps[0].lr == 0.125


def test_a_control_closes_the_recorder_it_made_when_it_goes(tmp_path):
    gc.disable()
    try:
        control, _ = recorded(tmp_path / "a", steps=3)
        del control
        run = read_run(tmp_path / "a")
    finally:
        gc.enable()
    assert len(run.steps) == 3
    assert run.end.status == "finished"


def test_a_control_never_closes_a_recorder_it_was_given(tmp_path):
    with Recorder(tmp_path / "a") as recorder:
        control, _ = recorded(recorder, steps=3)
        assert control.recorder is recorder
        del control
        assert recorder.recording
        recorded(recorder, steps=2)
    run = read_run(tmp_path / "a")
    assert [(s.optimizer, s.step) for s in run.steps] == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]


def test_a_closed_recorder_records_nothing_more_and_closes_once(tmp_path):
    control, model = recorded(tmp_path / "a", steps=2)
    control.recorder.close()
    control.recorder.close(status="error")
    train(control, model, steps=3)
    control.recorder.flush()
    run = read_run(tmp_path / "a")
    assert len(run.steps) == 2
    assert run.end.status == "finished"


@pytest.mark.parametrize(
    ("error", "status", "exit", "told"),
    [
        (ValueError("no"), "error", 1, "ValueError: no"),
        (ValueError("\n in\tit:\n\n more"), "error", 1, "ValueError: in it: …"),
        (KeyboardInterrupt(), "interrupted", 130, "KeyboardInterrupt"),
        (SystemExit(3), "exit", 3, None),
        (SystemExit(), "finished", 0, None),
    ],
)
def test_a_context_says_how_the_run_ended(tmp_path, error, status, exit, told):
    with pytest.raises(type(error)), Recorder(tmp_path / "a"):
        raise error
    end = read_run(tmp_path / "a").end
    assert (end.status, end.exit, end.error) == (status, exit, told)


def test_copies_of_a_control_record_nothing_and_a_recorder_is_not_copied(tmp_path):
    control, _ = recorded(tmp_path / "a", steps=2)
    for again in (copy.deepcopy(control), pickle.loads(pickle.dumps(control))):
        assert again.recorder is None
        (param, *_) = [p for g in again._optimizers[0].param_groups for p in g["params"]]
        again.backward(loss_making((param, 1.0)))
        again.step()
    with pytest.raises(TypeError, match="its copy records nothing"):
        copy.deepcopy(control.recorder)
    control.recorder.close()
    assert len(read_run(tmp_path / "a").steps) == 2
    assert not any("record" in key for key in control.state_dict())


def test_samples_by_hand_reach_the_file(tmp_path):
    weight = parameter(1.0, 2.0)
    with Recorder(tmp_path / "a", detail_every=None, settings={"mine": [1]}) as recorder:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        index = recorder.add_optimizer(optimizer, names={weight: "w"})
        assert recorder.add_optimizer(optimizer, names={weight: "w"}) == index == 0
        assert not recorder.wants_detail(index)
        recorder.step(index, Sample(loss=1.5, norm=torch.tensor(2.0), lr=0.1))
        recorder.trace(Trace(1, recorder.elapsed(), "forward", "0", "Linear", "Inf", (), "so"))
    run = read_run(tmp_path / "a")
    assert (run.steps[0].loss, run.steps[0].norm, run.steps[0].detail) == (1.5, 2.0, None)
    assert run.optimizers[0].names == ("w",)
    assert run.header.settings["mine"] == [1]
    assert run.traces[0].text == "so"


def test_the_file_is_written_as_batches_fill(tmp_path):
    recorder = Recorder(tmp_path / "a", flush_every=4, flush_seconds=3600)
    control, model = recorded(recorder, steps=3)
    assert recorder.steps == 0
    train(control, model, steps=2)
    assert recorder.steps == 4
    assert len(read_run(tmp_path / "a").steps) == 4
    recorder.flush()
    assert len(read_run(tmp_path / "a").steps) == 5
    recorder.close()


def test_an_existing_file_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "a.jsonl"
    with Recorder(path) as recorder:
        recorded(recorder, steps=3)
    before = path.read_bytes()
    with pytest.raises(BadRunFile, match=r"exists already.*exists='append'.*exists='replace'"):
        Recorder(path)
    assert path.read_bytes() == before
    Recorder(path, exists="replace").close()
    assert read_run(path).end.status == "finished"
    assert read_run(path).steps == []


def test_going_on_counts_on(tmp_path):
    path = tmp_path / "a.jsonl"
    for session in range(3):
        with Recorder(path, exists="append", detail_every=2) as recorder:
            recorded(recorder, steps=3)
        run = read_run(path)
        assert [s.step for s in run.steps] == list(range(1, 4 + 3 * session))
        assert len(run.resumed) == session
    assert [s.step for s in run.steps if s.detail] == [1, 3, 5, 7, 9]
    times = [s.time for s in run.steps]
    assert times == sorted(times)


def test_going_on_after_a_torn_line_closes_it_first(tmp_path):
    path = tmp_path / "a.jsonl"
    with Recorder(path) as recorder:
        recorded(recorder, steps=3)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-2]) + whole[-2][:40])
    with Recorder(path, exists="append") as recorder:
        recorded(recorder, steps=2)
    run = read_run(path)
    assert [s.step for s in run.steps] == [1, 2, 3, 4]
    assert run.torn == 1


def test_going_on_in_an_empty_file_begins_it_and_in_another_file_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.touch()
    Recorder(path, exists="append").close()
    assert read_run(path).resumed == ()
    path.write_text("something else\n")
    with pytest.raises(BadRunFile, match="is no run file"):
        Recorder(path, exists="append")
    assert path.read_text() == "something else\n"


@pytest.mark.parametrize("record", [3, b"a.jsonl", True, ["a"]])
def test_a_record_of_another_kind_is_a_type_error(record):
    with pytest.raises(TypeError, match="record must be a path such as"):
        recorded(record, steps=0)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"flush_every": 0}, ValueError, "flush_every must be at least 1, got 0"),
        ({"flush_every": 1.5}, TypeError, "flush_every must be an int, got float"),
        ({"flush_seconds": 0}, ValueError, "flush_seconds must be more than 0 and finite, got 0"),
        ({"flush_seconds": INF}, ValueError, "flush_seconds must be more than 0 and finite"),
        ({"flush_seconds": "5"}, TypeError, "flush_seconds must be a number of seconds, got str"),
        ({"detail_every": 0}, ValueError, "detail_every must be at least 1, got 0"),
        ({"exists": "maybe"}, ValueError, "exists must be one of refuse, append, replace"),
        ({"settings": {"x": object()}}, TypeError, "settings must be what JSON can hold"),
        ({"sinks": [object()]}, TypeError, "a sink needs the methods open"),
    ],
)
def test_a_wrong_setting_is_refused_and_makes_no_file(tmp_path, settings, error, says):
    with pytest.raises(error, match=says):
        Recorder(tmp_path / "a", **settings)
    assert not (tmp_path / "a").exists()


def test_every_line_can_be_read_by_any_json_reader(tmp_path):
    recorded(tmp_path / "a", steps=4, bad={2: NAN})
    for line in (tmp_path / "a").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def bad_at(model, optimizer, path, *names, by_model=True, loss=1.0):
    control = GradientControl(optimizer, model=model if by_model else None, record=path)
    control.backward(model(torch.ones(1, 6)).square().mean() * loss)
    for name in names:
        model.get_parameter(name).grad.view(-1)[0] = NAN
    control.step()
    control.recorder.close()
    (step,) = read_run(path).steps
    return step


def grouped(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)


def test_a_bad_step_says_which_gradient_was_finite_next_to_the_first_culprit(tmp_path):
    model = small_model()
    step = bad_at(model, grouped(model), tmp_path / "a", "0.bias", "0.weight")
    assert ([c.name for c in step.culprits], step.finite_after) == (
        ["0.bias", "0.weight"],
        "2.weight",
    )
    model = small_model()
    step = bad_at(model, grouped(model), tmp_path / "b", "2.bias", "0.weight")
    assert (step.culprits[0].name, step.finite_after) == ("2.bias", None)
    assert step.finite_gradients == 2
    model = small_model()  # Between two bad ones a finite one: layers run in another order.
    step = bad_at(model, grouped(model), tmp_path / "c", "0.weight", "2.weight")
    assert (step.finite_gradients, step.finite_after) == (2, None)
    model = small_model()
    step = bad_at(model, grouped(model), tmp_path / "d", "2.weight")
    assert (step.finite_gradients, step.finite_after) == (3, "2.bias")
    names = [name for name, _ in model.named_parameters()]
    step = bad_at(model, grouped(model), tmp_path / "e", *names)
    assert (step.finite_gradients, step.finite_after) == (0, None)


def test_an_optimizer_that_no_model_orders_says_nothing_of_what_comes_first(tmp_path):
    model = small_model()
    step = bad_at(model, grouped(model), tmp_path / "a", "0.bias", by_model=False)
    assert (len(step.culprits), step.finite_after) == (1, None)
    model = small_model()
    one = torch.optim.SGD(model.named_parameters(), lr=0.1)
    step = bad_at(model, one, tmp_path / "b", "0.bias", "0.weight", by_model=False)
    assert (step.finite_gradients, step.finite_after) == (2, None)
    with Recorder(tmp_path / "c") as recorder:
        index = recorder.add_optimizer(one, names={next(model.parameters()): "first"})
        assert not recorder._optimizers[index].ordered


@pytest.mark.parametrize("factor", [NAN, INF])
def test_a_loss_that_was_not_finite_is_told_from_one_that_nobody_knew(factor, tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bad_at(model, optimizer, tmp_path / "a", loss=factor)
    assert (step.loss, step.loss_nonfinite) == (None, True)
    with Recorder(tmp_path / "b") as recorder:
        index = recorder.add_optimizer(optimizer)
        recorder.step(index, Sample(norm=1.0))
    (step,) = read_run(tmp_path / "b").steps
    assert (step.loss, step.loss_nonfinite) == (None, False)
