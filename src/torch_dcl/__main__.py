"""``python -m torch_dcl`` is ``dcl``."""

import sys

from torch_dcl.cli import main

if __name__ == "__main__":
    # Run folders record the command, which can then be entered again.
    sys.argv[0] = "dcl"
    main()
