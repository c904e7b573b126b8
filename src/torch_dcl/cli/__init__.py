"""The command ``dcl``: arguments, progress and printing, without logic of its own.

torch and everything heavy is imported inside the commands, so that help answers at once.
"""

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of the process."""
    from torch_dcl.cli.app import app

    app(prog_name="dcl")
