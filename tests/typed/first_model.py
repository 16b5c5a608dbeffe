"""What a type checker says of a user's program. `make lint` checks this file; an error that is gone fails it too."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

from rabbitllm import AutoModel, plan, quality
from rabbitllm.engine.placement import Placement
from rabbitllm.engine.streamed_model import StreamedModel
from rabbitllm.estimate.plan import Plan
from rabbitllm.evaluation.quality import Quality
from rabbitllm.telemetry.profiler import Profiler

model = AutoModel.from_pretrained(Path("folder"), compression="4bit")
assert_type(model, StreamedModel)
assert_type(model.placement, Placement)
assert_type(model.profiler, Profiler)
assert_type(model.profiler.report(), str)
assert_type(plan("folder"), Plan)
assert_type(quality("folder"), Quality)
AutoModel.from_pretrained(pretrained_model_name_or_path="folder")
AutoModel.from_pretrained("folder", compresion="4bit")  # type: ignore[call-arg]
AutoModel.from_pretrained("folder", compression=4)  # type: ignore[arg-type]
