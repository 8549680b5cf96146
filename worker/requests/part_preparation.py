"""Make what takes time of a request before it is admitted: check its grammar, decode its pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rollout_common.wire import GenerateRequest, Multimodal, StructuredOutput
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import Engine, EngineError, EngineInfo, Grammar, InvalidRequest
from rollout_worker.engines.grammars.grammar_checker import GrammarChecker
from rollout_worker.pictures.picture import Picture

from .admission_checks import check_pictures_taken, invalid_problem
from .picture_intake import PictureIntake
from .prepared_parts import PreparedParts


class PartPreparation:
    """Prepares the parts of one worker's requests.

    Args:
        folder: Returns the folder of the loaded model.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._grammars = GrammarChecker(folder)
        self._pictures = PictureIntake()

    async def prepare_parts(
        self, request: GenerateRequest, engine: Engine, info: EngineInfo
    ) -> PreparedParts:
        """Check the grammar of a request and decode its pictures, within its deadline.

        Raises:
            ProblemError: 4xx, 503 or 504; it names the field and the fix. 409 `unknown-media` names the hashes
                of pictures that have to be sent.
        """
        try:
            async with asyncio.timeout(request.deadline_seconds):
                grammar = await self._check_grammar(request.structured, engine, info)
                pictures = await self._read_pictures(request.multimodal, engine)
        except TimeoutError:
            raise ProblemError(
                "deadline-exceeded",
                f"grammar and pictures were not ready within {request.deadline_seconds:g} s, behind those of other"
                " requests: try again, or set a longer deadline_seconds",
                retry_after=1,
            ) from None
        except InvalidRequest as error:
            raise invalid_problem(error) from error
        return PreparedParts(grammar, pictures)

    async def _check_grammar(
        self, structured: StructuredOutput | None, engine: Engine, info: EngineInfo
    ) -> Grammar | None:
        if structured is None:
            return None
        if not engine.capabilities.structured:
            text = (
                f"the {info.engine} engine can't mask tokens for this model: leave it out, or add a tokenizer.json"
                " and an eos_token_id to the model's folder"
            )
            raise InvalidRequest("structured", text)
        try:
            return await self._grammars.check_structured(structured, info.eos_token_ids)
        except InvalidRequest:
            raise
        except EngineError as error:
            raise ProblemError("internal-error", f"structured: {error}") from error

    async def _read_pictures(
        self, multimodal: Multimodal | None, engine: Engine
    ) -> tuple[Picture, ...]:
        if multimodal is None:
            return ()
        check_pictures_taken(engine.capabilities)
        pictures = await self._pictures.read_pictures(multimodal)
        await engine.prepare_pictures(pictures)
        return pictures

    async def stop(self) -> None:
        """End the process that checks grammars."""
        await self._grammars.stop()
