"""The application: all routes of the service, behind its gate.

A further room of it is a router in a file of its own, and a name in `ROUTERS`.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from dora.runtime.calls import Calls
from dora.service import experience, rewards, sessions, verbs, weights
from dora.service.answers import RESPONSES, Json, tell_errors
from dora.service.app import Driver
from dora.service.gate import Gate
from dora.service.metrics import Traffic

ROUTERS = (verbs.router, sessions.router, experience.router, rewards.router, weights.router)
ROOMY = {"/v1/weights": 2**63}  # bytes; there bodies are counted by who knows the model's size


def make_app(calls: Calls, token: str, max_body_bytes: int) -> Gate:
    """The whole application."""
    app = FastAPI(
        title="DORA",
        version="1",
        description="A run of DORA from outside: see docs/service.md.",
        docs_url=None,
        redoc_url=None,
        default_response_class=Json,
        responses=RESPONSES,
    )
    traffic = Traffic()
    app.state.driver, app.state.traffic, app.state.uploads = Driver(calls), traffic, asyncio.Lock()
    tell_errors(app)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Security(HTTPBearer(auto_error=False))])
    app.state.routes = [route for router in ROUTERS for route in router.routes]
    app.get("/health", tags=["run"])(verbs.health)
    return Gate(app, token, max_body_bytes, ROOMY, traffic.note)
