"""The idea in two minutes on a laptop: the same as `dcl demo`."""

from torch_dcl.cli.app import app

if __name__ == "__main__":
    app(["demo"], prog_name="dcl")
