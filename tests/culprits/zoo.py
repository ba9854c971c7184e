"""The zoo: faulty trainings, each with the planted truth, and how what was said is judged.

`benchmarks/bench_culprits.py` makes the table of docs/finding-the-culprit.md from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gradilocks.runfile import Run

__all__ = ["SCRIPT", "ZOO", "Case", "said_of", "verdict"]

SCRIPT = Path(__file__).parent / "faulty_training.py"


class Case(NamedTuple):
    """One faulty training."""

    model: str
    precision: str
    stepping: str
    fault: str
    how_often: str
    step: int
    """The first bad step."""
    where: str
    """As `Trace.where` has it."""
    module: str = ""
    """The module or, if it is in the weights, the parameter at fault."""

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of the script."""
        return self[:5]

    @property
    def name(self) -> str:
        """For people."""
        return " ".join(self.words)


_GATE, _LENGTH = "transformer.h.1.gate", "transformer.h.1.length"

ZOO = (
    Case("gpt", "fp32", "plain", "forward", "once", 6, "module", _GATE),
    Case("gpt", "fp32", "plain", "backward", "once", 6, "module", _LENGTH),
    Case("gpt", "bf16", "plain", "forward", "lasting", 6, "module", _GATE),
    Case("gpt", "bf16", "accumulated", "backward", "once", 6, "module", _LENGTH),
    Case("gpt", "fp16", "scaler", "forward", "once", 6, "module", _GATE),
    Case("gpt", "fp16", "scaler", "backward", "lasting", 6, "module", _LENGTH),
    Case("gpt", "fp16", "dropin", "backward", "once", 6, "module", _LENGTH),
    Case("gpt", "fp32", "control", "forward", "once", 6, "module", _GATE),
    Case("gpt", "bf16-weights", "sgd", "forward", "once", 6, "module", _GATE),
    Case("gpt", "fp32", "plain", "weights", "once", 7, "parameters", "transformer.h.0.ln.weight"),
    Case("gpt", "fp32", "plain", "loss", "once", 6, "after"),
    Case("cnn", "fp32", "plain", "forward", "once", 6, "module", "gate"),
    Case("cnn", "fp32", "sgd", "backward", "lasting", 6, "module", "length"),
    Case("cnn", "fp32", "plain", "data", "once", 6, "input"),
    Case("cnn", "bf16", "control", "data", "lasting", 6, "input"),
    Case("cnn", "fp32", "plain", "loss", "once", 6, "after"),
    Case("cnn", "fp16", "scaler", "loss", "once", 6, "after"),
    Case("cnn", "fp32", "plain", "gradient", "once", 6, "gradients"),
    Case("rnn", "fp32", "plain", "forward", "once", 6, "module", "gate"),
    Case("rnn", "bf16", "sgd", "backward", "once", 6, "module", "length"),
    Case("rnn", "fp32", "plain", "state", "once", 8, "parameters", "lstm.weight_hh_l0"),
    Case("rnn", "fp32", "sgd", "data", "once", 6, "input"),
    Case("parts", "fp32", "plain", "forward", "once", 6, "module", "encoder.1"),
    Case("parts", "fp32", "accumulated", "backward", "once", 6, "module", "decoder.2"),
    Case("parts", "fp32", "control", "loss", "once", 6, "after"),
    Case("parts", "bf16", "scaler", "forward", "lasting", 6, "module", "encoder.1"),
    Case("gpt", "fp32", "plain", "schedule", "lasting", 8, "grown"),
    Case("mlp", "fp32", "sgd", "rate", "lasting", 3, "grown"),
    Case("rnn", "fp32", "sgd", "state", "once", 8, "parameters", "lstm.weight_hh_l0"),
    Case("cnn", "fp16", "scaler", "weights", "once", 7, "parameters", "stem.0.bias"),
    Case("gpt", "fp16", "scaler", "overflow", "once", 6, "module", "transformer.h.1.c_fc"),
    Case("gpt", "bf16-weights", "plain", "power", "once", 6, "module", _GATE),
    Case("attention", "fp32", "plain", "mask", "once", 6, "module", "attend"),
    Case("attention", "fp16", "scaler", "mask", "lasting", 6, "module", "attend"),
    Case("checkpointed", "bf16", "plain", "forward", "once", 6, "module", _GATE),
    Case("checkpointed", "fp32", "plain", "backward", "once", 6, "module", _LENGTH),
    Case("inplace", "fp32", "plain", "forward", "once", 6, "module", "gate"),
    Case("inplace", "fp32", "sgd", "backward", "lasting", 6, "module", "length"),
    Case("labelled", "bf16", "plain", "backward", "once", 6, "module", "body.2"),
    Case("labelled", "fp32", "accumulated", "forward", "once", 6, "module", "body.1"),
    Case("tuned", "fp32", "plain", "forward", "lasting", 6, "module", "backbone.1"),
    Case("gan", "fp32", "plain", "forward", "once", 6, "module", "generator.1"),
    Case("gan", "fp32", "plain", "backward", "once", 6, "module", "critic.2"),
    Case("policy", "fp32", "plain", "rewards", "once", 6, "after"),
    Case("focal", "fp32", "plain", "criterion", "once", 6, "after"),
    Case("mlp", "fp32", "plain", "target", "once", 6, "after"),
    Case("cnn", "fp32", "sgd", "class weights", "lasting", 6, "after"),
)


class Said(NamedTuple):
    """What a run file says of the first bad step."""

    step: int
    where: str
    """'' if nothing is said."""
    module: str
    certainty: str
    text: str


def said_of(run: Run) -> Said:
    """The first finding of the run."""
    if not run.traces:
        return Said(0, "", "", "unknown", "")
    first = min(run.traces, key=lambda trace: trace.step)
    named = first.module
    if first.where == "parameters":
        named = first.damaged[0] if first.damaged and len(first.damaged) == 1 else ""
    return Said(first.step, first.where, named, first.certainty, first.text)


def verdict(case: Case, said: Said) -> str:
    """'right', 'nothing' if nothing was said, or 'wrong'."""
    if not said.where:
        return "nothing"
    names = case.where not in ("module", "parameters") or said.module == case.module
    return "right" if (said.step, said.where) == (case.step, case.where) and names else "wrong"
