"""Training in any number format on any machine: ``gradilocks.emulate``.

The folder reads from the inside out: ``rounding`` (a tensor to the values of a format, and its
gradient on the way back), ``operations`` (which calls of torch store in the format, and how), with
``recurrent`` for layers that are many products, and ``emulation`` (the context that puts itself in
their way).
"""

from gradilocks.lab.emulate.emulation import Emulation, emulate, emulated_format

__all__ = ["Emulation", "emulate", "emulated_format"]
