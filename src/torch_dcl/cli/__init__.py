"""The command ``dcl``: arguments, progress and printing, without logic of its own.

torch and everything heavy is imported inside the commands, so that help answers at once.
"""

import os
import signal

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of the process."""
    from torch_dcl.cli.app import app

    try:
        app(prog_name="dcl")
    except SystemExit as end:
        if end.code == os.EX_TEMPFAIL:  # stopped by SIGTERM and saved: another one must not change this code
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
