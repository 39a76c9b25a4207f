"""Keys and certificates of the servers that tools ask: shown to the server, and to nobody else."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import requests

from benchmarks.provenance import command
from benchmarks.soak import cli as soak
from benchmarks.soak.running import RunningServer
from sglang_diffkv import access as accesses
from sglang_diffkv.access import (
    ADMIN_KEY_ENV,
    KEY_ENV,
    OPEN,
    Access,
    AccessError,
    access_of,
    add_access_arguments,
    cause,
    hidden,
    server_url,
    without_keys,
)
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError
from sglang_diffkv.evaluate.server import Server
from tests.tools.certificates import make_certificate
from tests.tools.fake_server import FakeServer

KEY, ADMIN = "s3cret-key", "s3cret-admin"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (KEY_ENV, ADMIN_KEY_ENV, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password elses\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))


def parsed(*argv: str, admin: bool = False) -> Access:
    parser = argparse.ArgumentParser()
    add_access_arguments(parser, admin=admin)
    return access_of(parser, parser.parse_args(argv))


def as_sglang(path: str) -> str:
    return ADMIN if path == "/flush_cache" else KEY


def test_a_key_is_the_option_s_or_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed() == OPEN
    monkeypatch.setenv(KEY_ENV, KEY)
    assert parsed().api_key == KEY and parsed("--api-key", "other").api_key == "other"
    assert parsed("--api-key", "").api_key is None, "an empty one is none, whatever the environment has"
    monkeypatch.setenv(ADMIN_KEY_ENV, ADMIN)
    found = parsed(admin=True)
    assert (found.key("/generate"), found.key("/flush_cache")) == (KEY, ADMIN)
    assert Access(KEY).key("/flush_cache") == KEY, "a server may have one for all"


@pytest.mark.parametrize("bad", [f"{KEY}\n", f"{KEY} ", "sécret", f"{KEY}\r\nX-Other: 1"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(
    bad: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["--api-key", bad], []):
        monkeypatch.setenv(KEY_ENV, bad)
        with pytest.raises(SystemExit):
            parsed(*argv)
        message = capsys.readouterr().err
        assert "has a space, a line end" in message and "cret" not in message
        assert (KEY_ENV if not argv else "--api-key") in message


def test_no_text_of_ours_has_a_key() -> None:
    access = Access(KEY, ADMIN)
    assert "cret" not in repr(access) + str(access)
    assert hidden(f"a {KEY} b {ADMIN}", access) == "a *** b ***"
    argv = ["--url", "u", "--api-key", KEY, f"--admin-api-key={ADMIN}", "--api-k", KEY, f"--ap={KEY}"]
    argv += ["--server-args", f"--tp 2 --api-key {KEY} --admin-api-key={ADMIN}", "--n", "3"]
    found = without_keys(argv)
    assert "cret" not in " ".join(found) and found[-2:] == ["--n", "3"] and found[1] == "u"
    assert found[9] == "--tp 2 --api-key *** --admin-api-key=***"
    assert "cret" not in command("soak", argv)
    assert without_keys(["--n", "3", "--task", "a=b"]) == ["--n", "3", "--task", "a=b"]


def test_a_server_that_is_started_with_keys_is_asked_with_them(tmp_path: Path) -> None:
    server = Server("model", "diffkv", ["--api-key", KEY, f"--admin-api-key={ADMIN}"], log_path=tmp_path / "log")
    assert server.access == Access(KEY, ADMIN)
    assert "cret" not in str(server._failure("ended")) and "--api-key ***" in str(server._failure("ended"))


def test_who_has_no_key_or_a_wrong_one_is_told_so() -> None:
    with FakeServer(keys=as_sglang) as fake:
        with pytest.raises(AccessError, match=r"wants a key for /server_info \(status 401\): give --api-key, or set"):
            OPEN.get(fake.url, "/server_info", 5.0)
        with pytest.raises(AccessError, match="refuses the key") as caught:
            Access("wrong-key").get(fake.url, "/server_info", 5.0)
        assert "wrong-key" not in str(caught.value)
        with pytest.raises(AccessError, match=r"wants another key for /flush_cache.*--admin-api-key"):
            Access(KEY).post(fake.url, "/flush_cache", timeout=5.0)
        assert Access(KEY).get(fake.url, "/server_info", 5.0).ok, "netrc has no say"
        assert Access(KEY, ADMIN).post(fake.url, "/flush_cache", timeout=5.0).ok and fake.flushes == 1


def test_an_endpoint_shows_its_keys() -> None:
    with FakeServer(lambda ids: "ab", keys=as_sglang) as fake:
        with pytest.raises(EvaluationError, match="wants a key for /v1/models"):
            Endpoint.connect(fake.url)
        endpoint = Endpoint.connect(fake.url, access=Access(KEY))
        assert endpoint.generate([1, 2], 2).text == "ab" and endpoint.score([1, 2, 3], 0).input_logprobs
        assert endpoint.totals() and endpoint.forget_prefixes() == "status 401: --admin-api-key may be wanted"
        assert Endpoint.connect(fake.url, access=Access(KEY, ADMIN)).forget_prefixes() == ""
        with pytest.raises(EvaluationError, match="wants another key"):
            Endpoint.connect(fake.url, owned=True, access=Access(KEY)).forget_prefixes()
        assert client.run(fake.url, [[1, 2]], 2, access=Access(KEY))[0].text == "ab"


def test_https_by_a_certificate_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_certificate(tmp_path)
    with FakeServer(certificate=files) as fake:
        with pytest.raises(AccessError, match=r"is not trusted \(self-signed certificate\).*--cacert FILE"):
            OPEN.get(fake.url, "/server_info", 5.0)
        trusting = parsed("--cacert", str(files[0]))
        assert trusting.get(fake.url, "/server_info", 5.0).ok
        assert asyncio.run(_status(fake.url, trusting)) == 200
        with pytest.raises(AccessError, match="not valid for 'localhost'"):
            trusting.get(fake.url.replace("127.0.0.1", "localhost"), "/server_info", 5.0)
        monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
        assert OPEN.get(fake.url, "/server_info", 5.0).ok, "what the system trusts"


def test_https_of_a_server_that_speaks_http() -> None:
    with FakeServer() as fake, pytest.raises(AccessError, match="the server may speak http"):
        OPEN.get(fake.url.replace("http:", "https:"), "/server_info", 5.0)


async def _status(url: str, access: Access) -> int:
    connector = aiohttp.TCPConnector(ssl=access.context())
    async with aiohttp.ClientSession(connector=connector) as session, session.get(f"{url}/server_info") as reply:
        return reply.status


@pytest.mark.parametrize("text", ["", "no PEM", "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"])
def test_a_file_without_a_certificate_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ca.pem"
    path.write_text(text)
    for named, why in ((path, "has no certificate in PEM form"), (tmp_path, "is a folder"), ("/no/file", "cannot be")):
        with pytest.raises(SystemExit):
            parsed("--cacert", str(named))
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:30000", "write http://HOST:PORT"),
        ("ftp://host", "write http://HOST:PORT"),
        ("http://", "write http://HOST:PORT"),
        ("http://host:port", "is no address"),
        (f"https://user:{KEY}@host", "a key belongs to --api-key"),
        ("http://host:1/v1", "without /v1"),
        ("https://host/a/v1/", "without /v1"),
    ],
)
def test_other_addresses_are_refused(url: str, why: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=why) as caught:
        server_url(url)
    assert KEY not in str(caught.value)
    assert server_url(" https://host:1/ ") == "https://host:1"
    assert server_url("https://host/a/v12") == "https://host/a/v12"


def test_an_empty_folder_of_certificates_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "certs"
    folder.mkdir()
    found = argparse.Namespace(cafile=None, capath=folder)
    monkeypatch.setattr(accesses.ssl, "get_default_verify_paths", lambda: found)
    assert OPEN.trusted() is True


def test_a_soak_of_a_running_server_takes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path / "soak.json")]
    with pytest.raises(SystemExit):
        soak.parse_args(["--api-key", KEY, *output])
    assert "go with --url" in capsys.readouterr().err
    with FakeServer(keys=as_sglang) as fake:
        args = soak.parse_args(["--url", fake.url, "--api-key", KEY, *output])
        server = soak.make_server(args)
        assert isinstance(server, RunningServer) and server.server_info()["device"] == "cpu"
        assert "cret" not in json.dumps(soak.shown_arguments(args))
        assert soak.main(["--url", fake.url, *output]) == 1
    assert "wants a key for /server_info" in capsys.readouterr().err


def test_a_request_without_a_reply_has_a_short_reason() -> None:
    """Nobody reads through a pool of connections to find that nobody listens."""
    with pytest.raises(requests.ConnectionError) as refused:
        OPEN.get("http://127.0.0.1:9", "/", 5.0)
    assert cause(refused.value) == "connection refused"
    assert cause(requests.ReadTimeout("pool")) == "it does not answer in time"
    assert cause(requests.ConnectionError("('Connection aborted.', no errno)")) == "the connection ended"
    with FakeServer() as fake:
        reply = OPEN.get(fake.url, "/none", 5.0)
        with pytest.raises(requests.HTTPError) as missing:
            reply.raise_for_status()
    assert cause(missing.value) == "it answers with status 404"
    reply._content = b"<html>"
    with pytest.raises(requests.JSONDecodeError) as text:
        reply.json()
    assert cause(text.value) == "its reply is no JSON"
    assert cause(AccessError("wants a key")) == "wants a key"
