"""AdamW, Adam and SGD that unscale, clip and step in one pass: drop-ins for torch's.

Same constructors and the same `state_dict`, both ways. On a GPU a step is two launches however many
tensors and groups there are; the gradients are read and never written; a skipped step changes
nothing and the host need not know. Elsewhere they step as torch's fused optimizers do.
"""

from gradilocks.optim.adam import Adam, AdamW
from gradilocks.optim.sgd import SGD
from gradilocks.step.framework_wrappers import unwrapped

__all__ = ["SGD", "Adam", "AdamW", "unwrapped"]
