"""The idea in two minutes on a laptop: the same as `dcl demo`."""

import sys

from torch_dcl.cli.app import app

if __name__ == "__main__":
    app(["demo", *sys.argv[1:]], prog_name="dcl")
