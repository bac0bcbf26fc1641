"""The parser of the command lines whose errors are one line."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Names the help, or the option that was meant; the usage would be longer than what is wrong."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].partition("=")[0].split()
        near = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1) if unknown else []
        hint = f"did you mean {near[0]}?" if near else "--help tells what is accepted"
        self.exit(2, f"{self.prog}: {message}; {hint}\n")
