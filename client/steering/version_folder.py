"""The folder that a trainer writes its versions to: where each lies, and which may be deleted."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path, PurePath, PurePosixPath

from rollout_common.wire import WeightsId

logger = logging.getLogger(__name__)

DEFAULT_KEPT_VERSIONS = 2
"""The committed version, and the one before it."""

_FOLDER_NAME = re.compile(r"(?:\.)?epoch-(\d+)-version-(\d+)(?:\.partial)?")


class VersionFolder:
    """Versions in one folder on a volume that the workers mount, each in a folder of its own.

    Args:
        folder: As this process sees it.
        mounted_at: As the workers see it: absolute, or relative to the weights' claim; None: as here.
        keep: How many committed versions stay, the newest first; the one that serves always does.
    """

    def __init__(
        self,
        folder: str | PurePath,
        mounted_at: str | PurePath | None = None,
        keep: int = DEFAULT_KEPT_VERSIONS,
    ) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(
                f"keep must be 1 or more, not {keep!r}: a replica that joins loads the committed version"
            )
        if folder == "":
            # As of an environment variable that is not set: it would be the current folder.
            raise ValueError("the folder of versions must have a name: '.' is the current one")
        self.folder, self.mounted_at, self.keep = Path(folder), mounted_at, keep

    def local_path(self, identity: WeightsId) -> Path:
        """Return where this process writes a version."""
        return self.folder / f"epoch-{identity.epoch}-version-{identity.version}"

    def mounted_path(self, identity: WeightsId) -> str:
        """Return the same place as the workers see it."""
        base = self.folder.absolute() if self.mounted_at is None else self.mounted_at
        return str(PurePosixPath(base) / self.local_path(identity).name)

    def check_folder(self, identity: WeightsId) -> None:
        """Refuse to write among the versions of another pool, or of a deleted one.

        A new pool starts at epoch 1. Without this check, a run would collide with a version of both pools
        in its middle.

        Raises:
            FileExistsError: The folder has a later version of this epoch. If it has this very version, the
                contents are compared once it is written.
        """
        if not self.folder.exists():
            return
        epoch, number = identity.as_tuple()
        there = [each for each, path in self._find_versions() if path.suffix != ".partial"]
        if met := [version for each, version in there if each == epoch and version > number]:
            raise FileExistsError(
                f"{self.folder} has version {max(met)} of epoch {epoch}: publish under a new version; "
                "if it is of another pool, or of one that is gone, use a folder of your own, or delete it"
            )

    def prune_versions(self, committed: WeightsId) -> None:
        """Delete what nobody loads any more: versions before the committed one, except the newest.

        Half-written versions of a trainer that died are deleted, too. Nothing else in the folder is
        touched. A failure is only logged, and the other folders are still deleted.
        """
        failures: list[str] = []
        try:
            old = [each for each in self._find_versions() if each[0] < committed.as_tuple()]
        except OSError as error:
            old, failures = [], [str(error)]
        whole = sorted((e for e in old if e[1].suffix != ".partial"), reverse=True)
        stay = {path for _, path in whole[: self.keep - 1]}
        for _, path in old:
            if path not in stay:
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    failures.append(str(error))
        if failures:
            said = "; ".join(failures)
            logger.warning("old versions in %s were not all deleted: %s", self.folder, said)

    def _find_versions(self) -> list[tuple[tuple[int, int], Path]]:
        """Return the versions, complete or not, and their paths."""
        matches = [(_FOLDER_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return [((int(match[1]), int(match[2])), path) for match, path in matches if match]
