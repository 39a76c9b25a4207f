"""How the tools reach a running server: its address, the key that it wants, and the certificates that are trusted.

Keys are never shown: not in a message, not in ``repr``, not in a file of results.
"""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import check_file, named

KEY_ENV, ADMIN_KEY_ENV = "SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"
KEY_OPTION, ADMIN_KEY_OPTION, CA_OPTION = "--api-key", "--admin-api-key", "--cacert"
MOST_CA_BYTES = 8 << 20
REFUSED = (401, 403)
"""Statuses of who has no key, or a wrong one."""
ADMIN_PATHS = ("/flush_cache", "/abort_request")
"""What SGLang lets only ``--admin-api-key`` do, where it has one."""
HIDDEN = "***"
_KEY_WITHIN = re.compile(r"(--(?:admin-)?api-key(?:=|\s+))\S+")
_OF_SYSTEM = re.compile(r"\[Errno -?\d+\] ([^\"'()\[\]<>]+)")
_WHY_NOT_TRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED\] (?:certificate verify failed: )?([^()]*)")


class AccessError(requests.RequestException):
    """The server wants a key or refuses this one, or its certificate is not trusted. The message says what to do."""


def cause(error: Exception) -> str:
    """Why a request has no reply that can be read, in a few words."""
    if isinstance(error, requests.Timeout):
        return "it does not answer in time"
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"it answers with status {error.response.status_code}"
    if isinstance(error, requests.ConnectionError):
        found = _OF_SYSTEM.search(str(error))
        return found[1].strip().lower() if found else "the connection ended"
    if isinstance(error, requests.JSONDecodeError):
        return "its reply is no JSON"
    return str(error)


class _Bearer(requests.auth.AuthBase):
    """A key as SGLang reads it. Unlike a header it is not replaced by what ``.netrc`` has for the host."""

    def __init__(self, key: str):
        self.key = key

    def __call__(self, request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {self.key}"
        return request


@dataclass(frozen=True)
class Access:
    """What a server is shown, and what it has to show.

    Attributes:
        api_key: for all requests. admin_api_key: for ``ADMIN_PATHS`` in its place. None: no key.
        cacert: a PEM file of the certificates that are trusted, None for those of the system.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    cacert: Path | None = None

    @classmethod
    def of_server_args(cls, args: Sequence[str]) -> Access:
        """The keys that a server is started with."""
        found: dict[str, str] = {}
        for at, arg in enumerate(args):
            written, equals, value = arg.partition("=")
            if name := _key_option(written):
                found[name] = value if equals else "".join(args[at + 1 : at + 2])
        return cls(found.get(KEY_OPTION) or None, found.get(ADMIN_KEY_OPTION) or None)

    def key(self, path: str) -> str | None:
        """The key for a path of the server, None for none."""
        admin = self.admin_api_key if path.partition("?")[0] in ADMIN_PATHS else None
        return admin or self.api_key

    def headers(self, path: str = "") -> dict[str, str]:
        """The header that shows the key for a path, none without a key."""
        key = self.key(path)
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def trusted(self) -> str | bool:
        """As ``verify`` of requests: a file or folder of certificates; True leaves it to requests."""
        if self.cacert is not None:
            return str(self.cacert)
        if os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"):
            return True
        system = ssl.get_default_verify_paths()
        folder = system.capath if system.capath and os.listdir(system.capath) else None
        return system.cafile or folder or True

    def context(self) -> ssl.SSLContext:
        """The same for clients that take a context."""
        trusted = self.trusted()
        if trusted is True:
            return ssl.create_default_context()
        where = str(trusted)
        if os.path.isdir(where):
            return ssl.create_default_context(capath=where)
        return ssl.create_default_context(cafile=where)

    def get(self, url: str, path: str, timeout: float) -> requests.Response:
        """``GET`` a path of the server at ``url``; ``timeout`` in seconds. Raises AccessError."""
        return self._send("GET", url, path, timeout=timeout)

    def post(self, url: str, path: str, payload: Any = None, *, timeout: float) -> requests.Response:
        """``POST`` JSON to it. Raises AccessError."""
        return self._send("POST", url, path, json=payload, timeout=timeout)

    def _send(self, method: str, url: str, path: str, **more: Any) -> requests.Response:
        key = self.key(path)
        auth = None if key is None else _Bearer(key)
        try:
            verify = self.trusted() if url.startswith("https:") else True
            reply = requests.request(method, url + path, auth=auth, verify=verify, **more)
        except requests.exceptions.SSLError as error:
            raise AccessError(not_trusted(url, str(error))) from None
        if reply.status_code in REFUSED:
            raise AccessError(self.refusal(url, path, reply.status_code), response=reply)
        return reply

    def silence(self, url: str, timeout: float) -> str:
        """Why nobody can be asked at ``url``; empty if somebody answers there, whatever that is."""
        try:
            self.get(url, "/server_info", timeout)
        except AccessError as error:
            return "" if error.response is not None else str(error)
        except requests.RequestException:
            return f"{url} does not answer"
        return ""

    def refusal(self, url: str, path: str, status: int) -> str:
        """What is said of a reply with a status of ``REFUSED``."""
        option, env = (ADMIN_KEY_OPTION, ADMIN_KEY_ENV) if path in ADMIN_PATHS else (KEY_OPTION, KEY_ENV)
        if self.key(path) is None:
            return f"the server at {url} wants a key for {path} (status {status}): give {option}, or set {env}"
        if path in ADMIN_PATHS and self.admin_api_key is None:
            return (
                f"the server at {url} wants another key for {path} (status {status}): give {option}, or set {env}, if "
                "it was started with one"
            )
        return f"the server at {url} refuses the key for {path} (status {status}): see {option} and {env}"


OPEN = Access()
"""No key, and the system's certificates."""


def not_trusted(url: str, error: str) -> str:
    """What is said of an error of TLS."""
    if found := _WHY_NOT_TRUSTED.search(error):
        why = found[1].strip(" .,")
        return f"the certificate of {url} is not trusted ({why}): name who signed it with {CA_OPTION} FILE"
    return f"no https at {url}: the server may speak http"


def hidden(text: str, access: Access) -> str:
    """The text without the keys of ``access``."""
    for key in filter(None, (access.api_key, access.admin_api_key)):
        text = text.replace(key, HIDDEN)
    return text


def without_keys(args: Sequence[str]) -> list[str]:
    """The arguments of a command without keys, also where one argument holds those of another command."""
    found: list[str] = []
    for before, arg in zip(["", *args], args):
        name, equals, _ = arg.partition("=")
        if _key_option(before):
            arg = HIDDEN
        elif equals and _key_option(name):
            arg = f"{name}={HIDDEN}"
        found.append(_KEY_WITHIN.sub(rf"\1{HIDDEN}", arg))
    return found


def _key_option(name: str) -> str | None:
    """Which option for a key an argument is, if it is one: argparse takes a name that is cut short."""
    options = (KEY_OPTION, ADMIN_KEY_OPTION)
    return next((x for x in options if len(name) > len("--a") and x.startswith(name)), None)


def server_url(text: str) -> str:
    """The type of ``--url``: ``http://HOST:PORT`` or ``https://HOST:PORT``, without a slash at its end."""
    try:
        found = urlsplit(text.strip())
        _ = found.port
    except ValueError:
        raise argparse.ArgumentTypeError("is no address, as http://127.0.0.1:30000 is one") from None
    if found.scheme not in ("http", "https") or not found.hostname:
        raise argparse.ArgumentTypeError("is no address: write http://HOST:PORT or https://HOST:PORT")
    if "@" in found.netloc:
        raise argparse.ArgumentTypeError(f"has a name or a password in it: a key belongs to {KEY_OPTION}")
    if found.path.rstrip("/").endswith("/v1"):
        raise argparse.ArgumentTypeError("ends in /v1: give the server's address without /v1, as http://HOST:PORT")
    return text.strip().rstrip("/")


def same_server(one: str, other: str) -> bool:
    """Whether two values of ``server_url`` are one address, however it is written."""
    first, second = map(urlsplit, (one, other))
    ports = [x.port or {"http": 80, "https": 443}[x.scheme] for x in (first, second)]
    return (first.hostname, ports[0], first.path) == (second.hostname, ports[1], second.path)


def key_of(text: str, where: str) -> str:
    """A key, empty for none. Whatever is wrong with it, it is not repeated."""
    if not all("!" <= x <= "~" for x in text):
        raise argparse.ArgumentTypeError(f"the key of {where} has a space, a line end or a character outside of ASCII")
    return text


def _certificates(text: str) -> Path:
    try:
        check_file(text, MOST_CA_BYTES)
        ssl.create_default_context(cafile=text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{named(text)} {error}") from None
    except (ssl.SSLError, OSError):
        raise argparse.ArgumentTypeError(f"{named(text)} has no certificate in PEM form") from None
    return Path(text)


def add_access_arguments(parser: argparse.ArgumentParser, *, admin: bool = False) -> None:
    """Options of who asks a running server; ``access_of`` reads them. ``admin``: the tool uses ``ADMIN_PATHS``."""
    parser.add_argument(
        KEY_OPTION,
        type=lambda text: key_of(text, KEY_OPTION),
        metavar="KEY",
        help=f"of the server, if it was started with one (default: {KEY_ENV}, which other users of this machine do "
        "not see)",
    )
    if admin:
        parser.add_argument(
            ADMIN_KEY_OPTION,
            type=lambda text: key_of(text, ADMIN_KEY_OPTION),
            metavar="KEY",
            help=f"to empty its prefix cache, if it was started with one (default: {ADMIN_KEY_ENV}, else the same key)",
        )
    parser.add_argument(
        CA_OPTION,
        type=_certificates,
        metavar="FILE",
        help="PEM certificates to trust for https (default: those of the system)",
    )


def access_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Access:
    """What ``add_access_arguments`` added, and the environment. Ends the program on a key that cannot be one."""

    def chosen(option: str, env: str) -> str | None:
        given = getattr(args, option.strip("-").replace("-", "_"), None)
        return (given if given is not None else key_of(os.environ.get(env, ""), env)) or None

    try:
        return Access(chosen(KEY_OPTION, KEY_ENV), chosen(ADMIN_KEY_OPTION, ADMIN_KEY_ENV), args.cacert)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
