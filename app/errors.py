"""The one way an error leaves over HTTP: OpenAI's error object under /v1, the native envelope elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Scope, Send

_NAMES = {  # status: (OpenAI's error type, default code on the native routes)
    400: ("invalid_request_error", "bad_request"),
    401: ("authentication_error", "unauthorized"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "deadline_exceeded"),
    413: ("invalid_request_error", "body_too_large"),
    414: ("invalid_request_error", "path_too_long"),
    422: ("invalid_request_error", "invalid_value"),
    429: ("rate_limit_error", "queue_full"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
    504: ("timeout_error", "timeout"),
}


EXCHANGE = "pilotfish.exchange"
"""In the scope: what a request has come to so far."""


class ApiError(Exception):
    """An answer that isn't the one asked for. `param` is the request field at fault, as a dotted path."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def route_path(scope: Scope) -> str:
    """The path below the application's mount point."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def error_body(error: ApiError, path: str, request_id: str) -> dict[str, Any]:
    kind, code = _NAMES.get(error.status, ("invalid_request_error" if error.status < 500 else "server_error", "error"))
    # Header bytes may reach a message as lone surrogates, which JSON can't hold.
    message = error.message.encode("utf-8", "replace").decode()
    if path == "/v1" or path.startswith("/v1/"):
        return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}
    details = None if error.param is None else {"param": error.param}
    return {"error": {"code": error.code or code, "message": message, "details": details, "request_id": request_id}}


async def send_json(send: Send, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    await send_bytes(send, orjson.dumps(body), "application/json", status, headers)


async def send_bytes(
    send: Send, payload: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    raw = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(payload))]
    for name, value in (headers or {}).items():
        raw.append((name.lower().encode("latin-1"), value.encode("latin-1")))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": payload})


async def send_error(send: Send, error: ApiError, scope: Scope, request_id: str) -> None:
    await send_json(send, error_body(error, route_path(scope), request_id), error.status, error.headers)
