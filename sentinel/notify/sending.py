"""Make one attempt to deliver a request, within one total deadline whatever the receiver does.

No redirect is followed, no cookie kept, TLS certificates are verified, and of an answer's body at most 64 KiB are
read and none is kept: it could repeat our secrets. A reason therefore says what happened in our own words only.
"""

import asyncio
import contextlib
import http.cookiejar
import logging
import math
from types import TracebackType
from typing import Self

import httpx

from sentinel.notify.channel import Delivery, Request
from sentinel.notify.patience import LONGEST_PAUSE_SECONDS
from sentinel.vocabulary import AlertOutcome

MOST_READ_BYTES = 64 * 1024
_MAY_PASS = frozenset({408, 425, 429})


class Sender:
    """One HTTP client for all attempts of a process; making it reads the system's certificates."""

    def __init__(self) -> None:
        for name in ("httpx", "httpcore"):  # they log URLs and headers, which are secrets here
            logging.getLogger(name).setLevel(logging.CRITICAL)
        no_cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=()))
        self._client = httpx.AsyncClient(
            follow_redirects=False, cookies=no_cookies, limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def attempt(self, request: Request, seconds: float) -> Delivery:
        """Returns within `seconds`, and a moment for cleaning up. Never raises for what a receiver does."""
        try:
            async with asyncio.timeout(seconds):
                return await _post(self._client, request, seconds)
        except (TimeoutError, httpx.TimeoutException):
            return Delivery(AlertOutcome.RETRIED, f"no answer within {seconds:g} s")
        except httpx.UnsupportedProtocol:
            return Delivery(AlertOutcome.FAILED, "the URL is neither http nor https")
        except (httpx.ConnectError, OSError):
            return Delivery(AlertOutcome.RETRIED, "no connection")
        except (httpx.TransportError, httpx.StreamError):
            return Delivery(AlertOutcome.RETRIED, "the connection broke before an answer came")
        except (httpx.InvalidURL, ValueError):
            return Delivery(AlertOutcome.FAILED, "the URL or a header cannot be sent")


async def _post(client: httpx.AsyncClient, request: Request, seconds: float) -> Delivery:
    headers = {**request.headers, "accept-encoding": "identity", "user-agent": "sentinel"}
    async with client.stream("POST", request.url, headers=headers, content=request.body, timeout=seconds) as response:
        delivery = _judged(response)
        # The answer's head decided. The rest is taken in as a courtesy to receivers that mind a broken pipe.
        with contextlib.suppress(httpx.TransportError, httpx.StreamError, TimeoutError):
            await _take_in(response, seconds / 10)
    return delivery


async def _take_in(response: httpx.Response, seconds: float) -> None:
    read = 0
    async with asyncio.timeout(seconds):
        async for part in response.aiter_raw(4096):
            read += len(part)
            if read >= MOST_READ_BYTES:
                return


def _judged(response: httpx.Response) -> Delivery:
    status = response.status_code
    if response.is_success:
        return Delivery(AlertOutcome.SENT, f"status {status}")
    if 300 <= status < 400:
        return Delivery(AlertOutcome.RETRIED, f"status {status}: redirects are not followed")
    if status in _MAY_PASS or status >= 500:
        return Delivery(AlertOutcome.RETRIED, f"status {status}", _patience(response))
    return Delivery(AlertOutcome.FAILED, f"status {status}")


def _patience(response: httpx.Response) -> float:
    try:
        asked = float(response.headers.get("retry-after", "0"))
    except ValueError:  # the other form, a date, needs both clocks to agree
        return 0.0
    return min(max(asked, 0.0), LONGEST_PAUSE_SECONDS) if math.isfinite(asked) else 0.0
