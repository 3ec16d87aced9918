"""
Sends one request to a web host: redirects, secrets, and what a response means for the next attempt.

A token goes only to the host that it is for. Once a redirect leaves that host, the token is not sent again. Addresses
are logged without their query, because queries hold signatures.
"""

import json
import os
import random
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import urllib3

from bloomery import __version__
from bloomery.core.errors import DataError, UnreachableError
from bloomery.core.log import info

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
LONGEST_RETRY_AFTER_SECONDS = 3600.0
TIMEOUT = urllib3.Timeout(connect=15.0, read=60.0)
SECONDS_FOR_A_REASON = 10.0
"""How long the body of a refusal is waited for: the status says enough."""
MAX_REDIRECTS = 10
MOVED = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529)
"""Answers after which the same request may succeed."""

T = TypeVar("T")
IMPATIENT: ContextVar[bool] = ContextVar("impatient", default=False)


class PassingError(Exception):
    """The same request may succeed later: after `wait_seconds`, where the server says so."""

    def __init__(self, what: str, wait_seconds: float | None = None) -> None:
        super().__init__(what)
        self.wait_seconds = wait_seconds


class BrokenError(PassingError):
    """The connection failed, so that nobody knows whether the request was served."""


class RefusedError(Exception):
    """The same request would end the same way; `hint` is what a person can do, `status` that of the answer, if any."""

    def __init__(self, what: str, hint: str = "", status: int = 0) -> None:
        super().__init__(what)
        self.hint, self.status = hint, status


def host(address: str) -> tuple[str, str]:
    """Scheme and host with port: what a token is for."""
    parts = urlsplit(address)
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def secret(raw: str, where: str) -> str:
    """A key as a header can hold it, without white space around it. Raises DataError, which does not show it."""
    key = raw.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise DataError(
            f"its {len(key)} characters are not a valid key: they include a space or another invalid character",
            where=where,
            hint=f"Copy the key again: export {where}=…",
        )
    return key


def shown(address: str) -> str:
    """An address as logs and errors may hold it."""
    scheme, name = host(address)
    return f"{scheme}://{name}{urlsplit(address).path}"


@contextmanager
def asked(
    method: str,
    address: str,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    page: str = "",
    body: bytes | None = None,
    timeout: urllib3.Timeout = TIMEOUT,
) -> Iterator[urllib3.BaseHTTPResponse]:
    """
    The answer to one request, its body not read yet; redirects are followed, unless the request has a body.

    Raises PassingError for an answer that may be another next time and where nobody answers. Raises BrokenError for a
    connection that breaks, also while the block reads, and RefusedError for the rest. `page` is where a person gets
    access to what is gated.
    """
    try:
        response, linked = _followed(method, address, token, headers or {}, body, timeout)
        try:
            if response.status >= 400 and response.status != 416:
                raise trouble(
                    response.status, response.headers, page, "" if body is None else _refusal_message(response)
                )
            response.headers.update(linked)
            yield response
        finally:
            response.close()
            response.release_conn()
    except (urllib3.exceptions.LocationValueError, urllib3.exceptions.URLSchemeUnknown) as error:
        raise RefusedError(f"is not a web address: {error}") from None
    except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as error:
        raise PassingError(f"the connection failed: {_brief(error)}") from None  # before the request was sent
    except urllib3.exceptions.HTTPError as error:
        raise BrokenError(f"the connection failed: {_brief(error)}") from None


def _followed(
    method: str,
    address: str,
    token: str | None,
    headers: Mapping[str, str],
    body: bytes | None,
    timeout: urllib3.Timeout,
) -> tuple[urllib3.BaseHTTPResponse, dict[str, str]]:
    """The last answer, and what the answers before it say about the file that they link to."""
    linked: dict[str, str] = {}
    home = host(address)
    for _ in range(MAX_REDIRECTS):
        token = token if host(address) == home else None
        signed = {"Authorization": f"Bearer {token}"} if token else {}
        own = {"Accept-Encoding": "identity", "User-Agent": f"bloomery/{__version__}", **headers, **signed}
        response = _pool(address).request(
            method,
            address,
            body=body,
            headers=own,
            redirect=False,
            retries=False,
            preload_content=False,
            timeout=timeout,
        )
        if response.status not in MOVED:
            return response, linked
        linked |= {name: value for name, value in response.headers.items() if name.lower().startswith("x-")}
        address = urljoin(address, response.headers.get("Location", ""))
        response.close()  # its body is of no use, and may be of any length
        response.release_conn()
        if host(address)[0] not in ("http", "https"):
            raise RefusedError(f"is redirected to {shown(address)}, which is not a web address")
        if body is not None:
            raise RefusedError(f"is redirected to {shown(address)}", "If you trust that address, use it instead.")
    raise RefusedError(f"is redirected more than {MAX_REDIRECTS} times")


def _refusal_message(response: urllib3.BaseHTTPResponse) -> str:
    """What a server that speaks OpenAI's protocol says of its refusal, or "", also where that comes cut or too late."""
    try:
        error = json.loads(whole(response, 10_000, SECONDS_FOR_A_REASON))["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (urllib3.exceptions.HTTPError, BrokenError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def whole(response: urllib3.BaseHTTPResponse, max_bytes: int, seconds: float) -> bytes:
    """
    The body of a response, read in chunks. Raises BrokenError if it has more than `max_bytes` or takes longer than
    `seconds` in all. A limit for each read would not stop a server that sends a byte at a time.
    """
    body, until = bytearray(), time.monotonic() + seconds
    while chunk := response.read1(65536):
        body += chunk
        if len(body) > max_bytes:
            raise BrokenError(f"the answer has more than {max_bytes:,} bytes")
        if time.monotonic() > until:
            raise BrokenError(f"the answer was incomplete at the time limit; {len(body):,} bytes had arrived")
    return bytes(body)


def trouble(status: int, headers: Mapping[str, str], page: str, said: str = "") -> PassingError | RefusedError:
    """What an answer of 400 and above means: to be raised. `said` is what its body says."""
    said = headers.get("X-Error-Message") or said
    what = f"HTTP {status}" + (f": {said}" if said else "")
    if status in PASSING:
        return PassingError(what, retry_after(headers))
    if headers.get("X-Error-Code") == "GatedRepo" and page:
        hint = f"Accept its terms at {page}, then set HF_TOKEN to a token of the same account."
        return RefusedError(f"is gated ({what})", hint)
    if status in (401, 403) and page:
        return RefusedError(what, f"Set HF_TOKEN to a token of an account that may read {page}.")
    return RefusedError(what, f"Check that {page} still has it." if page else "", status)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks for, from Retry-After (seconds or a date) or from the hub's RateLimit (t=…)."""
    said = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", said):
        return float(said)
    if said:
        try:
            date = parsedate_to_datetime(said)
            # Of the three forms that HTTP knows (RFC 9110, 5.6.7), one names no zone; all are in UTC.
            return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    reset = re.search(r"\br=0\b.*\bt=(\d+)", headers.get("RateLimit", ""))
    return float(reset[1]) if reset else None


def wait(failures: int, error: PassingError, what: str, stop: threading.Event | None = None) -> None:
    """
    Sleep before the attempt after this many failures, or until `stop` is set. Raises RefusedError where the server asks
    for hours.
    """
    asked_for = error.wait_seconds
    if asked_for is not None and asked_for > LONGEST_RETRY_AFTER_SECONDS:
        raise RefusedError(f"{error}; the server asks to wait {asked_for:,.0f} s", "Run the same command again later.")
    seconds = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (failures - 1)) * random.uniform(0.8, 1.2)
    seconds = max(seconds, asked_for) if asked_for is not None else seconds
    info(f"{what}: {error}; trying again in {seconds:.1f} s", style="dim")
    _rest(seconds, stop)


def _rest(seconds: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)


@contextmanager
def impatiently() -> Iterator[None]:
    """Within, a host that does not answer at once is an UnreachableError: what it would say is not worth a wait."""
    token = IMPATIENT.set(True)
    try:
        yield
    finally:
        IMPATIENT.reset(token)


def patiently(call: Callable[[], T], *, attempts: int, what: str, stop: threading.Event | None = None) -> T:
    """
    The result of a call that may raise PassingError, after at most this many attempts. Raises RefusedError. Once
    `stop` is set, a wait ends at once and the call is made again. The call decides how to end.
    """
    for failures in range(1, attempts + 1):
        try:
            return call()
        except PassingError as error:
            if IMPATIENT.get():
                raise UnreachableError(str(error), where=what, hint="Check the network.") from None
            if failures == attempts:
                raise RefusedError(f"{error} ({attempts} attempts)") from None
            wait(failures, error, what, stop)
    raise AssertionError("attempts is at least 1")


def _pool(address: str) -> urllib3.PoolManager:
    scheme, name = host(address)
    bypassed = bool(urllib.request.proxy_bypass(name))
    return _manager(None if bypassed else urllib.request.getproxies().get(scheme))


@cache
def _manager(proxy: str | None) -> urllib3.PoolManager:
    certificates = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    if proxy is None:
        return urllib3.PoolManager(ca_certs=certificates)
    return urllib3.ProxyManager(proxy, ca_certs=certificates)


def _brief(error: Exception) -> str:
    """The innermost reason, without pools and addresses."""
    inner = [part for part in (getattr(error, "reason", None), *error.args) if isinstance(part, Exception)]
    return re.sub(r"^<.*?>: |^\w+\(.*?\): ", "", str(inner[-1] if inner else error)) or type(error).__name__
