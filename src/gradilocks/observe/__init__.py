"""`gradilocks run`: a script nobody wants to touch enters, its run file leaves.

`interpreter.py` runs it as Python would and `process_end.py` notices how it ends; `torch_hooks.py`
makes torch's own parts tell of themselves as `step/events.py` has it; `step_recorder.py` listens,
reading gradients by `gradient_reader.py`, and `script_models.py` finds the models. `patches.py`
puts Gradilocks' parts in torch's place if that was asked for. `session.py` brings them together.
"""

from gradilocks.observe.interpreter import Program
from gradilocks.observe.session import Options, Summary, run_script

__all__ = ["Options", "Program", "Summary", "run_script"]
