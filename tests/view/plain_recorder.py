"""A recorder for plain torch trainings in this process, so that findings are tested on numbers of real trainings.

It writes the same fields as `gradilocks run`, with torch's own hooks only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from gradilocks.view import runfile


class PlainRecorder:
    """Collects one record per optimizer step."""

    def __init__(self, detail_every: int = 5) -> None:
        self.detail_every = detail_every
        self.lines: list[dict[str, Any]] = [header()]
        self.numbers: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.loss: float | None = None
        self.closure_loss = 0.0
        self.clip: tuple[float, float, bool] | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.scale: float | None = None
        self.is_unscaled = False
        self.pending: dict[str, Any] = {}
        self.weights: list[torch.Tensor] | None = None
        self.used: dict[int, list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
        self.uncleared: set[int] = set()

    def before_backward(self) -> None:
        self.uncleared = {
            number
            for number, used in self.used.items()
            if any(param.grad is grad and grad._version == version for param, grad, version in used)
        }

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        number = self.numbers.get(id(optimizer))
        if number is None:
            number = self.numbers[id(optimizer)] = len(self.numbers)
            names = [f"{i}.{'weight' if param.dim() > 1 else 'bias'}" for i, param in enumerate(params)]
            kind = type(optimizer).__name__
            settings = {"maximize": optimizer.param_groups[0].get("maximize", False)}
            line = {"kind": "optimizer", "optimizer": number, "class": kind, "names": names, "settings": settings}
            self.lines.append(line)
        self.counts[number] = step = self.counts.get(number, 0) + 1
        divisor = 1.0 if self.is_unscaled or self.scale is None else self.scale
        grads = [None if p.grad is None else p.grad.detach().to_dense().float() / divisor for p in params]
        present = [grad for grad in grads if grad is not None]
        record: dict[str, Any] = {"kind": "step", "step": step, "optimizer": number, "time": float(step)}
        if present:
            record["norm"] = float(torch.stack([grad.double().norm() for grad in present]).norm())
        if number in self.uncleared and any(param.grad is grad for param, grad, _ in self.used[number]):
            record["leftover"] = True
        record["nan"] = sum(int(grad.isnan().sum()) for grad in present)
        record["inf"] = sum(int(grad.isinf().sum()) for grad in present)
        record["lr"] = float(optimizer.param_groups[0]["lr"])
        if self.scale is not None:
            record["scale"] = self.scale
        if self.clip is not None:
            record["norm"], record["limit"], record["clipped"] = self.clip
        if self.loss is not None:
            record["loss"] = self.loss
        if step % self.detail_every == 1 or self.detail_every == 1:
            record["norms"] = [None if grad is None else float(grad.norm()) for grad in grads]
            record["zeros"] = [None if grad is None else float((grad == 0).float().mean()) for grad in grads]
            self.weights = [param.detach().clone() for param in params]
        self.pending = record

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if "loss" not in self.pending and self.loss is not None:  # The optimizer called a closure.
            self.pending["loss"] = self.closure_loss
            self.pending["norm"] = float(torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm())
        if self.weights is not None:
            before = [weight.float() for weight in self.weights]
            changes = [(p.detach().float() - old).norm() / old.norm() for p, old in zip(params, before, strict=True)]
            self.pending["updates"] = [float(change) for change in changes]
        used = [(param, param.grad, param.grad._version) for param in params if param.grad is not None]
        self.used[self.pending["optimizer"]] = used
        self.finish(skipped=False)

    def finish(self, *, skipped: bool) -> None:
        self.lines.append({name: plain(value) for name, value in {**self.pending, "skipped": skipped}.items()})
        self.pending, self.weights, self.clip = {}, None, None
        self.loss, self.scale, self.is_unscaled = None, None, False


def plain(value: Any) -> Any:
    """The value as the run file has it."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def header(**fields: Any) -> dict[str, Any]:
    return {"kind": "header", "format": 3, "version": "0.3.0", "source": "run", "time": 0.0, "rank": 0, **fields}


def record(
    train: Callable[[], object], monkeypatch: pytest.MonkeyPatch, path: Path, *, detail_every: int = 5
) -> runfile.Run:
    """Runs a training with seed 0 under the recorder, and reads its run file."""
    recorder = PlainRecorder(detail_every)
    backward, clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_
    scaler_scale, scaler_step = torch.amp.GradScaler.scale, torch.amp.GradScaler.step
    scaler_unscale = torch.amp.GradScaler.unscale_

    def recorded_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        recorder.before_backward()
        value = float(loss.detach().sum()) / (recorder.scale or 1.0)
        recorder.closure_loss = value if recorder.loss is None else recorder.closure_loss
        recorder.loss = value if recorder.loss is None else recorder.loss + value
        backward(loss, *args, **kwargs)

    def recorded_clip(params: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm = clip(params, max_norm, *args, **kwargs)
        seen = 1.0 if recorder.is_unscaled or recorder.scale is None else recorder.scale
        recorder.clip = float(norm) / seen, float(max_norm) / seen, float(norm) > max_norm
        return norm

    def recorded_scale(scaler: torch.amp.GradScaler, loss: torch.Tensor) -> torch.Tensor:
        scaled = scaler_scale(scaler, loss)
        recorder.scale = scaler.get_scale()
        return scaled

    def recorded_unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaler_unscale(scaler, optimizer)
        recorder.is_unscaled = True

    def recorded_scaler_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        before = len(recorder.lines)
        result = scaler_step(scaler, optimizer)
        if len(recorder.lines) == before:  # The optimizer was not stepped: the gradients are still there.
            recorder.before_step(optimizer)
            recorder.finish(skipped=True)
        return result

    monkeypatch.setattr(torch.Tensor, "backward", recorded_backward)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded_clip)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", recorded_scale)
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", recorded_unscale)
    monkeypatch.setattr(torch.amp.GradScaler, "step", recorded_scaler_step)
    hooks = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda opt, args, kwargs: recorder.before_step(opt)),
        torch_optimizer.register_optimizer_step_post_hook(lambda opt, args, kwargs: recorder.after_step(opt)),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            train()
    finally:
        monkeypatch.undo()
        for hook in hooks:
            hook.remove()
        torch.set_num_threads(threads)
    recorder.lines.append({"kind": "end", "time": 1000.0, "status": "finished", "exit_code": 0})
    path.write_text("".join(json.dumps(line) + "\n" for line in recorder.lines))
    return runfile.read(path)
