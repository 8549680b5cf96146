"""A control plane on which users change pools at random while operators, API server, etcd and workers fail, and its judge.

Everything is real but nodes and workers (`scalelab`). A round does some acts at random, mends what it broke, and then
all pools must become what their specs say, and nothing may be written any more.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from localkube import processes
from rollout_operator.api import names
from tests.support.api.apiclient import PODS, POOLS, SERVICES, Api, ApiError, Obj, connect
from tests.support.cluster.scalelab import CONTROL, GANG, NAMESPACE, Lab, processless_pool
from tests.support.faults.scenes import decided_weights

OPERATORS = ("operator-1", "operator-2")
STORE, CONTROLLERS = (
    ("kube-apiserver", "etcd"),
    ("kube-controller-manager", "kube-scheduler", "kwok"),
)
MAX_POOLS, MAX_REPLICAS = 10, 5
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"weights": {"strategy": "Rolling"}},
    {"updateStrategy": {"maxUnavailable": 0, "maxSurge": 1}},
    GANG,
)
QUIET_SECONDS = 12.0
SETTLE_SECONDS = 400.0
"""A call of which nothing comes, and a watch that stands still, are given up after two minutes and more."""
RESTORED_SECONDS = 900.0
"""What a restored etcd has lost is found by the list of everything, each five minutes."""
READ_SECONDS = 30.0
OURS = '"logger": "rollout_'

PROBLEMS = (httpx.HTTPError, ApiError, KeyError, json.JSONDecodeError)
"""What a request meets while the API server is down, or if what it asks for is gone."""


class Follower:
    """Sees every state of a collection's objects, through outages of the API server; ends with `stop`.

    Args:
        lab: With the API server.
        path: Of the collection.
        see: Gets each object.
        gone: Gets each object that is there no more.
    """

    def __init__(
        self, lab: Lab, path: str, see: Callable[[Obj], None], gone: Callable[[Obj], None]
    ) -> None:
        self._client = connect(lab.cluster, timeout=READ_SECONDS)
        self._path, self._see, self._gone = path, see, gone
        self._known: dict[str, Obj] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"follow {path}")
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which may wait for an event."""
        self._ended.set()
        self._client.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(*PROBLEMS, RuntimeError):  # RuntimeError: the client is closed
                self._follow()
            self._ended.wait(0.2)

    def _follow(self) -> None:
        listed = self._client.get(self._path).raise_for_status().json()
        found = {each["metadata"]["uid"]: each for each in listed["items"]}
        for uid in self._known.keys() - found.keys():
            self._gone(self._known.pop(uid))
        for each in found.values():
            self._keep(each)
        params = {
            "watch": "1",
            "resourceVersion": listed["metadata"]["resourceVersion"],
            "timeoutSeconds": "20",
        }
        with self._client.stream("GET", self._path, params=params) as answer:
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                self._keep(event["object"])
                if event["type"] == "DELETED":
                    self._gone(self._known.pop(event["object"]["metadata"]["uid"]))

    def _keep(self, obj: Obj) -> None:
        self._known[obj["metadata"]["uid"]] = obj
        self._see(obj)


class World:
    """See the module.

    Args:
        lab: Without an operator.
        seed: Of all that is drawn.
    """

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab, self.draw = lab, random.Random(seed)
        self.acts: list[str] = []
        self.counts: Counter[str] = Counter()
        self.decided: set[tuple[int, int]] = {(0, 0)}
        self._version = 0
        self._broken: set[str] = set()
        self._mends: list[tuple[float, Callable[[], None]]] = []
        self._log_ends: dict[Path, int] = {}
        self._restored = False
        self._pod_at: dict[str, str] = {}
        """The uid of the pod that was last seen at an address."""
        self._snapshot = lab.cluster.state / "etcd-snapshot"
        self._followers = [
            Follower(lab, POOLS.format(NAMESPACE), self._note_decision, lambda _: None),
            Follower(lab, PODS.format(NAMESPACE), self._note_address, self._end_process),
        ]
        for name in OPERATORS:
            lab.start_operator(name=name, elect=True)
        state = lab.cluster.state
        self._commands = {
            name: _command(state, name) for name in (*OPERATORS, *STORE, *CONTROLLERS)
        }

    def stop(self) -> None:
        for each in self._followers:
            each.stop()

    def play_round(self) -> float:
        """Do some acts at random, mend what they broke and judge what comes of it; return the seconds until it was right."""
        self.acts.clear()
        self._restored = False
        end, due = time.monotonic() + self.draw.uniform(5, 40), 0.0
        while (now := time.monotonic()) < end or self._mends:
            for mend in [each for each in self._mends if each[0] <= now]:
                self._mends.remove(mend)
                mend[1]()
            if now < end and now >= due:
                self._act()
                due = now + self.draw.expovariate(0.7)
            self._start_ended()
            time.sleep(0.05)
        return self._settle()

    # What happens.

    def _act(self) -> None:
        kinds: dict[Callable[[], str], float] = {
            self._create: 4, self._delete: 1.5, self._scale: 3, self._change_template: 2,
            self._move_target: 5, self._set_state: 3, self._suspend: 1.5,
            self._delete_pod: 2, self._fail_pod: 1, self._restart_worker: 2, self._freeze_workers: 0.5,
            self._kill_operator: 2, self._freeze_operator: 1.5,
            self._kill_store: 1, self._freeze_api_server: 0.7, self._kill_controllers: 0.4,
            self._take_snapshot: 0.3, self._restore_snapshot: 0.2,
        }  # fmt: skip
        (act,) = self.draw.choices(list(kinds), list(kinds.values()))
        try:
            what = act()
        except PROBLEMS as error:
            what = f"{act.__name__[1:]} failed: {type(error).__name__}"
        if what:
            self.acts.append(f"{time.strftime('%H:%M:%S')} {what}")
            self.counts[act.__name__[1:].replace("_", " ")] += 1

    def _pick(self, path: str) -> Obj | None:
        found = self.lab.api.items(path, fresh=True)
        return self.draw.choice(found) if found else None

    def _edit(self, what: str, **spec: Any) -> str:
        pool = self._pick(POOLS.format(NAMESPACE))
        if pool is None:
            return ""
        self.lab.patch(pool["metadata"]["name"], **spec)
        return f"{what} of {pool['metadata']['name']}: {spec}"

    def _create(self) -> str:
        there = self.lab.pools()
        free = [f"pool-{n}" for n in range(MAX_POOLS) if f"pool-{n}" not in there]
        if not free:
            return ""
        name, kind = self.draw.choice(free), self.draw.choice(KINDS)
        self.lab.create(processless_pool(name, replicas=self._replicas(), **kind))
        return f"create {name}: {kind}"

    def _replicas(self) -> int:
        return self.draw.randint(1, MAX_REPLICAS)

    def _delete(self) -> str:
        pool = self._pick(POOLS.format(NAMESPACE))
        if pool is None or len(self.lab.pools()) < MAX_POOLS / 2:
            return ""
        self.lab.api.delete(f"{POOLS.format(NAMESPACE)}/{pool['metadata']['name']}")
        return f"delete {pool['metadata']['name']}"

    def _scale(self) -> str:
        return self._edit("scale", replicas=self._replicas())

    def _change_template(self) -> str:
        return self._edit(
            "template", podTemplate={"labels": {"team": f"t{self.draw.randrange(9)}"}}
        )

    def _move_target(self) -> str:
        self._version += 1
        epoch = self._version // 20 + 1
        source = {"path": f"/models/v{self._version}"}
        return self._edit(
            "target",
            weights={"target": {"epoch": epoch, "version": self._version, "source": source}},
        )

    def _set_state(self) -> str:
        return self._edit("state", state=self.draw.choice(("Active", "Active", "Paused", "Asleep")))

    def _suspend(self) -> str:
        return self._edit("suspend", suspend=self.draw.random() < 0.4)

    def _delete_pod(self) -> str:
        pod = self._pick(PODS.format(NAMESPACE))
        if pod is None:
            return ""
        options = self.draw.choice(({}, {"gracePeriodSeconds": 0}))
        self.lab.api.delete(f"{PODS.format(NAMESPACE)}/{pod['metadata']['name']}", **options)
        return f"delete pod {pod['metadata']['name']} {options}"

    def _fail_pod(self) -> str:
        pod = self._pick(PODS.format(NAMESPACE))
        if pod is None:
            return ""
        path = f"{PODS.format(NAMESPACE)}/{pod['metadata']['name']}/status"
        self.lab.api.patch(path, {"status": {"phase": "Failed", "reason": "Evicted"}})
        return f"fail pod {pod['metadata']['name']}"

    def _restart_worker(self) -> str:
        pod = self._pick(PODS.format(NAMESPACE))
        if pod is None or "podIP" not in pod["status"]:
            return ""
        self._end_process(pod)
        return f"restart the worker of {pod['metadata']['name']}"

    def _end_process(self, pod: Obj) -> None:
        if address := pod["status"].get("podIP"):
            with suppress(httpx.HTTPError):
                params = {"address": address}
                httpx.post(f"{CONTROL}/restart", params=params, timeout=60, trust_env=False)

    def _freeze_workers(self) -> str:
        return self._freeze("processless", 20)

    def _kill_operator(self) -> str:
        name = self.draw.choice(OPERATORS)
        return self._kill([name])

    def _freeze_operator(self) -> str:
        return self._freeze(self.draw.choice(OPERATORS), 40)  # a Lease is held for 15 s

    def _kill_store(self) -> str:
        return self._kill(list(STORE[: self.draw.randint(1, 2)]))

    def _freeze_api_server(self) -> str:
        return self._freeze(STORE[0], 20)

    def _kill_controllers(self) -> str:
        return self._kill([self.draw.choice(CONTROLLERS)])

    def _take_snapshot(self) -> str:
        def copy() -> None:
            shutil.rmtree(self._snapshot, ignore_errors=True)
            shutil.copytree(self.lab.cluster.state / "etcd", self._snapshot)

        return self._kill(list(STORE), between=copy)

    def _restore_snapshot(self) -> str:
        if not self._snapshot.exists():
            return ""

        def restore() -> None:
            data = self.lab.cluster.state / "etcd"
            shutil.rmtree(data)
            shutil.copytree(self._snapshot, data)

        # Kubernetes asks for new controllers then; the operators go on.
        if what := self._kill([*STORE, *CONTROLLERS], between=restore):
            self._restored = True
            return f"{what}, restored"
        return ""

    def _freeze(self, name: str, seconds: float) -> str:
        state, length = self.lab.cluster.state, self.draw.uniform(1, seconds)
        process = processes.recorded(state, name)
        if name in self._broken or process is None:
            return ""
        os.kill(process.pid, signal.SIGSTOP)
        self._broken.add(name)

        def go_on() -> None:
            os.kill(process.pid, signal.SIGCONT)
            self._broken.discard(name)

        self._mends.append((time.monotonic() + length, go_on))
        return f"freeze {name} for {length:.0f} s"

    def _kill(self, components: list[str], between: Callable[[], None] = lambda: None) -> str:
        """Kill these, and start them again in the reverse order after up to ten seconds."""
        length = self.draw.expovariate(0.3) % 10
        if self._broken & set(components):
            return ""
        for name in components:
            processes.stop(self.lab.cluster.state, name)
        self._broken.update(components)
        between()

        def start_again() -> None:
            for name in reversed(components):
                self._start(name)
            self._broken.difference_update(components)

        self._mends.append((time.monotonic() + length, start_again))
        return f"kill {components} for {length:.0f} s"

    def _start(self, name: str) -> None:
        command, environment = self._commands[name]
        processes.spawn(self.lab.cluster.state, name, command, environment)

    def _start_ended(self) -> None:
        """Start what has ended by itself, as a kubelet would: an operator that lost its Lease, say."""
        for name in self._commands.keys() - self._broken:
            if processes.recorded(self.lab.cluster.state, name) is None:
                self._start(name)
                self.counts[f"{name} ended by itself"] += 1

    # The judge.

    def _note_address(self, pod: Obj) -> None:
        uid, address = pod["metadata"]["uid"], pod["status"].get("podIP")
        if address and self._pod_at.setdefault(address, uid) != uid:
            self._pod_at[address] = uid
            self._end_process(pod)  # it was another one's

    def _part_pods(self) -> None:
        """Delete pods that share an address, which kwok may give again after it was restarted.

        All of them at once: the next pod would get the address of one that is deleted alone.
        """
        sharing: dict[str, list[str]] = {}
        for pod in self.lab.api.items(PODS.format(NAMESPACE), fresh=True):
            if address := pod["status"].get("podIP"):
                sharing.setdefault(address, []).append(pod["metadata"]["name"])
        for address, found in sharing.items():
            for name in found if len(found) > 1 else ():
                self.lab.api.delete(f"{PODS.format(NAMESPACE)}/{name}", gracePeriodSeconds=0)
                self.acts.append(f"delete pod {name}: it shares the address {address}")

    def _note_decision(self, pool: Obj) -> None:
        self.decided |= decided_weights(pool)

    def _settle(self) -> float:
        """Wait until all is as it should be and nothing is written; return how long it took.

        Raises:
            AssertionError: With what is wrong, and the acts of this round.
        """
        began = since = time.monotonic()
        seconds = RESTORED_SECONDS if self._restored else SETTLE_SECONDS
        why = ""
        while time.monotonic() - since < QUIET_SECONDS:
            try:
                self._part_pods()
                why = self._missing() or self._written()
            except PROBLEMS as error:
                why = f"the API server does not answer: {error!r}"
            self._start_ended()
            now = time.monotonic()
            since = now if why else since
            assert now - began < seconds, self._report(f"not within {seconds:.0f} s: {why}")
            time.sleep(0.5)
        committed = {tuple(pair) for pair in _ask(f"{CONTROL}/committed")}
        assert committed <= self.decided, self._report(
            f"committed without a decision: {committed - self.decided}"
        )
        found = self._tracebacks()
        assert not found, self._report(f"the operators logged {found}")
        return since - began

    def _report(self, problem: str) -> str:
        pods: list[str] = []
        with suppress(*PROBLEMS):
            pods = [_describe_pod(each) for each in self.lab.api.items(PODS.format(NAMESPACE))]
        return "\n".join([problem, *self.acts, *pods])

    def _written(self) -> str:
        found = [call for call in self.lab.writes() if call.resource != "leases"]
        return f"{found[-1]}" if found else ""

    def _missing(self) -> str:
        """What is not as the specs say; empty: all is."""
        api = self.lab.api
        pools = {
            pool["metadata"]["uid"]: pool for pool in api.items(POOLS.format(NAMESPACE), fresh=True)
        }
        pods = api.items(PODS.format(NAMESPACE), fresh=True)
        budgets = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
        children = [*pods, *_ours(api, SERVICES.format(NAMESPACE)), *_ours(api, budgets)]
        for child in children:
            owners = {ref["uid"] for ref in child["metadata"].get("ownerReferences", ())}
            if not owners & pools.keys():
                return f"{child['metadata']['name']} has no owner"
        for pool in pools.values():
            name = pool["metadata"]["name"]
            mine = [p for p in pods if p["metadata"]["labels"][names.LABEL_POOL] == name]
            if why := _pool_lacks(pool, mine, not self.counts["restore snapshot"]):
                return f"{name} lacks {why}"
        return ""

    def _tracebacks(self) -> list[str]:
        """Our lines in the operators' logs since the last look that have a traceback: kopf's stream is started again."""
        found = []
        for name in OPERATORS:
            path = processes.log_file(self.lab.cluster.state, name)
            with path.open(errors="replace") as log:
                log.seek(self._log_ends.get(path, 0))
                found += [line for line in log if OURS in line and "Traceback" in line]
                self._log_ends[path] = log.tell()
        return found[:3]


def _describe_pod(pod: Obj) -> str:
    status = {name: pod["status"].get(name) for name in ("phase", "podIP", "conditions")}
    return f"{pod['metadata']['name']} on {pod['spec'].get('nodeName')}: {json.dumps(status)}"


def _command(state: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment with which a process was started."""
    process = processes.recorded(state, name)
    assert process is not None, f"{name} does not run"

    def read(kind: str) -> list[str]:
        return Path(f"/proc/{process.pid}/{kind}").read_text().rstrip("\0").split("\0")

    environment = (entry.partition("=") for entry in read("environ"))
    return read("cmdline"), {key: value for key, _, value in environment}


def _ours(api: Api, path: str) -> list[Obj]:
    return api.items(path, f"{names.LABEL_MANAGED_BY}={names.MANAGER_NAME}", fresh=True)


def _ask(url: str) -> Any:
    return httpx.get(url, timeout=10, trust_env=False).raise_for_status().json()


def _pool_lacks(pool: Obj, pods: list[Obj], exact: bool) -> str:
    """What a pool lacks of what its spec says, with these pods; empty: nothing."""
    spec, status = pool["spec"], pool.get("status") or {}
    if "deletionTimestamp" in pool["metadata"]:
        return "its end"
    if status.get("observedGeneration") != pool["metadata"]["generation"]:
        return "a status of this generation"
    state, suspended = spec.get("state", "Active"), spec.get("suspend", False)
    replicas = 0 if suspended else spec["replicas"]
    ranks = spec.get("parallelism", {}).get("nodes", 1)
    found = {pod["metadata"]["name"] for pod in pods}
    # A scale-down may leave any of them; where devices go by number, the lowest.
    there = {int(name.split("-")[-2]) for name in found}
    numbers = range(replicas) if "colocation" in spec or len(there) != replicas else there
    wanted = {f"{pool['metadata']['name']}-{n}-{rank}" for n in numbers for rank in range(ranks)}
    if wanted != found:
        return f"pods {wanted ^ found}"
    active = state == "Active" and not suspended
    conditions = {c["type"]: c for c in status["conditions"]}
    expected = {"Suspended": suspended, "Ready": active, "Degraded": False}
    # What failed twice in a row is reported until it has done its work for ten minutes.
    if conditions.get("Degraded", {}).get("reason") == "CrashLooping":
        del expected["Degraded"]
    for kind, value in expected.items():
        if conditions.get(kind, {"status": "False"})["status"] != str(value):
            return f"{kind}={value}: {status.get('message')}"
    return next(filter(None, (_pod_lacks(spec, pod, exact) for pod in pods)), "")


def _pod_lacks(spec: Obj, pod: Obj, exact: bool) -> str:
    """What a pod of a pool lacks of this spec; empty: nothing."""
    name, labels, state = (
        pod["metadata"]["name"],
        pod["metadata"]["labels"],
        spec.get("state", "Active"),
    )
    team = spec["podTemplate"].get("labels", {}).get("team")
    if labels.get("team") != team:
        return f"team {team} at {name}"
    if labels[names.LABEL_RANK] != "0":
        return ""
    worker = _ask(f"http://{pod['status']['podIP']}:8001/v1/state")
    if worker["lifecycle"] != state or worker["serving"] != (state == "Active"):
        return f"{state} at {name}: {worker['lifecycle']}"
    active, target = worker["weights"]["active"], spec.get("weights", {}).get("target")
    if state == "Active" and target:
        found, wanted = ((each["epoch"], each["version"]) for each in (active, target))
        # No worker goes back to what a restored etcd says: decision 067.
        if found < wanted or (exact and found != wanted):
            return f"weights {wanted} at {name}: {found}"
    return ""
