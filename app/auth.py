"""The outermost ASGI layers: request ids and header limits, then the key."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Mapping

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError, route_path, send_error

PUBLIC_PATHS = frozenset({"/health", "/ready"})
MAX_HEADER_BYTES = 32 * 1024
MAX_PATH_BYTES = 8 * 1024
REQUEST_ID = b"x-request-id"
DEADLINE_HEADER = b"x-request-timeout-seconds"
INNER_DEADLINE_HEADER = b"x-pilotfish-timeout-seconds"
SESSION_HEADER = b"x-session-id"
INNER_SESSION_HEADER = b"x-pilotfish-session-id"
PRIORITY = "pilotfish.priority"
"""In the scope: the best priority that the key gives."""
_ROUTES_PATH = "/-/routes"  # where Serve tells anybody the names of its applications
_RENAMED = {DEADLINE_HEADER: INNER_DEADLINE_HEADER, SESSION_HEADER: INNER_SESSION_HEADER}
# Headers that Ray Serve itself obeys (and decodes unchecked), however spelt; a client has no say in them.
_SERVE_HEADERS = frozenset(
    name.replace(b"-", b"_")
    for name in (b"x-request-disconnect-disabled", b"serve_multiplexed_model_id", SESSION_HEADER)
)


def serve_middlewares() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: Serve puts these outside its own X-Request-ID middleware."""
    return [Middleware(HeadersMiddleware)]


class HeadersMiddleware:
    """Gives every request one valid X-Request-ID and every response exactly that one; refuses oversized headers,
    websockets and Serve's list of applications.

    The client's id is kept when it is 1 to 128 printable ASCII characters. It may run twice, outside Serve and inside
    the application: the second time changes nothing. The client's deadline and session are renamed, so that they are
    the application's and not Serve's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = b""
        size = 0
        kept = []
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            name = name.lower()
            if name == REQUEST_ID:
                if not request_id and 0 < len(value) <= 128 and value.isascii() and value.decode().isprintable():
                    request_id = value
            elif name in _RENAMED or name.replace(b"-", b"_") not in _SERVE_HEADERS:
                kept.append((_RENAMED.get(name, name), value))
        request_id = request_id or uuid.uuid4().hex.encode()
        kept.append((REQUEST_ID, request_id))
        scope["headers"] = kept

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != REQUEST_ID]
                message["headers"] = [*headers, (REQUEST_ID, request_id)]
            await send(message)

        if size > MAX_HEADER_BYTES:
            error = ApiError(431, f"the headers take {size} bytes, more than {MAX_HEADER_BYTES}")
        elif len(scope["path"]) + len(scope.get("query_string", b"")) > MAX_PATH_BYTES:
            error = ApiError(414, f"the path and query are longer than {MAX_PATH_BYTES} bytes")
        elif route_path(scope) == _ROUTES_PATH:
            error = ApiError(404, f"no such path: {_ROUTES_PATH}")
        else:
            await self.app(scope, receive, send_with_id)
            return
        await send_error(send_with_id, error, scope, request_id.decode())


class AuthMiddleware:
    """Lets a request through with `Authorization: Bearer <key>` or `X-API-Key: <key>`, or to a public path.

    No key at all is 401, a wrong one 403 (ApiError, rendered by the layer outside). Keys are compared as bytes in
    constant time. No keys turn the check off. `keys` says the best priority of each one's requests, None for any.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, int | None]) -> None:
        self.app = app
        self._keys = {key.encode(): priority for key, priority in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and route_path(scope) not in PUBLIC_PATHS:
            self._check(scope)
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        offered = []
        for name, value in scope["headers"]:
            if name == b"x-api-key":
                offered.append(value.strip())
            elif name == b"authorization":
                scheme, _, credentials = value.strip().partition(b" ")
                if scheme.lower() == b"bearer":
                    offered.append(credentials.strip())
        offered = [key for key in offered if key]
        if not offered:
            raise ApiError(
                401,
                "no API key: send `Authorization: Bearer <key>` or `X-API-Key: <key>`",
                code="missing_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        found = [known for known in self._keys if any([hmac.compare_digest(key, known) for key in offered])]
        if not found:
            raise ApiError(403, "wrong API key", code="invalid_api_key")
        scope[PRIORITY] = self._keys[found[0]]
