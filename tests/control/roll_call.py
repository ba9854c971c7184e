"""A roll that is called and compared, entry by entry, with what is really there."""

from __future__ import annotations

import torch
from gradilocks.step.roll import Roll

from gradilocks.kernels import pieces
from tests.control.short_way import parameter


class RollCall:
    """Three groups of parameters, their gradients, and the roll of them."""

    def __init__(self, device):
        shapes = [[(4, 4), (6,)], [(1,)], [(2, 8), (3,)]]
        self.groups = [[parameter(*shape, device=device) for shape in group] for group in shapes]
        self.roll = Roll()
        self.new_gradients()

    def new_gradients(self):
        for place, param in enumerate(self.params()):
            param.grad = torch.full_like(param, 1.0 + place)

    def params(self):
        return [param for group in self.groups for param in group]

    def call(self):
        """Calls the roll and compares everything it says with what is there."""
        called = self.roll.call(self.groups)
        if called is None:
            return None
        having = [param for param in self.params() if param.grad is not None]
        assert [id(param) for param in called.params] == [id(param) for param in having]
        assert [id(grad) for grad in called.grads] == [id(param.grad) for param in having]
        grads = [param.grad for param in having]
        assert called.addresses == [grad.data_ptr() for grad in grads]
        assert called.homes == [param.data_ptr() for param in having]
        assert called.sizes == [grad.numel() for grad in grads]
        assert called.dtypes == [grad.dtype for grad in grads]
        assert called.device == grads[0].device
        located = called.located
        assert located.pointers.tolist() == called.addresses
        assert located.layout.sizes.tolist() == called.sizes
        assert located.rest == ()
        kinds = {bucket.kind for bucket in located.layout.buckets}
        assert kinds == {
            (grad.dtype, 16 if grad.data_ptr() % 16 == 0 else grad.element_size()) for grad in grads
        }
        assert all(pieces.is_dense(grad) for grad in grads)
        called.release()
        return called
