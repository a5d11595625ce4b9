"""The metrics page as it is served, with whatever is to go wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from aiohttp import web

from extproc.lab.delivery import JSON, Delivery, forever
from extproc.lab.desk import Desk
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.records import Outcome

_TEXT: Final = MappingProxyType({"content-type": "text/plain; version=0.0.4; charset=utf-8"})
_NAME: Final = re.compile(rb"^((?:# (?:HELP|TYPE) )?)(?=[a-zA-Z_:])", re.MULTILINE)
_LOGIN: Final = b"<!doctype html><html><body><form>Sign in <input name=user></form></body></html>"


async def serve_page(desk: Desk, delivery: Delivery) -> web.StreamResponse:
    """The page has been sent, or the fault has had its way."""
    page = desk.page()
    if page is None:
        return await delivery.reply(404, JSON, b'{"detail":"Not Found"}')
    fault = delivery.fault
    if fault is None:
        return await delivery.reply(200, _TEXT, page)
    match fault.kind:
        case FaultKind.METRICS_HANG:
            await forever()
        case FaultKind.METRICS_SLOW:
            await delivery.wait()
        case FaultKind.METRICS_TRICKLE:
            return await _trickle(delivery, page)
        case FaultKind.METRICS_PAGE:
            page = (fault.body or "").encode()
            return await delivery.reply(200, {**_TEXT, **fault.headers}, page)
        case _:
            return await delivery.reply(*_instead(fault, page))
    return await delivery.reply(200, _TEXT, page)


def _instead(fault: Fault, page: bytes) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of what comes in place of the page."""
    match fault.kind:
        case FaultKind.METRICS_NAMES:
            return 200, _TEXT, _NAME.sub(rb"\1other_", page)
        case FaultKind.METRICS_HTML:
            return 200, {"content-type": "text/html"}, _LOGIN
        case FaultKind.METRICS_EMPTY:
            return 200, _TEXT, b""
        case FaultKind.METRICS_JSON:
            return 200, JSON, b"[]"
        case FaultKind.METRICS_REDIRECT:
            return 301, {"location": fault.body or "/"}, b""
        case _:
            return fault.status or 404, fault.headers, b"not here"


async def _trickle(delivery: Delivery, page: bytes) -> web.StreamResponse:
    """The page comes a byte at a time, the whole of its length promised."""
    reply = await delivery.start(200, _TEXT, len(page))
    for byte in page:
        await reply.write(bytes((byte,)))
        await delivery.wait()
    return await delivery.finish(reply, Outcome.ANSWERED)
