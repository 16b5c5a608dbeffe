"""The state of the server as numbers for the page: the batch's statistics, and the placement of the weights.

    GET /status  ->  {"model": …, "running": 1, …, "pass_seconds": 61.2, "placement": {"streamed_bytes": …, …}}

All sums only grow, so that two readings give the difference between them. Unlike `/metrics` it includes the
placement of weights. Contains no path of this machine.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from rabbitllm.engine.tier_picture import places


def status_of(batch: Any, model: Any, name: str | None = None) -> dict[str, Any]:
    """The response of `/status`.

    Args:
        batch: a `rabbitllm.generation.batch.Batch`.
        model: the model of the batch.
        name: display name of the model; None for the last part of its folder.

    Returns:
        The fields of `rabbitllm.generation.request.BatchStats` (seconds, bytes and counts since the server began);
        `model`; and `placement` with, in bytes, the reads from disk per pass (`streamed_bytes`), the copies to devices
        per pass (`uploaded_bytes`), and the distribution of the weights: `places`, place -> words -> bytes.
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
"""Router for an application whose state has `batch`, `model` and `settings`."""
