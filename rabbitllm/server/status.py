"""What the server does, as numbers for the page: the batch's facts, and where the weights are.

    GET /status  ->  {"model": …, "running": 1, …, "pass_seconds": 61.2, "placement": {"streamed_bytes": …, …}}

All of the facts' sums only grow, so that two readings tell what happened between them. Unlike `/metrics` it says where
weights live. Has no path of this machine in it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from rabbitllm.engine.tier_picture import places


def status_of(batch: Any, model: Any, name: str | None = None) -> dict[str, Any]:
    """What `/status` answers.

    Args:
        batch: a `rabbitllm.generation.batch.Batch`.
        model: that it answers with.
        name: of the model, for people; None for the last part of its folder.

    Returns:
        The fields of `rabbitllm.generation.request.Facts` (seconds, bytes and counts since the server began); `model`;
        and `placement` with, in bytes, what each pass reads from the disk (`streamed_bytes`) and copies to devices
        (`uploaded_bytes`), and what is where: `places`, place -> words -> bytes.
    """
    placement = model.placement
    return {
        "model": name if name is not None else _last_part(str(model.name_or_path)),
        **asdict(batch.facts),
        "placement": {
            "streamed_bytes": placement.streamed_bytes,
            "uploaded_bytes": placement.uploaded_bytes,
            "places": places(placement),
        },
    }


def _last_part(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _answer(request: Request) -> Response:
    state = request.app.state
    found = status_of(state.batch, state.model, state.settings.name)
    return JSONResponse(found, headers={"cache-control": "no-store"})


router = APIRouter()
router.add_api_route("/status", _answer, methods=["GET"])
"""Of an application whose state has `batch`, `model` and `settings`."""
