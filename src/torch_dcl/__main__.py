"""``python -m torch_dcl`` is ``dcl``."""

import sys

from torch_dcl.cli import main

if __name__ == "__main__":
    # What run folders note as their command can be typed again.
    sys.argv[0] = "dcl"
    main()
