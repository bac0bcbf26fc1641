"""Tells whether a constraint can be followed, before its request is admitted.

In: a Constraint. Out: nothing, or a ValueError with one line. Constraints are compiled in a process of their own,
`python -m pellucid_server.engine.constraint_check`: one that takes too long, too much memory or too deep a stack kills
that process, and nothing else. The process starts with the first constraint, stays for the next ones, and ends with
its standard input. Constraints that have passed are remembered.

On its pipes there is one line of JSON each way: a Constraint, then why it cannot be followed, or "".
"""

from __future__ import annotations

import atexit
import functools
import resource
import signal
import subprocess
import sys
import threading

import msgspec

from pellucid_server.engine.constraints import STACK_BYTES, fault_of, new_matcher, to_grammar
from pellucid_server.engine.messages import Constraint

MAX_SECONDS = 2
"""Of processor time that a constraint may take to compile."""
MAX_WAIT = 60
"""Seconds, on a machine so busy that it gets no processor."""
MAX_MEMORY = 1 << 30
"""Bytes of address space of the process that compiles, its interpreter included."""
REMEMBERED = 256


@functools.lru_cache(REMEMBERED)
def check(constraint: Constraint) -> None:
    """Raise ValueError, with one line, for a constraint that cannot be followed. Thread-safe; may take seconds."""
    if fault := _checker.find_fault(constraint):
        raise ValueError(fault)


class _Checker:
    """The process that compiles, started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def find_fault(self, constraint: Constraint) -> str:
        line = msgspec.json.encode(constraint) + b"\n"
        with self._lock:
            if self._process is None:
                self._process = _start()
            answer = _ask(self._process, line)
            if answer is None and self._process.returncode != -signal.SIGXCPU:
                # Perhaps earlier constraints had filled its memory.
                self._process = _start()
                answer = _ask(self._process, line)
            if answer is None:
                self._process = None
                answer = f"takes more than {MAX_SECONDS} s or {MAX_MEMORY >> 20} MiB to compile; make it simpler"
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "pellucid_server.engine.constraint_check"]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL  # What the library writes when it dies is for its authors.
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, bufsize=0)


def _ask(process: subprocess.Popen[bytes], line: bytes) -> str | None:
    """The process's answer; None where it has died."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the constraint checker has no pipes")
    patience = threading.Timer(MAX_WAIT, process.kill)
    patience.start()
    try:
        process.stdin.write(line)
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = b""
    finally:
        patience.cancel()
    if answer.endswith(b"\n"):
        return msgspec.json.decode(answer, type=str)
    _end(process)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


_checker = _Checker()
atexit.register(_checker.close)


class _Bytes:
    """The smallest vocabulary that can spell anything: every byte, and a token for the end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def find_fault(constraint: Constraint) -> str:
    """Why no output can follow the constraint; "" where some can. May take for ever."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    try:
        matcher = new_matcher(tokenizer, to_grammar(constraint))
    except ValueError as error:
        return str(error)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_accepting() or mask & ((1 << 256) - 1):
        return ""
    return fault_of(matcher)


def _serve() -> None:
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + MAX_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        fault = find_fault(msgspec.json.decode(line, type=Constraint))
        sys.stdout.buffer.write(msgspec.json.encode(fault) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # From a terminal it reaches the whole group; the server decides.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
