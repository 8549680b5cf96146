"""Kubeconfigs and environments of other people's machines."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_common.kube.access import load_access
from rollout_common.kube.environment_proxy import environment_proxy
from rollout_common.kube.errors import LoginFailed
from tests.support.loopback import kubeconfig

SECRET = "s3cr3t"
SERVER = "https://kube:6443"
EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login"}
BINARY = base64.b64encode(b"\xff\xfe" + SECRET.encode()).decode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"users: \xff\xfe {token: s3cr3t}", "is not UTF-8"),
        (b"users:\n- token: s3cr3t: x", "kubeconfig, line 2 is not YAML"),
        (b"s3cr3t", "is not a mapping"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_its_content(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_bytes(content)
    with pytest.raises(LoginFailed, match=said) as error:
        load_access(path)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"user": {"client-certificate-data": BINARY, "client-key-data": BINARY}}, "PEM"),
        ({"user": {"client-certificate-data": "!s3cr3t", "client-key-data": "="}}, "not base64"),
        ({"user": {"client-certificate": "none.pem", "client-key": "none.key"}}, "none.pem"),
        ({"user": {"auth-provider": {}}}, "use exec, or a token"),
        ({"user": {"exec": {"command": SECRET}}}, "must name a command and its apiVersion"),
        ({"user": {"exec": {**EXEC, "interactiveMode": "Always"}}}, "needs a terminal"),
        ({"cluster": {"certificate-authority-data": BINARY}}, "certificate"),
        ({"cluster": {"certificate-authority": "none.pem"}}, "none.pem"),
        ({"cluster": {"certificate-authority": "/dev/null"}}, "Empty certificate data"),
        ({"cluster": {"proxy-url": "socks5://me:s3cr3t@proxy"}}, "with http:// or https://"),
        ({"cluster": {"proxy-url": "s3cr3t:3128"}}, "with http:// or https://"),
        ({"cluster": {"server": ""}}, "the cluster k has no server"),
        ({"contexts": []}, "'c' is not among its contexts: none"),
        ({"current-context": "other"}, "'other' is not among its contexts: c"),
        ({"current-context": ""}, "it names no current-context; its contexts: c"),
    ],
)
def test_what_is_wrong_with_a_field_is_said_without_its_content(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = kubeconfig(tmp_path, "https://127.0.0.1:1", token=SECRET, **changes)
    with pytest.raises(LoginFailed, match=said) as error:
        load_access(path)
    assert SECRET not in str(error.value)


def test_a_service_account_that_lacks_a_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr("rollout_common.kube.access.SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(LoginFailed, match="the service account can't be used"):
        load_access()


def test_a_kubeconfig_may_be_yaml_with_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from a file\n")
    path = kubeconfig(tmp_path, "http://127.0.0.1:1/", user={"tokenFile": "token"})
    document = json.loads(path.read_text())
    document["contexts"][0]["context"]["namespace"] = "train"
    path.write_text(yaml.safe_dump(document))
    found = load_access(path)
    said = found.server, found.namespace, found.token()
    assert said == ("http://127.0.0.1:1", "train", "from a file")


def test_fields_may_be_empty(tmp_path: Path) -> None:
    """As tools leave them that write a token into a copy of another user."""
    user = {"token": "one", "client-certificate-data": "", "client-key-data": None}
    assert load_access(kubeconfig(tmp_path, "https://127.0.0.1:1", user=user)).token() == "one"


def test_an_account_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "~no-such-account/config")
    with pytest.raises(LoginFailed, match="No such file"):
        load_access()


@pytest.mark.parametrize(
    ("server", "environment", "proxy"),
    [
        ("https://kube:6443", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://kube:6443", {"https_proxy": "p:1"}, "http://p:1"),
        ("https://kube:6443", {"HTTP_PROXY": "http://p:1"}, None),
        ("http://kube:6443", {"http_proxy": "http://p:1"}, "http://p:1"),
        ("https://localhost:6443", {"HTTPS_PROXY": "http://p:1"}, None),
        ("https://127.0.0.2:6443", {"HTTPS_PROXY": "http://p:1"}, None),
        ("https://[::1]:6443", {"HTTPS_PROXY": "http://p:1"}, None),
    ],
)
def test_a_proxy_of_the_environment_is_for_its_scheme(
    server: str, environment: dict[str, str], proxy: str | None
) -> None:
    assert environment_proxy(server, environment) == proxy


@pytest.mark.parametrize(
    ("server", "no_proxy", "direct"),
    [
        ("https://10.96.0.1", "10.0.0.0/8", True),
        ("https://11.96.0.1", "10.0.0.0/8", False),
        ("https://kube", "10.0.0.0/8, nonsense/x", False),
        ("https://[fd00::7]", "fd00::/16", True),
        ("https://[fd00::7]:6443", "[fd00::7]:6443", True),
        ("https://[fd00::7]:6443", "[fd00::7]:443", False),
        ("https://10.96.0.1", "10.96.0.1", True),
        ("https://10.96.0.1", "0.1", False),
        ("https://kube.corp:6443", "KUBE.corp", True),
        ("https://kube.corp:6443", "other, corp", True),
        ("https://kube.corp:6443", ".corp", True),
        ("https://kube.corp:6443", "*.corp", True),
        ("https://corp:6443", ".corp", False),
        ("https://notcorp:6443", "corp", False),
        ("https://kube.corp:6443", "corp:6443", True),
        ("https://kube.corp:6443", "corp:443", False),
        ("https://kube.corp", "corp:443", True),
        ("https://kube.corp:6443", "*", True),
        ("https://kube.corp:6443", " ,", False),
    ],
)
def test_no_proxy_is_read_as_kubectl_reads_it(server: str, no_proxy: str, direct: bool) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        found = environment_proxy(server, {"HTTPS_PROXY": "http://p:1", name: no_proxy})
        assert (found is None) == direct


def test_a_proxy_of_the_kubeconfig_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://of-the-environment:1")
    assert load_access(kubeconfig(tmp_path, SERVER)).proxy == "http://of-the-environment:1"
    path = kubeconfig(tmp_path, SERVER, cluster={"proxy-url": "http://of-the-file:1"})
    assert load_access(path).proxy == "http://of-the-file:1"
