"""Training in any number format on any machine: ``gradilocks.emulate``.

The folder reads from the inside out: ``rounding`` (a tensor to the values of a format), ``storage``
(the same for what flows forward and for the gradients that flow back), ``operations`` (which calls
of torch store in the format, and how), with ``attention`` and ``recurrent`` for those that are more
than one product, and ``emulation`` (the context that puts itself in their way).
"""

from gradilocks.lab.emulate.emulation import Emulation, emulate, emulated_format

__all__ = ["Emulation", "emulate", "emulated_format"]
