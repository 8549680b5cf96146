"""Wire models between the head of a gang and its members; no trainer and no operator sees them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .weights_models import StageSource
from .wire_base import Body, Bool, Float, Int, Wire

SLOT_PATTERN = r"^[0-9a-f]{32}$"

SlotId = Annotated[str, Field(pattern=SLOT_PATTERN)]
"""Names a slot on every node; the head's engine makes it."""


class SlotRequest(Body):
    """Body of `PUT /v1/gang/slots/{id}`: fill a slot of this node from the same source.

    Pushed bytes are fetched from the one peer that the source names: the head, whose ticket is this
    member's alone.
    """

    source: StageSource
    root_hash: str | None = Field(default=None, max_length=128)
    on_disk: Bool = False
    deadline_seconds: Float = Field(gt=0, le=86400)


class GangSlot(Wire):
    """One slot of a member; `Filled` is its vote, for the content that `root_hash` names.

    `slug`: the kind of problem that it `Failed` of, where one is known.
    """

    id: SlotId
    phase: Literal["Filling", "Filled", "Failed"]
    bytes_done: Int = 0
    bytes_total: Int = 0
    root_hash: str | None = None
    error: str | None = None
    slug: str | None = None


TurnPhase = Literal["Waiting", "Checking", "Held", "InUse", "Released", "Failed"]


class GangTurn(Wire):
    """A member's turn for its devices, as of the head's last attempt to have those of all nodes.

    `Waiting` for its locks, then `Checking` the memory of its devices, then `Held`, but given back if
    the head falls silent; `InUse`: kept until the head gives it back, or the process ends.
    `Released`: given back. `message`: what it waits for, or why it `Failed`.
    """

    attempt: Int
    phase: TurnPhase
    devices: tuple[str, ...]
    waiting_for: dict[str, str] = Field(default_factory=dict)
    message: str | None = None


class GangState(Wire):
    """Response of `GET /v1/gang/state`.

    `phase`: Ready once this node's ranks run. `wrong`: why the gang can't go on, null while it can.
    `root_hash`: of the checkpoint that its ranks have loaded. `turn`: null where nobody else uses
    the devices.
    """

    boot_id: str
    rank: Int
    phase: Literal["Starting", "Ready"]
    wrong: str | None = None
    root_hash: str | None = None
    slots: tuple[GangSlot, ...] = ()
    turn: GangTurn | None = None
