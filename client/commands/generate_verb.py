"""`generate`: one answer of a pool, through its Service inside the cluster, through the API server elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import ssl

import httpx

from rollout_client.cluster_client import load_access
from rollout_client.http_clients import bearer_header, describe_error
from rollout_client.worker_control import parse_problem
from rollout_common.kube.access import Obj, uses_service_account
from rollout_common.kube.errors import KubeError

from .command_output import EXIT_OK, CommandFailed, print_json, print_text, progress_report
from .pool_access import PoolAccess
from .settings import GENERATE_SECONDS


def parse_ids(text: str) -> list[int]:
    """Return token ids that are separated by commas or spaces.

    Raises:
        argparse.ArgumentTypeError: They are something else.
    """
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"give token ids such as 1,2,3, not {text!r}")
    return [int(word) for word in words]


async def run_generate(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Print the text of an answer; for `--ids` its token ids."""
    sampling = {"temperature": given.temperature, "max_tokens": given.max_tokens}
    if given.ids is None:
        route, body = "completions", {"prompt": given.text, "model": given.adapter, **sampling}
    else:
        route, body = "generate", {"token_ids": given.ids, "sampling": sampling}
        if given.adapter is not None:  # older workers refuse the field
            body["adapter"] = given.adapter
    answer = await _send_request(given, pool, f"/v1/{route}", body)
    if given.output == "json":
        print_json(answer)
        return EXIT_OK
    try:
        if given.ids is None:
            print_text(answer["choices"][0]["text"])
        else:
            print_text(",".join(map(str, answer["outputs"][0]["token_ids"])))
    except (KeyError, IndexError, TypeError) as error:
        raise CommandFailed("the answer is not a worker's: see it with -o json") from error
    return EXIT_OK


async def _send_request(given: argparse.Namespace, pool: PoolAccess, route: str, body: Obj) -> Obj:
    report = progress_report(given.progress)
    tls: ssl.SSLContext | bool = True
    headers: list[tuple[str, str]] = []
    proxy: str | None = None
    inside = uses_service_account(given.kubeconfig, given.context)
    if inside:
        url = f"http://{pool.name}.{pool.namespace}:8000{route}"
        if given.token_file:
            try:
                headers = [("Authorization", bearer_header(given.token_file.read_text()))]
            except ValueError as error:
                raise CommandFailed(f"the token of --token-file can't be used: {error}") from error
    else:
        access = load_access(given.kubeconfig, given.context)
        service = f"/api/v1/namespaces/{pool.namespace}/services/{pool.name}:8000/proxy"
        url, tls, proxy = access.server + service + route, access.tls, access.proxy
        try:
            headers = await asyncio.to_thread(access.request_headers)
        except KubeError as error:
            raise CommandFailed(f"{error.message}: log in again") from error
    report(f"asking {url}")
    try:
        async with httpx.AsyncClient(
            verify=tls, proxy=proxy, trust_env=False, timeout=GENERATE_SECONDS
        ) as http:
            answer = await http.post(url, json=body, headers=headers)
    except httpx.HTTPError as error:
        why = describe_error(error)
        raise CommandFailed(f"{url} can't be reached: {why}; check the network") from error
    if answer.is_success:
        try:
            found: Obj = answer.json()
        except ValueError as error:
            raise CommandFailed(
                f"{url} does not lead to a worker: the answer is not JSON"
            ) from error
        return found
    raise CommandFailed(await _explain_refusal(answer, pool, inside))


async def _explain_refusal(answer: httpx.Response, pool: PoolAccess, inside: bool) -> str:
    await pool.read_pool()  # a pool that does not exist has an error of its own
    said = parse_problem(answer.status_code, answer.content)
    try:
        detail = answer.json().get("message") or answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = said.detail
    if answer.status_code == 403 and not inside:
        return f"{detail}; this way needs the right to create services/proxy: ask for it, or run in a pod"
    if answer.status_code == 401 and not inside:
        return f"{detail}; the API server passes no token of a data port on: run in a pod, with --token-file"
    if answer.status_code == 503 and "no endpoints" in detail:
        return f"no replica of {pool.name} serves: ask rollout why {pool.name}"
    return f"{answer.status_code}: {detail}"
