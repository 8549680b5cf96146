"""Programs for the interpreters of vLLM and SGLang, whose import takes ten seconds of a processor: forked from one that has it behind it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine.engine_kinds import KINDS, ROOT
from tests.support.waiting import until_sync

NURSERY = Path(__file__).with_name("program_nursery.py")
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # read when torch is imported
    "VLLM_LOGGING_LEVEL": "ERROR",
}
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class EnginePrograms:
    """Runs programs in processes that have imported an engine.

    Attributes:
        folder: Has a folder for each program, with what it said.
    """

    process: subprocess.Popen[bytes]
    folder: Path

    def read_answer(
        self, program: str | Path, *words: object, asked: Any = None, **env: str
    ) -> Any:
        """Run a program, which must succeed, in a folder of its own; return the JSON of its last line.

        Args:
            program: Its file, or its code.
            words: Its arguments.
            asked: JSON for its stdin.
            env: More variables of its environment.
        """
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        file = program if isinstance(program, Path) else folder / "program.py"
        if isinstance(program, str):
            file.write_text(program)
        (folder / "in").write_text(json.dumps(asked))
        order = {
            "program": str(file),
            "words": [*map(str, words)],
            "folder": str(folder),
            "env": env,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        until_sync(lambda: self._has_ended(folder), SECONDS, what=f"the end of {file.name}")
        said = (folder / "err").read_text()
        assert (folder / "status").read_text() == "0", said[-3000:]
        assert "Traceback" not in said, said
        return json.loads((folder / "out").read_text().splitlines()[-1])

    def _has_ended(self, folder: Path) -> bool:
        assert self.process.poll() is None, (self.folder / "nursery.err").read_text()[-3000:]
        return (folder / "status").exists()


@contextmanager
def engine_programs(engine: str, folder: Path) -> Iterator[EnginePrograms]:
    """Import an engine; what is run afterwards begins with it."""
    with (
        (folder / "nursery.err").open("wb") as err,
        subprocess.Popen(
            [KINDS[engine].python, NURSERY, engine],
            stdin=subprocess.PIPE, stdout=err, stderr=err, env={**os.environ, **ENVIRONMENT},
        ) as process,
    ):  # fmt: skip
        try:
            yield EnginePrograms(process, folder)
        finally:
            process.kill()
