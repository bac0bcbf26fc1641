"""The command `pellucid`: the way in.

A failed or interrupted command is one line on standard error, or silence, and an exit code. 0: done; 1: the server or
an input said no; 2: the command line is wrong, or an extra is not installed; 3: somebody else cancelled the request;
130: Ctrl-C; 141: whoever read our output went away.

Here is only what must be there before anything slow is loaded, so that Ctrl-C is quiet from the start;
`commands.dispatch` has the commands.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code."""
    usual = _leave_at_once_on_ctrl_c()
    from pellucid_client.commands.dispatch import run

    signal.signal(signal.SIGINT, usual)
    code = run(sys.argv[1:] if argv is None else argv)
    _leave_at_once_on_ctrl_c()  # While Python ends.
    sys.exit(code)


def _leave_at_once_on_ctrl_c() -> signal._HANDLER:
    """Loading and ending have nothing to undo. Where SIGINT is ignored, it stays so. Returns what it did before."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    return usual


if __name__ == "__main__":
    main()
