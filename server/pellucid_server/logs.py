"""Logging of the frontend: one line of text or one JSON object per event, on standard error.

Fields that belong to an event travel as `extra={"fields": {...}}`, so that both formats show them and neither parses
sentences.
"""

from __future__ import annotations

import json
import logging
import sys
import time

LOGGER = logging.getLogger("pellucid")


class TextFormatter(logging.Formatter):
    """2026-01-31 12:00:00.123 INFO message key=value, or, for a block, a line for each field."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{moment}.{int(record.msecs):03d} {record.levelname} {record.getMessage()}"
        fields = _fields(record)
        if getattr(record, "block", False):
            width = max(map(len, fields))
            line += "".join(f"\n  {key.replace('_', ' '):<{width}}  {value}" for key, value in fields.items())
        else:
            line += "".join(f" {key}={_word(value)}" for key, value in fields.items())
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """{"time": "…", "level": "info", "message": "…", key: value}"""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        event |= _fields(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False, default=str)


def set_up_logging(level: str, style: str) -> None:
    """Sends Pellucid's own events to standard error, in place of whatever was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    LOGGER.handlers = [handler]
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


def log(level: int, message: str, *, block: bool = False, **fields: object) -> None:
    """Logs one event with its fields; as text, those of a block stand below each other."""
    LOGGER.log(level, message, extra={"fields": fields, "block": block})


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})


def _word(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(' "') & set(text) else json.dumps(text, ensure_ascii=False)
