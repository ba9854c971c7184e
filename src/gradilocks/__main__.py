"""``python -m gradilocks`` is ``gradilocks``."""

import sys

from gradilocks.cli import main

if __name__ == "__main__":
    sys.exit(main())
