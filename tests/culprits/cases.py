"""The planted faults and what must be said about each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FAULTY_TRAINING", "OTHERS", "OTHER_FAULTS", "PLANTED", "Case", "Other", "verdict"]

FAULTY_TRAINING = Path(__file__).parent / "faulty_training.py"
OTHER_FAULTS = Path(__file__).parent / "other_faults.py"


class Case(NamedTuple):
    """Arguments of faulty_training.py, and the truth."""

    model: str
    precision: str
    stepping: str
    fault: str
    how_often: str
    step: int
    """The first bad step."""
    source: str
    module: str = ""
    operation: str = ""
    phase: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        return self[:5]

    @property
    def name(self) -> str:
        return " ".join(self.arguments)


_GATE = "operation", "transformer.h.1.gate", "div", "forward"
_LENGTH = "operation", "transformer.h.1.length", "div (SqrtBackward0)", "backward"
_SQRT = "div (SqrtBackward0)", "backward"

PLANTED = (
    Case("gpt", "fp32", "plain", "forward", "once", 6, *_GATE),
    Case("gpt", "fp32", "plain", "backward", "once", 6, *_LENGTH),
    Case("gpt", "bf16", "plain", "forward", "lasting", 6, *_GATE),
    Case("gpt", "bf16", "accumulated", "backward", "once", 6, *_LENGTH),
    Case("gpt", "fp16", "scaler", "forward", "once", 6, *_GATE),
    Case("gpt", "fp16", "scaler", "backward", "lasting", 6, *_LENGTH),
    Case("gpt", "fp16", "dropin", "backward", "once", 6, *_LENGTH),
    Case("gpt", "fp32", "control", "forward", "once", 6, *_GATE),
    Case("gpt", "bf16-weights", "sgd", "forward", "once", 6, *_GATE),
    Case("gpt", "fp32", "plain", "weights", "once", 7, "parameter", "transformer.h.0.ln.weight"),
    Case("gpt", "fp32", "plain", "loss", "once", 6, "script"),
    Case("cnn", "fp32", "plain", "forward", "once", 6, "operation", "gate", "div", "forward"),
    Case("cnn", "fp32", "sgd", "backward", "lasting", 6, "operation", "length", *_SQRT),
    Case("cnn", "fp32", "plain", "data", "once", 6, "data", "argument 1 of CNN"),
    Case("cnn", "bf16", "control", "data", "lasting", 6, "data", "argument 1 of CNN"),
    Case("cnn", "fp32", "plain", "loss", "once", 6, "script"),
    Case("cnn", "fp16", "scaler", "loss", "once", 6, "script"),
    Case("cnn", "fp32", "plain", "gradient", "once", 6, "script", "", "", "backward"),
    Case("rnn", "fp32", "plain", "forward", "once", 6, "operation", "gate", "div", "forward"),
    Case("rnn", "bf16", "sgd", "backward", "once", 6, "operation", "length", *_SQRT),
    Case("rnn", "fp32", "plain", "state", "once", 8, "parameter", "lstm.weight_hh_l0"),
    Case("rnn", "fp32", "sgd", "data", "once", 6, "data", "argument 1 of RNN"),
    Case("parts", "fp32", "plain", "forward", "once", 6, "operation", "encoder.1", "div", "forward"),
    Case("parts", "fp32", "accumulated", "backward", "once", 6, "operation", "decoder.2", *_SQRT),
    Case("parts", "fp32", "control", "loss", "once", 6, "script"),
    Case("parts", "bf16", "scaler", "forward", "lasting", 6, "operation", "encoder.1", "div", "forward"),
    # A learning rate that is far too high: the operation overflows, and the sentence says how large the weights are.
    Case("gpt", "fp32", "plain", "schedule", "lasting", 8, "operation", "transformer.h.0.ln", "native_layer_norm"),
    Case("mlp", "fp32", "sgd", "rate", "lasting", 3, "operation"),
    Case("rnn", "fp32", "sgd", "state", "once", 8, "parameter", "lstm.weight_hh_l0"),
    Case("cnn", "fp16", "scaler", "weights", "once", 7, "parameter", "stem.0.bias"),
    Case("gpt", "fp16", "scaler", "overflow", "once", 6, "operation", "transformer.h.1.c_fc", "_to_copy", "forward"),
    Case("gpt", "bf16-weights", "plain", "power", "once", 6, "operation", "transformer.h.1.gate", "exp", "forward"),
    Case("attention", "fp32", "plain", "mask", "once", 6, "operation", "attend", "_softmax", "forward"),
    Case("attention", "fp16", "scaler", "mask", "lasting", 6, "operation", "attend", "_softmax", "forward"),
    Case("checkpointed", "bf16", "plain", "forward", "once", 6, *_GATE),
    Case("checkpointed", "fp32", "plain", "backward", "once", 6, *_LENGTH),
    Case("inplace", "fp32", "plain", "forward", "once", 6, "operation", "gate", "div", "forward"),
    Case("inplace", "fp32", "sgd", "backward", "lasting", 6, "operation", "length", *_SQRT),
    Case("labelled", "bf16", "plain", "backward", "once", 6, "operation", "body.2", *_SQRT),
    Case("labelled", "fp32", "accumulated", "forward", "once", 6, "operation", "body.1", "div", "forward"),
    Case("tuned", "fp32", "plain", "forward", "lasting", 6, "operation", "backbone.1", "div", "forward"),
    Case("gan", "fp32", "plain", "forward", "once", 6, "operation", "generator.1", "div", "forward"),
    Case("gan", "fp32", "plain", "backward", "once", 6, "operation", "critic.2", *_SQRT),
    Case("policy", "fp32", "plain", "rewards", "once", 6, "script"),
    Case("focal", "fp32", "plain", "criterion", "once", 6, "operation", "criterion", "log", "forward"),
    Case("mlp", "fp32", "plain", "target", "once", 6, "script"),
    Case("cnn", "fp32", "sgd", "class weights", "lasting", 6, "script"),
)


class Other(NamedTuple):
    """A function of other_faults.py, and the truth. The first bad step is 5 unless it says so."""

    name: str
    source: str
    module: str = ""
    operation: str = ""
    phase: str = ""
    step: int = 5


_BLOCK = "operation", "2"

OTHERS = (
    Other("log_of_zero", *_BLOCK, "log", "forward"),
    Other("where_hides_log", *_BLOCK, "div (LogBackward0)", "backward"),
    Other("norm_at_zero", *_BLOCK, "pow (PowBackward0)", "backward"),
    Other("acos_at_one", *_BLOCK, "rsqrt (AcosBackward0)", "backward"),
    Other("exp_overflow", *_BLOCK, "exp", "forward"),
    Other("std_of_one", *_BLOCK, "std", "forward"),
    Other("layer_norm_without_eps", *_BLOCK, "native_layer_norm", "forward"),
    Other("hidden_mask_rows", "operation", "blocks.0", "_softmax", "forward"),
    Other("handwritten_softmax", "operation", "blocks.0", "sub", "forward"),
    Other("teacher_overflows", "operation", "teacher.2", "exp", "forward"),
    Other("counted_calls", "operation", "1", "div", "forward"),
    Other("custom_function", *_BLOCK, "div (BadFunctionBackward)", "backward"),
    Other("gradient_hook", "operation", "2.linear", "mul (hook on the gradient, before AddmmBackward0)", "backward"),
    Other("saved_tensor_hook", "operation", "3", "div (AddmmBackward0)", "backward"),
    Other("reentrant_checkpoint", *_BLOCK, "div", "forward"),
    Other("reentrant_checkpoint_backward", *_BLOCK, *_SQRT),
    Other("reentrant_checkpoint_inside", "operation", "body.2", *_SQRT),
    Other("physics_forward", "operation", "net.2", "div", "forward"),
    Other("physics_script", "script", "", "", "backward"),
    Other("physics_second_derivative", "unknown"),
    Other("lbfgs", *_BLOCK, "div", "forward"),
    Other("sgd_with_closure", *_BLOCK, "div", "forward"),
    Other("inner_loop", "operation", "fast.2", "div", "forward", 7),
    Other("script_division", "script"),
    Other("script_between", "script"),
    Other("script_backward", "script"),
    Other("no_modules", "unknown"),
    Other("inf_in_data", "data", "argument 1 of Sequential"),
    Other("bad_buffer", "buffer", "1.running_var"),
    Other("evaluation_between", *_BLOCK, "div", "forward"),
    Other("dropout_and_noise", *_BLOCK, "log", "forward"),
    Other("jit_script", "operation", "scripted", "div", "forward"),
    Other("weight_norm_of_zero", "operation", "1.parametrizations.weight.0", "_weight_norm_interface", "forward"),
    Other("complex_angle", *_BLOCK, "log", "forward"),
    Other("embedding_bag_mean", "operation", "Net", "div", "forward"),
    Other("tuple_output", "operation", "body.2", "div", "forward"),
    Other("two_losses", "script"),
    Other("compiled", *_BLOCK, "div", "forward"),
    Other("compiled_in_place", *_BLOCK, "div", "forward"),
    Other("gradient_clipped_first", *_BLOCK, *_SQRT),
    Other("gradient_written", "script", "", "", "backward"),
    Other("data_parallel", *_BLOCK, "div", "forward"),
    Other("numpy_function", *_BLOCK, "tensor from Python or NumPy", "forward"),
    Other("assigned_constant", *_BLOCK, "tensor from Python or NumPy", "forward"),
    Other("unused_output", "unknown"),
    Other("broken_validation", "unknown"),
    Other("counted_after_validation", "operation", "head", "log", "forward"),
    Other("hidden_counter_between", "unknown"),
    Other("cell_in_a_loop", "operation", "cell.2", *_SQRT),
    Other("equal_anchor", "script", "", "", "backward"),
    Other("input_divided_in_place", "unknown"),
    Other("inference_mode", "operation", "teacher.2", "exp", "forward"),
    Other("skipped_batch", "unknown"),
    Other("detached_teacher", "operation", "teacher.2", "log", "forward"),
    Other("metric_of_the_loss", "unknown"),
    Other("vmapped", "unknown"),
    Other("root_parameter", "parameter", "scale"),
    Other("square_of_large_outputs", "script", "", "", "forward"),
    Other("overflow_before_batch_norm", "operation", "1", "mul", "forward"),
    Other("state_of_the_call", "unknown"),
    Other("state_in_a_list", "unknown"),
    Other("corrupt_average", "unknown"),
    Other("corrupt_but_unused", *_BLOCK, "div", "forward"),
    Other("hook_of_a_weight", "operation", "2.linear", "div (hook on the gradient of weight)", "backward"),
    Other("metric_after_backward", "script", "", "", "backward"),
    Other("distribution_returned", "operation", "scale.2", "exp", "forward"),
    Other("sparse_input", "data", "argument 2 of Graph"),
    Other("sparse_gradient", "operation", "1", "log", "forward"),
    Other("parameter_of_the_script", "operation", "model.1", "log", "forward"),
    Other("functional_call", "unknown"),
    Other("discarded_call", "operation", "length", *_SQRT),
    Other("term_of_the_parameters", "script", "", "", "backward"),
)


def verdict(case: Case | Other, culprits: list[dict[str, Any]]) -> str:
    """ "exact", "partly" (right as far as it goes), "unknown" or "wrong"."""
    if not culprits or not culprits[0]["known"]:
        return "unknown"
    first = culprits[0]
    if (first["step"], first["source"]) != (case.step, case.source):
        return "wrong"
    stated = {name: getattr(case, name) for name in ("module", "operation", "phase") if getattr(case, name)}
    if case.source == "script":
        stated.pop("module", None)
    found = {name: first.get(name, "") for name in stated}
    if found == stated:
        return "exact"
    return "partly" if all(not found[name] or found[name] == stated[name] for name in stated) else "wrong"
