"""The timm and Ignite recipes against the frameworks with torch's own scaler."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import create_supervised_trainer
from ignite.handlers import Checkpoint
from recipes import BAD, PlantedLoss, assert_equal, batches, network, recipe, weights
from timm.utils import NativeScaler

import gradilocks
from gradilocks import GradientControl


class Training:
    """A training of a framework with torch's scaler (clip: in place) or with a control."""

    def __init__(self, framework, *, has_control, clip=None, bad=None, optimizer=torch.optim.AdamW):
        self.model = network()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2, fused=True)
        self.framework, self.clip, self.loss = framework, clip, PlantedLoss(bad)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu")
        if has_control:
            self.control = GradientControl(self.optimizer, model=self.model, clip=clip)
            self.schedule, self.clip = self.control.scheduler(self.schedule), None
            self.scaler = self.control.as_scaler()
        self.seen, self.outcomes = [], []
        self.step = self.timm_step() if framework == "timm" else self.ignite_step()

    def timm_step(self):
        scaler = NativeScaler("cpu")
        scaler._scaler = self.scaler
        self.state = scaler

        def step(batch):
            loss = self.loss(self.model(batch[0]), batch[1])
            scaler(loss, self.optimizer, clip_grad=self.clip, parameters=self.model.parameters())
            self.optimizer.zero_grad()

        return step

    def ignite_step(self):
        arguments = self.model, self.optimizer, self.loss
        trainer = create_supervised_trainer(*arguments, amp_mode="amp", scaler=self.scaler)
        if self.clip:  # Ignite has no clipping: the step of its own documentation.

            def before_step(*_):
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

            original = self.scaler.step
            self.scaler.step = lambda optimizer: (before_step(), original(optimizer))[1]
        self.state = self.scaler
        return lambda batch: trainer.run([batch])

    def run(self, first=0, last=10):
        for batch in batches()[first:last]:
            self.step(batch)
            self.schedule.step()
            self.seen.append(weights(self.model))
            if hasattr(self, "control"):
                self.outcomes.append(self.control.outcome)
        return self


frameworks = pytest.mark.parametrize("framework", ["timm", "ignite"])


@pytest.mark.parametrize("name", ["timm", "Ignite"])
def test_the_recipe_runs_as_the_page_has_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = recipe(name)
    assert not names["control"].outcome.skipped
    if name == "Ignite":
        (saved,) = (tmp_path / "checkpoints").iterdir()
        Checkpoint.load_objects(names["to_save"], torch.load(saved))
        assert names["control"].outcome.step == 8


@frameworks
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, gradilocks.optim.AdamW], ids=["torch", "ours"])
def test_the_weights_are_those_of_the_framework_alone(framework, clip, optimizer):
    native = Training(framework, has_control=False, clip=clip).run()
    ours = Training(framework, has_control=True, clip=clip, optimizer=optimizer).run()
    is_exact = clip is None and optimizer is torch.optim.AdamW
    assert_equal(weights(ours.model), weights(native.model), is_exact=is_exact)
    assert ours.scaler.get_scale() == native.scaler.get_scale()


@frameworks
def test_one_planted_inf_is_one_skipped_step_and_the_schedule_waits(framework):
    ours = Training(framework, has_control=True, clip=1.0, bad=BAD).run()
    assert [outcome.skipped for outcome in ours.outcomes] == [index == BAD for index in range(10)]
    assert all(map(torch.equal, ours.seen[BAD], ours.seen[BAD - 1]))
    assert ours.outcomes[BAD].culprits[0] == "2.bias"
    assert ours.schedule.last_epoch == 9
    native = Training(framework, has_control=False, clip=1.0, bad=BAD).run()
    assert native.schedule.last_epoch == 10  # torch's scheduler does not wait.


@frameworks
def test_a_training_resumes_bit_for_bit(framework):
    whole = Training(framework, has_control=True, clip=1.0, bad=BAD).run()
    first = Training(framework, has_control=True, clip=1.0, bad=BAD).run(0, 7)
    second = Training(framework, has_control=True, clip=1.0)
    for name in ("model", "optimizer", "schedule", "state"):
        getattr(second, name).load_state_dict(getattr(first, name).state_dict())
    second.run(7)
    assert_equal(weights(second.model), weights(whole.model), is_exact=True)
    assert second.outcomes[-1].step == 10
