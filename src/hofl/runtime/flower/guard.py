# SPDX-License-Identifier: Apache-2.0
"""A SuperLink's guard: other machines are answered as nodes only.

One port serves nodes and whoever submits or lists runs, and a submitted run is code that the server executes;
Flower asks nobody who submits for a name. So all but what nodes need is answered on this machine alone.
"""

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_OPEN = ("/v1/fleet/", "/health")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware: 403 for what another machine may not ask."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it unread."""
        if scope["type"] == "lifespan" or allowed(scope["path"], scope.get("client"), scope.get("server")):
            return await self._app(scope, receive, send)
        if scope["type"] == "http":
            kind = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": kind})
            await send({"type": "http.response.body", "body": b"only from the server's own machine\n"})


def allowed(path: str, client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> bool:
    """Whether a request may pass.

    Args:
        path: what is asked.
        client: address the connection comes from.
        server: address it came in at; equal to the client's where both are this machine.
    """
    if path.startswith(_OPEN):
        return True
    if client is None:
        return False
    if server is not None and client[0] == server[0]:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
