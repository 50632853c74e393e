"""Lines for operators: one JSON object an HTTP request, and one that says what was started."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import orjson

access_log = logging.getLogger("pilotfish.access")
MAX_PATH = 512


def configure_log(stream: TextIO | None) -> None:
    """Writes what our modules warn of to `stream`. In a deployment that is not sys.stderr: Serve has put a logger of
    its own there, which keeps a thousand lines before it writes them."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for name in ("app", "engine"):
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = [handler], False


def configure_access_log(stream: TextIO | None = None) -> None:
    """Writes access lines to `stream` (stderr), bare; without this call they are dropped. May be called again."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.handlers = [handler]
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def log_access(
    request_id: str, method: str, path: str, status: int, seconds: float, tokens: int | None, error: str | None = None
) -> None:
    """One line for an HTTP request that has ended. `tokens` are the sampled ones, None on routes without any."""
    if not access_log.isEnabledFor(logging.INFO):
        return
    line = {
        "event": "request",
        "request_id": request_id,
        "method": method,
        "path": path[:MAX_PATH].encode("utf-8", "replace").decode(),
        "status": status,
        "duration_ms": round(seconds * 1000, 3),
        "tokens": tokens,
    }
    if error is not None:
        line["error"] = error[:MAX_PATH].encode("utf-8", "replace").decode()
    access_log.info(orjson.dumps(line).decode())


def emit_server_config(description: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Writes the `server_config` line, at once and in one piece, so that it stays whole between other writers' lines.

    `description` is what is really running; it says `api_key_set` and not the key. ValueError if it holds `api_key`.
    """
    if "api_key" in description:
        raise ValueError("the server_config line must not hold the API key")
    stream = stream or sys.stdout
    stream.write(json.dumps({"event": "server_config", **description}) + "\n")
    stream.flush()
