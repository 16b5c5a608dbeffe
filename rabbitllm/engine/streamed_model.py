"""What a streamed model answers differently from an ordinary one, without ceasing to be one.

The model keeps its class's name and module, its config and its `forward`; it only says where it computes, and explains
why it cannot be moved or cast.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

# imported at run time too: transformers resolves the annotations of a model class when the class is made
import torch
from transformers import PreTrainedModel

from rabbitllm.engine.expert_use import read_uses, write_uses
from rabbitllm.engine.pass_entry import entry_of
from rabbitllm.engine.placement import Placement
from rabbitllm.engine.streamer import Streamer
from rabbitllm.errors import RabbitLLMError
from rabbitllm.profiler import Profiler

logger = logging.getLogger(__name__)


class StreamedModel:
    """Mixed in before the model's own class.

    Attributes:
        tokenizer: the checkpoint's, or None.
        profiler: where the time of each layer goes, with `profiling_mode=True`.
        placement: which unit lives where; prints as a table.
        streamer: the machinery.
        unused_tensors: stored tensors that the model class ignores; they are never read.
    """

    tokenizer: Any
    profiler: Profiler
    placement: Placement
    streamer: Streamer
    unused_tensors: tuple[str, ...]
    _compute_device: torch.device
    _all_resident: bool
    _turn: AbstractContextManager[Any]

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self._compute_device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A pass. Unless every unit is resident it is without gradients, which would keep every layer's weights.

        Nor can two threads share one: a layer's weights are there for the pass that computes it. They take turns.
        """
        if self._all_resident:
            return self._pass(*args, **kwargs)
        with self._turn, torch.no_grad():
            return self._pass(*args, **kwargs)

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        if not self.profiler.enabled:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with self.profiler.forward(*entry_of(args, kwargs)):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Whether `generate` compiles, as it does by itself on a GPU with a static cache.

        Not where weights come and go: what is compiled, or captured as a graph, would use those of another pass.
        """
        return super()._valid_auto_compile_criteria(*args, **kwargs) and self._all_resident  # type: ignore[misc]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model as it is: where its weights live was decided when it was loaded."""
        wanted = [value for value in (*args, *kwargs.values()) if value is not None and not isinstance(value, bool)]
        device, dtype = self._compute_device, str(self.dtype)  # type: ignore[attr-defined]
        as_it_is = {str(device), dtype, dtype.removeprefix("torch.")} | ({device.type} if not device.index else set())
        if not {str(value) for value in wanted} <= as_it_is:
            logger.warning(
                "model.to(%s) has no effect: device, dtype and max_memory of from_pretrained placed the weights.",
                ", ".join(map(str, wanted)),
            )
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """See `to`."""
        return self.to("cuda")

    def cpu(self) -> Any:
        """See `to`."""
        return self.to("cpu")

    def half(self, *args: Any) -> Any:
        """See `to`."""
        return self.to("float16")

    def float(self, *args: Any) -> Any:
        """See `to`."""
        return self.to("float32")

    def bfloat16(self, *args: Any) -> Any:
        """See `to`."""
        return self.to("bfloat16")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: the weights are not all in memory.

        Raises:
            RabbitLLMError: always.
        """
        raise RabbitLLMError(
            "A streamed model does not hold its weights, so it cannot save them.",
            "The split directory is itself a copy that loads alone; copy that folder.",
        )

    def save_expert_use(self, path: str | Path) -> None:
        """Write down which experts are used how often, for `load_expert_use` of a later process.

        Of a model all of whose experts are in memory there is nothing to write.

        Raises:
            OSError: the file cannot be written.
        """
        pools = self.streamer.pools.values()
        write_uses(Path(path), {name: uses for pool in pools for name, uses in pool.uses().items()})

    def load_expert_use(self, path: str | Path) -> None:
        """Bring the experts that were used most, by a file of `save_expert_use`, as far as there is memory for them.

        Raises:
            OptionError: the file was written for another model.
            CorruptShardError, OSError: it cannot be read.
        """
        with self._turn:
            for pool in self.streamer.pools.values():
                pool.warm(read_uses(Path(path), pool.sources))

    def print_profile_summary(self) -> None:
        """Print where the time went."""
        print(self.profiler.report())


def adopt(model: PreTrainedModel, device: torch.device, placement: Placement) -> Any:
    """Give a model the answers of `StreamedModel`; pipelines and servers still see its own class name and module."""
    own = type(model)
    body = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    model.__class__ = type(own.__name__, (StreamedModel, own), body)
    streamed: Any = model
    streamed._compute_device = device
    streamed.placement = placement
    streamed._all_resident = placement.is_resident
    streamed._turn = threading.RLock()
    # transformers reads it: pipelines leave the model where it is, and of a static cache each layer's part is made
    # where that layer computes, unless the map has one device only
    where = {placed.unit: placed.device for placed in placement.units}
    streamed.hf_device_map = where if len(set(where.values())) > 1 else {"": str(device)}
    return streamed
