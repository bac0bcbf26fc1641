"""The engine process: `python -m pellucid_server.engine FD`, where FD is the engine's end of a socket pair."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

import msgspec

PR_SET_PDEATHSIG = 1


def main() -> int:
    # Interrupts from the terminal go to the whole process group; ending is the frontend's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    from pellucid_server.engine.connection import ConnectionClosed, EngineConnection
    from pellucid_server.engine.messages import Configure, StartFailed

    connection = EngineConnection(socket.socket(fileno=int(sys.argv[1])))
    try:
        (configure,) = connection.receive(None)
        if not isinstance(configure, Configure):
            raise TypeError(f"the first message must be Configure, not {type(configure).__name__}")
        # torch takes a second or two to import; everything that can fail cheaply has been done by now.
        import torch

        from pellucid_model.errors import ModelError
        from pellucid_model.user_module import one_line
        from pellucid_server.engine.engine import Engine
        from pellucid_server.engine.loading import load
        from pellucid_server.engine.memory import out_of_memory
        from pellucid_server.logs import LOGGER, set_up_logging
        from pellucid_server.settling import settle

        set_up_logging(configure.log_level, configure.log_format)
        try:
            loaded = load(configure)
            engine = Engine(loaded, configure)
            seconds = engine.warm_up()
            settle()
        except (ModelError, ValueError) as error:
            connection.send(StartFailed(str(error)))
            return 1
        except torch.OutOfMemoryError as error:
            connection.send(StartFailed(out_of_memory(error)))
            return 1
        except (Exception, SystemExit) as error:
            LOGGER.exception("the model cannot be loaded")
            connection.send(StartFailed(f"the model cannot be loaded: {one_line(error)}; the log has the traceback"))
            return 1
        connection.send(msgspec.structs.replace(loaded.ready, warm_up_seconds=seconds))
        try:
            return engine.serve(connection)
        except torch.OutOfMemoryError as error:
            # The frontend starts another engine, whose memory is in one piece, and its requests go on there.
            LOGGER.error("the engine ends: %s", out_of_memory(error))
            return 1
    except ConnectionClosed:
        return 0


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the frontend dies, even in the middle of a long step."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Nothing is left to save, and taking an interpreter with torch apart takes a second that a stop would wait for.
    os._exit(code)
