"""What the operator's start imports of others."""

from __future__ import annotations

import subprocess
import sys


def test_the_official_client_is_imported_by_those_who_need_it_alone() -> None:
    code = (
        "import sys, rollout_operator.__main__\n"
        "assert 'kopf' in sys.modules\n"
        "assert 'kubernetes' not in sys.modules\n"
        "import kubernetes.config"  # as a login with an auth-provider does
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        check=True,
        timeout=60,
    )
