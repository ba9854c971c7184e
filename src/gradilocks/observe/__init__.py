"""`gradilocks run`: a script nobody wants to touch enters, its run file leaves.

`launch.py` runs it as Python would and `ending.py` notices how it ends; `importing.py` waits until
it imports torch; `hooks.py` then tells `watching.py` of every step, and `swapping.py` puts
Gradilocks' parts in torch's place if that was asked for. `session.py` brings them together.
"""

from gradilocks.observe.launch import Program
from gradilocks.observe.session import Options, Summary, run_script

__all__ = ["Options", "Program", "Summary", "run_script"]
