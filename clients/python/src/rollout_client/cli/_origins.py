"""Detects requests from web pages, by the same rules as the server (`src/server/http/origin.rs`)."""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Iterable
from typing import Protocol

_AUTHORITY = re.compile(r"(?:\[(?P<v6>[^]]+)]|(?P<host>[^][:/@\s]+))(?::\d*)?")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ORIGIN = re.compile(r"https?://(?P<authority>.*)")
_OWN_SITES = frozenset({"same-origin", "none"})


class Headers(Protocol):
    """Headers of a request, each of which may occur several times."""

    def getall(self, name: str, default: list[str]) -> list[str]:
        """All values of the header, or the default if the request does not have it."""


class AllowedHosts:
    """The names by which browsers may reach the sidecar, beside IP addresses and localhost.

    The owner of any other name can make it resolve to this machine after a browser has loaded their page (DNS
    rebinding). The browser then takes the sidecar for that page's own origin.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Takes names without a port."""
        self._names = frozenset({"localhost", *(name.lower() for name in names)})

    def refusal(self, headers: Headers) -> str | None:
        """Why a request may not be served; None if it comes from a program or from a page of the sidecar itself."""
        hosts = headers.getall("Host", [])
        for host in hosts:
            if not self._allows(host):
                return (
                    f"host {host[:100]!r} is not allowed: use an IP address or localhost, or start the sidecar with "
                    "--allow-host NAME if the name is yours"
                )
        origins = headers.getall("Origin", [])
        is_own = all(_authority(origin) in [host.lower() for host in hosts] for origin in origins)
        if is_own and _OWN_SITES.issuperset(headers.getall("Sec-Fetch-Site", [])):
            return None
        page = f"pages of {origins[0][:100]!r}" if origins else "pages of another site"
        return f"requests from {page} are not allowed"

    def _allows(self, authority: str) -> bool:
        found = _AUTHORITY.fullmatch(authority)
        if found is None:
            return False
        host = found["v6"] or found["host"]
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return found["v6"] is None and host.lower() in self._names
        return True


def _authority(origin: str) -> str | None:
    found = _ORIGIN.fullmatch(origin)
    return None if found is None else found["authority"].lower()


def host_name(text: str) -> str:
    """Parses an option that is a host name."""
    if _NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name; give it without scheme and port, such as trainer.example"
        )
    return text
