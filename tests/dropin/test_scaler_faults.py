"""Where torch's GradScaler is at fault, and what ours does instead.

Each class is one fault. Where torch's own behaviour can be shown without chance, a test shows it:
when a later torch repairs it, that test fails and the entry can go.
"""

import contextlib
import gc
import math
import weakref

import pytest
import torch
from torch.amp.grad_scaler import OptState

import gradilocks
from gradilocks import GradScaler
from gradilocks.errors import BadState, SharedParameter

CPU = torch.device("cpu")
TINY = 2.0**-126


@pytest.fixture
def param():
    return torch.nn.Parameter(torch.tensor([1.0, 2.0]))


def sgd(*params, lr=0.5, **settings):
    return torch.optim.SGD(list(params), lr=lr, **settings)


def backward(scaler, *params):
    """Gradients [2, 4] times the scale for a parameter [1, 2]."""
    scaler.scale(sum((p * p).sum() for p in params)).backward()


def overflow(scaler, optimizer, param):
    """An iteration whose gradient overflows; it must be skipped."""
    optimizer.zero_grad()
    backward(scaler, param)
    param.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()


class TestB1TheFlagIsASumOverDevices:
    def skip_on_two_devices(self, scaler_class, param, fused):
        scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=fused)
        backward(scaler, param)
        param.grad.fill_(math.nan)
        scaler.unscale_(optimizer)
        # As if a second device had found something too.
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        found[torch.device("cpu", 0)] = torch.ones(())
        scaler.step(optimizer)
        scaler.update()
        return scaler

    def test_torch_lets_nan_in_when_two_devices_agree(self, param):
        self.skip_on_two_devices(torch.amp.GradScaler, param, fused=True)
        assert param.isnan().all()

    @pytest.mark.parametrize("fused", [False, True])
    def test_ours_skips_however_many_devices_say_so(self, param, fused):
        scaler = self.skip_on_two_devices(GradScaler, param, fused)
        assert param.tolist() == [1.0, 2.0]
        assert scaler.get_scale() == 4.0

    def test_ours_does_not_count_a_skipped_step(self, param):
        scaler = GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.Adam([param], fused=True)
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        steps = optimizer.state[param]["step"].item()
        overflow(scaler, optimizer, param)
        assert optimizer.state[param]["step"].item() == steps

    def test_the_flag_that_the_optimizer_sees_is_one(self, param):
        scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param, fused=True)
        seen = []
        optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.found_inf.item()))
        backward(scaler, param)
        scaler.unscale_(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {CPU: torch.tensor(3.0), "another": torch.tensor(2.0)}
        scaler.step(optimizer)
        assert seen == [1.0]


class TestB4TheScaleFallsToZero:
    def test_torch_reaches_zero_and_then_steps_on_nan(self, param):
        scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(param)
        for _ in range(166):
            overflow(scaler, optimizer, param)
        assert scaler.get_scale() == 0.0
        optimizer.zero_grad()
        backward(scaler, param)
        scaler.step(optimizer)
        assert param.isnan().all()

    @pytest.mark.parametrize("fused", [False, True])
    def test_ours_stops_at_the_smallest_scale_whose_reciprocal_is_finite(self, param, fused):
        scaler, optimizer = GradScaler("cpu"), sgd(param, fused=fused)
        for _ in range(200):
            overflow(scaler, optimizer, param)
        assert scaler.get_scale() == TINY
        assert math.isfinite(1.0 / scaler.get_scale())
        assert param.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("fused", [False, True])
    def test_at_the_floor_training_still_works(self, param, fused):
        scaler, optimizer = GradScaler("cpu", init_scale=TINY), sgd(param, lr=0.25, fused=fused)
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [0.5, 1.0]

    def test_the_floor_can_be_raised(self, param):
        scaler, optimizer = GradScaler("cpu", init_scale=16.0, min_scale=1.0), sgd(param)
        for _ in range(10):
            overflow(scaler, optimizer, param)
        assert scaler.get_scale() == 1.0

    def test_a_new_scale_below_the_floor_is_lifted_to_it(self):
        scaler = GradScaler("cpu", init_scale=16.0, min_scale=1.0)
        scaler.scale(torch.ones(()))
        scaler.update(0.5)
        assert scaler.get_scale() == 1.0
        scaler.update(torch.tensor(0.0))
        assert scaler.get_scale() == 1.0

    def test_the_smallest_subnormal_scales_are_refused(self, param):
        theirs, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**-128), sgd(param)
        backward(theirs, param)
        theirs.step(optimizer)
        assert param.isinf().all()  # The reciprocal of 2^-128 is inf in float32.
        with pytest.raises(ValueError, match="init_scale must be positive and finite"):
            GradScaler("cpu", init_scale=2.0**-128)

    def test_a_checkpoint_of_a_collapsed_scaler_is_refused(self, param):
        theirs, optimizer = torch.amp.GradScaler("cpu"), sgd(param)
        for _ in range(166):
            overflow(theirs, optimizer, param)
        ours = GradScaler("cpu")
        with pytest.raises(BadState, match=r"got 0\.0"):
            ours.load_state_dict(theirs.state_dict())
        assert ours.get_scale() == 65536.0

    @pytest.mark.parametrize(
        "fused",
        [
            False,
            pytest.param(
                True,
            ),
        ],
    )
    def test_a_gradient_that_overflows_when_it_is_unscaled_is_skipped(self, param, fused):
        scaler, optimizer = GradScaler("cpu", init_scale=2.0**-20), sgd(param, fused=fused)
        scaler.scale(torch.ones(()))
        param.grad = torch.full((2,), 1e35)  # Finite, but not after division by 2^-20.
        scaler.step(optimizer)
        assert param.tolist() == [1.0, 2.0]

    def test_a_new_scale_of_nan_in_a_tensor_does_not_become_the_scale(self):
        scaler = GradScaler("cpu", init_scale=16.0)
        scaler.scale(torch.ones(()))
        with contextlib.suppress(ValueError):
            scaler.update(torch.tensor(math.nan))
        assert math.isfinite(scaler.get_scale())

    @pytest.mark.parametrize(
        "setting",
        [
            pytest.param(
                ("set_growth_factor", 0.25),
            ),
            pytest.param(
                ("set_backoff_factor", 4.0),
            ),
        ],
        ids=["growth", "backoff"],
    )
    def test_factors_set_later_do_not_take_the_scale_out_of_its_bounds(self, param, setting):
        scaler = GradScaler("cpu", 4.0, growth_interval=1, min_scale=2.0, max_scale=8.0)
        optimizer = sgd(param, lr=0.0)
        name, value = setting
        getattr(scaler, name)(value)
        for number in range(6):
            if number % 2 or name == "set_backoff_factor":
                overflow(scaler, optimizer, param)
            else:
                optimizer.zero_grad()
                backward(scaler, param)
                scaler.step(optimizer)
                scaler.update()
            assert 2.0 <= scaler.get_scale() <= 8.0


class TestB5AFusedStepThatRaisesLeavesItsScaleBehind:
    def step_that_fails_once(self, scaler_class, param, *, preset=None):
        scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=True)
        failures = [RuntimeError("out of memory")]

        def fail_once(*_):
            if failures:
                raise failures.pop()

        optimizer.register_step_pre_hook(fail_once)
        backward(scaler, param)
        if preset is not None:
            optimizer.grad_scale = preset
        with pytest.raises(RuntimeError, match="out of memory"):
            scaler.step(optimizer)
        return scaler, optimizer

    def test_torch_divides_by_the_scale_twice_on_the_second_try(self, param):
        scaler, optimizer = self.step_that_fails_once(torch.amp.GradScaler, param)
        assert optimizer.grad_scale.item() == 8.0
        scaler.step(optimizer)
        assert param.tolist() == [1.0 - 1.0 / 8.0, 2.0 - 2.0 / 8.0]

    def test_ours_leaves_nothing_and_the_second_try_is_a_first(self, param):
        scaler, optimizer = self.step_that_fails_once(GradScaler, param)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [0.0, 0.0]

    def test_ours_gives_back_what_the_user_had_set(self, param):
        preset = torch.tensor(2.0)
        scaler, optimizer = self.step_that_fails_once(GradScaler, param, preset=preset)
        assert optimizer.grad_scale is preset
        scaler.step(optimizer)
        assert param.tolist() == [0.5, 1.0]

    def test_an_unfused_step_that_raises_can_be_tried_again(self, param):
        for scaler_class in (torch.amp.GradScaler, GradScaler):
            param.data.copy_(torch.tensor([1.0, 2.0]))
            param.grad = None
            scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
            failures = [RuntimeError("out of memory")]
            optimizer.register_step_pre_hook(
                lambda *_, failures=failures: _raise(failures.pop()) if failures else None
            )
            backward(scaler, param)
            with pytest.raises(RuntimeError, match="out of memory"):
                scaler.step(optimizer)
            scaler.step(optimizer)
            assert param.tolist() == [0.0, 0.0]


def _raise(error):
    raise error


class TestB6AnIntervalBelowTheTracker:
    def lowered(self, scaler_class, param):
        scaler, optimizer = scaler_class("cpu", init_scale=8.0, growth_interval=100), sgd(param)
        scales = []
        for number in range(8):
            if number == 5:
                scaler.set_growth_interval(3)
            param.data.fill_(1.0)
            optimizer.zero_grad()
            backward(scaler, param)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def test_torch_never_grows_again(self, param):
        assert self.lowered(torch.amp.GradScaler, param) == [8.0] * 8

    def test_ours_grows_at_the_next_update(self, param):
        assert self.lowered(GradScaler, param) == [8.0] * 5 + [16.0] * 3

    def test_ours_grows_after_loading_such_a_state(self, param):
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 3, "_growth_tracker": 7})
        optimizer = sgd(param)
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 16.0
        assert scaler._get_growth_tracker() == 0

    @pytest.mark.parametrize("interval", [0, -1])
    def test_an_interval_that_is_not_positive_never_grows(self, param, interval):
        for scaler_class in (torch.amp.GradScaler, GradScaler):
            scaler = scaler_class("cpu", init_scale=8.0, growth_interval=interval)
            for _ in range(3):
                backward(scaler, param)
                scaler.step(sgd(param))
                scaler.update()
            assert scaler.get_scale() == 8.0


class TestB7GradientsAfterASkippedStep:
    """Documented, and kept: code that looks at gradients after a skip finds what torch leaves."""

    @pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
    def test_they_are_unscaled_for_an_unfused_optimizer(self, param, scaler_class):
        scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
        backward(scaler, param)
        param.grad[0] = math.inf
        scaler.step(optimizer)
        assert param.grad.tolist() == [math.inf, 4.0]

    @pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
    def test_they_are_still_scaled_for_a_fused_one(self, param, scaler_class):
        scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=True)
        backward(scaler, param)
        param.grad[0] = math.inf
        scaler.step(optimizer)
        assert param.grad.tolist() == [math.inf, 32.0]


class TestB9AGradientThatIsUnscaledTwice:
    def test_torch_divides_twice(self, param):
        first, second = sgd(param), sgd(param)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        backward(scaler, param)
        scaler.unscale_(first)
        scaler.unscale_(second)
        assert param.grad.tolist() == [2.0 / 8.0, 4.0 / 8.0]

    @pytest.mark.parametrize("fused", [(False, False), (True, False), (False, True), (True, True)])
    def test_a_parameter_in_two_optimizers_is_refused_by_name(self, fused):
        model = torch.nn.Linear(2, 1)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.5, fused=f) for f in fused)
        scaler = GradScaler("cpu", init_scale=8.0, model=model)
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.step(first)
        after = model.weight.detach().clone()
        with pytest.raises(SharedParameter, match="the gradient of weight has been unscaled"):
            scaler.step(second)
        assert torch.equal(model.weight, after)
        assert model.weight.grad.tolist() == [[1.0, 1.0]]

    def test_unscale_of_the_inner_and_step_of_the_wrapper_is_refused(self, param):
        class Wrapper:
            def __init__(self, inner):
                self.inner, self.param_groups = inner, inner.param_groups

            def step(self, closure=None):
                return self.inner.step(closure)

        inner = sgd(param)
        scaler = GradScaler("cpu", init_scale=8.0)
        backward(scaler, param)
        scaler.unscale_(inner)
        with pytest.raises(SharedParameter, match=r"param_groups\[0\]\['params'\]\[0\]"):
            scaler.step(Wrapper(inner))
        assert param.grad.tolist() == [2.0, 4.0]
        scaler.step(inner)
        scaler.update()
        assert param.tolist() == [0.0, 0.0]

    def test_clipping_in_between_does_not_hide_it(self, param):
        scaler = GradScaler("cpu", init_scale=8.0)
        backward(scaler, param)
        scaler.unscale_(sgd(param))
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        with pytest.raises(SharedParameter):
            scaler.unscale_(sgd(param))

    @pytest.mark.parametrize("clip", [gradilocks.clip_grad_norm_, gradilocks.clip_grad_value_])
    def test_our_own_clip_in_between_is_no_new_gradient(self, param, clip):
        scaler = GradScaler("cpu", init_scale=8.0)
        one, _ = scaler.scale([(param * 2.0).sum(), (param * 3.0).sum()])
        one.backward()
        scaler.unscale_(sgd(param))
        clip([param], 0.5)
        with pytest.raises(SharedParameter):
            scaler.unscale_(sgd(param))

    def test_a_gradient_that_was_replaced_is_not_taken_for_the_old_one_when_clipped(self, param):
        scaler = GradScaler("cpu", init_scale=8.0)
        backward(scaler, param)
        scaler.unscale_(sgd(param))
        old, param.grad = param.grad, torch.tensor([3.0, 4.0])  # The old one lives on.
        assert gradilocks.clip_grad_norm_([param], 1.0).item() == 5.0
        assert old.tolist() == [2.0, 4.0]

    def test_an_optimizer_is_kept_until_update_so_that_no_other_gets_its_id(self, param):
        scaler = GradScaler("cpu", init_scale=8.0)
        backward(scaler, param)
        optimizer = sgd(param)
        gone = weakref.ref(optimizer)
        scaler.unscale_(optimizer)
        del optimizer
        gc.collect()
        assert gone() is not None
        scaler.step(gone())
        scaler.update()
        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize("set_to_none", [False, True])
    def test_two_optimizers_may_take_turns_on_new_gradients(self, param, set_to_none):
        results = []
        for scaler_class in (torch.amp.GradScaler, GradScaler):
            param.data.copy_(torch.tensor([1.0, 2.0]))
            param.grad = None
            first, second = sgd(param, lr=0.125), sgd(param, lr=0.25)
            scaler = scaler_class("cpu", init_scale=8.0)
            backward(scaler, param)
            scaler.step(first)
            first.zero_grad(set_to_none=set_to_none)
            backward(scaler, param)
            scaler.step(second)
            scaler.update()
            results.append(param.tolist())
        assert results[0] == results[1]

    @pytest.mark.parametrize(
        "set_to_none",
        [
            True,
            pytest.param(
                False,
            ),
        ],
    )
    def test_two_optimizers_may_take_turns_on_losses_that_were_scaled_together(
        self, param, set_to_none
    ):
        results = []
        for scaler_class in (torch.amp.GradScaler, GradScaler):
            param.data.copy_(torch.tensor([1.0, 2.0]))
            param.grad = None
            first, second = sgd(param, lr=0.125), sgd(param, lr=0.25)
            scaler = scaler_class("cpu", init_scale=8.0)
            one, two = scaler.scale([(param * 2.0).sum(), (param * 3.0).sum()])
            one.backward()
            scaler.step(first)
            first.zero_grad(set_to_none=set_to_none)
            two.backward()
            scaler.step(second)
            scaler.update()
            results.append(param.tolist())
        assert results[0] == results[1]

    def test_the_next_iteration_starts_afresh(self, param):
        scaler, first, second = GradScaler("cpu", init_scale=8.0), sgd(param), sgd(param)
        for optimizer in (first, second, first):
            optimizer.zero_grad()
            backward(scaler, param)
            scaler.step(optimizer)
            scaler.update()
        assert scaler._get_growth_tracker() == 3

    def test_a_parameter_listed_twice_by_a_foreign_optimizer_is_unscaled_once(self, param):
        class Foreign:
            def __init__(self):
                self.param_groups = [{"params": [param]}, {"params": [param]}]

        scaler = GradScaler("cpu", init_scale=8.0)
        backward(scaler, param)
        scaler.unscale_(Foreign())
        assert param.grad.tolist() == [2.0, 4.0]


class TestB10AHalfPrecisionLoss:
    def test_torch_overflows_a_loss_that_is_not_a_scalar(self):
        loss = torch.ones(2, dtype=torch.float16)
        assert torch.amp.GradScaler("cpu").scale(loss).isinf().all()

    def test_ours_scales_it_in_float32(self):
        scaled = GradScaler("cpu").scale(torch.full((2,), 3.0, dtype=torch.float16))
        assert scaled.dtype is torch.float32
        assert scaled.tolist() == [3.0 * 65536.0] * 2

    def test_ours_scales_lists_of_them_in_float32(self):
        half = torch.full((2,), 3.0, dtype=torch.float16)
        first, (second,) = GradScaler("cpu").scale([half, (half,)])
        (third,) = GradScaler("cpu").scale(t for t in [half])
        for scaled in (first, second, third):
            assert scaled.tolist() == [3.0 * 65536.0] * 2

    def test_the_gradient_is_what_it_would_be_for_a_float32_loss(self):
        param = torch.nn.Parameter(torch.full((4,), 100.0))
        scaler = GradScaler("cpu", init_scale=2.0**15)
        scaled = scaler.scale((param * 5.0).half())  # 500 times 2^15 has no place in float16.
        assert torch.isfinite(scaled).all()
        scaled.mean().backward()
        scaler.unscale_(sgd(param))
        assert param.grad.tolist() == [1.25] * 4


class TestB12PostHooksOfAFusedOptimizer:
    """Documented, and kept: whoever counts steps in a hook counts as with torch."""

    @pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
    @pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
    def test_they_fire_on_a_skipped_step(self, param, scaler_class, name):
        optimizer = getattr(torch.optim, name)([param], lr=0.5, fused=True)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("fired"))
        scaler = scaler_class("cpu", init_scale=8.0)
        overflow(scaler, optimizer, param)
        assert calls == ["fired"]
        assert param.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
    def test_they_do_not_fire_on_a_skipped_step_of_an_unfused_one(self, param, scaler_class):
        optimizer = sgd(param)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("fired"))
        overflow(scaler_class("cpu", init_scale=8.0), optimizer, param)
        assert calls == []


@contextlib.contextmanager
def garbage_in_new_memory():
    """Fills memory that nobody has initialised with NaN, so that what reads it shows it."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before)


SETTINGS = {
    "plain": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "weight decay": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
}


class TestB14AFusedSgdWhoseFirstStepIsSkipped:
    def train(self, scaler_class, settings, *, fused, skips, unscale=False):
        """Three good steps after `skips` overflows; the values of the parameter on the way."""
        param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = sgd(param, lr=0.1, fused=fused, **settings)
        scaler = scaler_class("cpu", init_scale=2.0**10)
        path = []
        with garbage_in_new_memory():
            for number in range(skips + 3):
                optimizer.zero_grad()
                backward(scaler, param)
                if number < skips:
                    param.grad[1] = math.inf
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                path.append(param.detach().clone())
        return path, optimizer.state[param]["momentum_buffer"]

    def test_torch_writes_garbage_into_the_weights(self):
        path, _ = self.train(torch.amp.GradScaler, {"momentum": 0.9}, fused=True, skips=1)
        assert path[0].tolist() == [1.0, 2.0]
        assert path[1].isnan().all()

    @pytest.mark.parametrize("unscale", [False, True])
    @pytest.mark.parametrize("skips", [1, 2])
    @pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
    def test_ours_starts_clean_after_the_skip(self, settings, skips, unscale):
        expected, momentum = self.train(GradScaler, settings, fused=True, skips=0)
        got, buffer = self.train(GradScaler, settings, fused=True, skips=skips, unscale=unscale)
        assert all(path.tolist() == [1.0, 2.0] for path in got[:skips])
        assert torch.equal(torch.stack(got[skips:]), torch.stack(expected))
        assert torch.equal(buffer, momentum)

    @pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
    def test_ours_agrees_with_the_unfused_optimizer(self, settings):
        unfused, _ = self.train(torch.amp.GradScaler, settings, fused=False, skips=1)
        fused, _ = self.train(GradScaler, settings, fused=True, skips=1)
        torch.testing.assert_close(fused, unfused, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("dampening", [0.0, 0.5])
    @pytest.mark.parametrize("skip", [False, True])
    def test_a_parameter_that_joins_later_starts_clean_too(self, dampening, skip):
        def train(fused):
            early = torch.nn.Parameter(torch.tensor([1.0]))
            late = torch.nn.Parameter(torch.tensor([2.0]))
            optimizer = sgd(early, late, lr=0.1, momentum=0.9, dampening=dampening, fused=fused)
            scaler = GradScaler("cpu", init_scale=8.0)
            with garbage_in_new_memory():
                for number in range(4):
                    optimizer.zero_grad()
                    backward(scaler, early, *([late] if number else []))
                    if number == 1 and skip:
                        late.grad[0] = math.nan
                    scaler.step(optimizer)
                    scaler.update()
            return torch.cat([early, late]).detach()

        torch.testing.assert_close(train(True), train(False), rtol=1e-6, atol=1e-6)

    def test_a_skipped_first_step_leaves_no_state_behind(self):
        param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = sgd(param, momentum=0.9, fused=True)
        overflow(GradScaler("cpu", init_scale=8.0), optimizer, param)
        assert optimizer.state_dict()["state"] == {}

    def test_without_momentum_the_optimizer_skips_by_itself(self):
        param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = sgd(param, fused=True)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("fired"))
        overflow(GradScaler("cpu", init_scale=8.0), optimizer, param)
        assert calls == ["fired"]


class TestB15Bfloat16Gradients:
    @pytest.mark.parametrize("fused", [False, True])
    def test_they_are_unscaled_and_stepped(self, fused):
        param = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param, fused=fused)
        backward(scaler, param)
        scaler.unscale_(optimizer)
        assert param.grad.dtype is torch.bfloat16
        assert param.grad.tolist() == [2.0, 4.0]
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_a_broken_one_is_skipped(self, fused, value):
        param = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param, fused=fused)
        backward(scaler, param)
        param.grad[1] = value
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [1.0, 2.0]
        assert scaler.get_scale() == 4.0

    @pytest.mark.parametrize("scale", [3.0, 1000.0, 65536.0])
    def test_the_reciprocal_is_not_rounded_to_bfloat16(self, scale):
        param = torch.nn.Parameter(torch.zeros(70_000, dtype=torch.bfloat16))
        scaler = GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))
        values = torch.linspace(-100.0, 100.0, 70_000).bfloat16()
        param.grad = values.clone()
        scaler.unscale_(sgd(param))
        inverse = torch.tensor(1.0 / scale, dtype=torch.float32)
        assert torch.equal(param.grad, (values.float() * inverse).bfloat16())
