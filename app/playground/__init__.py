"""The pages: a chat at `/` and the live state at `/live`. Each is one file when it leaves, so that a browser fetches
nothing more and no page shows anything of the server before it has the key."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from starlette.types import Send

from app.errors import send_bytes

_FILES = {"/": "chat.html", "/live": "live.html"}


@dataclass(frozen=True)
class Page:
    html: bytes
    headers: Mapping[str, str]

    async def send(self, send: Send, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await send_bytes(send, self.html, "text/html; charset=utf-8", status, {**self.headers, **(headers or {})})


def pages() -> dict[str, Page]:
    """Each page by its path, with its style and scripts in it and a policy that allows those and nothing else."""
    folder = files(__package__)

    def inlined(match: re.Match[str]) -> str:
        return f"<{match[1]}>\n{(folder / match[2]).read_text()}</{match[1]}>"

    found = {}
    for path, name in _FILES.items():
        html = re.sub(r"<(style|script)>(\S+)</\1>", inlined, (folder / name).read_text())
        sources = {
            tag: " ".join(f"'sha256-{_digest(part)}'" for part in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.S))
            for tag in ("style", "script")
        }
        policy = (
            f"default-src 'none'; style-src {sources['style']}; script-src {sources['script']}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        found[path] = Page(html.encode(), headers)
    return found


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
