"""AdamW, Adam and SGD that unscale, clip and step in one pass: drop-ins for torch's.

Same constructors and the same `state_dict`, both ways. On a GPU a step is two launches however many
tensors and groups there are; the gradients are read and never written; a skipped step changes
nothing and the host need not know. Elsewhere they step as torch's fused optimizers do. `adopt`
turns one of torch's, that somebody has made, into one of these; `unwrapped` finds the optimizer
inside a framework's wrapper.
"""

from gradilocks.optim.adam import Adam, AdamW
from gradilocks.optim.adopt import adopt
from gradilocks.optim.sgd import SGD
from gradilocks.step.framework_wrappers import unwrapped

__all__ = ["SGD", "Adam", "AdamW", "adopt", "unwrapped"]
