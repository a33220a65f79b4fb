"""Serve metrics, health, the live page and the read-only API on the loopback interface, in the daemon's own loop."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sentinel.config import HttpSettings
from sentinel.daemon import page
from sentinel.daemon.control import status_of
from sentinel.daemon.dispatcher import Dispatcher
from sentinel.daemon.metrics import Metrics
from sentinel.daemon.rank import Fleet
from sentinel.errors import NoSuchRunError, SentinelError
from sentinel.store.history import History
from sentinel.store.strict_json import dumps

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STOP_SECONDS = 1.0  # for answers under way when the daemon leaves
_log = structlog.get_logger()


class Seen(NamedTuple):
    """What HTTP may look at; it changes nothing."""

    fleet: Fleet
    metrics: Metrics
    dispatcher: Dispatcher
    database_url: str
    trouble: Callable[[], str]  # why the daemon is not ready; "" when it is


Answer = Callable[[Seen, Request], Awaitable[Response]]


class Http:
    """The server. Without a free port there is none, and everything else goes on."""

    def __init__(self, settings: HttpSettings, seen: Seen) -> None:
        self._settings = settings
        self._seen = seen
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.address = ""  # host:port, "" without a server

    @property
    def url(self) -> str:
        return f"http://{self.address}" if self.address else ""

    async def start(self) -> None:
        sock = _first_free(self._settings)
        if sock is None:
            last = self._settings.port + self._settings.ports - 1
            _log.warning("no free port, so no metrics and no page", first=self._settings.port, last=last)
            return
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        config = uvicorn.Config(
            _OwnHostOnly(_application(self._seen), self._settings.names),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            limit_concurrency=64,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([sock]))

    async def close(self) -> None:
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._task, STOP_SECONDS)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the daemon's own business."""
        yield


class _OwnHostOnly:
    """Refuse requests under a foreign name: a web page must not reach us by pointing its name at this address."""

    def __init__(self, application: ASGIApp, more_names: tuple[str, ...]) -> None:
        self._application = application
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in more_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_ours(scope):
            refusal = PlainTextResponse("this host name is not mine; use the address that the daemon printed\n", 403)
            await refusal(scope, receive, send)
            return
        await self._application(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1").lower()
        name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _application(seen: Seen) -> Starlette:
    routes = {
        "/": _page,
        "/metrics": _metrics,
        "/-/healthy": _healthy,
        "/-/ready": _ready,
        "/api/v1/runs": _runs,
        "/api/v1/runs/{run}": _run,
    }
    return Starlette(
        routes=[Route(path, _endpoint(answer, seen), methods=["GET"]) for path, answer in routes.items()]
    )


def _endpoint(answer: Answer, seen: Seen) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(seen, request)
        except NoSuchRunError as error:
            return _json({"error": str(error)}, 404)
        except SentinelError as error:
            return _json({"error": str(error)}, 503)

    return endpoint


async def _healthy(_seen: Seen, _request: Request) -> Response:
    return PlainTextResponse("alive\n")


async def _metrics(seen: Seen, _request: Request) -> Response:
    return Response(await asyncio.to_thread(seen.metrics.render), media_type=METRICS_TYPE)


async def _ready(seen: Seen, _request: Request) -> Response:
    trouble = seen.trouble()
    return PlainTextResponse(f"not ready: {trouble}\n", 503) if trouble else PlainTextResponse("ready\n")


async def _page(seen: Seen, _request: Request) -> Response:
    runs = []
    for run in list(seen.fleet.runs.values()):
        told = status_of(run, seen.dispatcher.in_flight(run.run_id))
        for rank in told["ranks"]:
            rank["gauges"] = seen.metrics.rank(run.run_id, rank["rank"]).gauges
        told["open"] = seen.metrics.run(run.run_id).open_kinds
        runs.append(told)
    return HTMLResponse(page.render(runs, seen.trouble()))


async def _runs(seen: Seen, _request: Request) -> Response:
    def read() -> list[dict[str, Any]]:
        try:
            with History(seen.database_url) as history:
                return history.runs()
        except NoSuchRunError:
            return []

    return _json(await asyncio.to_thread(read))


async def _run(seen: Seen, request: Request) -> Response:
    wanted: str = request.path_params["run"]

    def read() -> dict[str, Any]:
        with History(seen.database_url) as history:
            run_id = history.resolve(wanted)
            return {
                "run": history.run(run_id),
                "incidents": history.incidents(run_id),
                "actions": history.actions(run_id),
                "checkpoints": history.checkpoints(run_id),
                "generations": history.generations(run_id),
                "conservation": history.conservation(run_id),
            }

    return _json(await asyncio.to_thread(read))


def _json(value: object, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def _first_free(settings: HttpSettings) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    ports = range(settings.port, min(settings.port + settings.ports, 65536)) if settings.port else (0,)
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((settings.host, port))
            sock.listen(64)  # binding alone does not tell two daemons apart under SO_REUSEADDR
        except OSError:
            sock.close()
            continue
        sock.setblocking(False)
        return sock
    return None
