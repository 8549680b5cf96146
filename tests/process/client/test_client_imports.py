"""What `import rollout_client` costs a trainer, and which names it gives."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    *("torch", "transformers", "safetensors", "numpy"),
    *("kopf", "kubernetes", "aiohttp", "yaml", "ray", "prometheus_client"),
    *("rollout_operator", "rollout_worker.engine"),
}


MODULES = (
    "rollout_client",
    "rollout_client.worker_control",
    "rollout_client.turn.command",
    "rollout_client.commands.rollout_command",
    "rollout_client.integrations.ray",
    "rollout_client.integrations.verl",
    "rollout_client.integrations.verl_rollout",
)


def test_importing_the_client_imports_nothing_heavy() -> None:
    code = f"import sys, {', '.join(MODULES)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == []
