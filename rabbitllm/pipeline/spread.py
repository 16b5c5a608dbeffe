"""Loads this process's part of a model, and waits until all processes have loaded theirs.

Before that it compares the hosts and plans the spans. Every process computes the plan from the same descriptions of all
hosts, so all get the same plan or the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rabbitllm.base.options import Hosts, RunOptions
from rabbitllm.engine.load_plan import ModelPart
from rabbitllm.engine.placement import UnitCost, enclosing, ready_once
from rabbitllm.engine.transformers_api import attention_of
from rabbitllm.engine.units import UnitSource
from rabbitllm.errors import HostsError
from rabbitllm.pipeline._driver import Driver, Worker
from rabbitllm.pipeline._frames import Frame, FrameType
from rabbitllm.pipeline._rendezvous import Link, Rendezvous
from rabbitllm.pipeline._stack import Span, Stack, find_stack, plan_spans
from rabbitllm.store.layer_store import WeightFiles

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

_SAMPLES, _SAMPLE_BYTES = 32, 4096


class Sharing:
    """A `PartChooser` for `load_model`: connects the processes, compares them, and plans the spans.

    Args:
        hosts: address, number and role of the processes.
        options: how the model is run in this process.

    Attributes:
        link: connection to the other processes, after the call.
        stack: the layers that are spread, after the call.
        spans: span of each process, after the call.
    """

    link: Link
    stack: Stack
    spans: tuple[Span, ...]

    def __init__(self, hosts: Hosts, options: RunOptions) -> None:
        self._hosts = hosts
        self._options = options

    def __call__(
        self,
        model: StreamedModel,
        sources: Mapping[str, UnitSource],
        costs: Sequence[UnitCost],
        store: WeightFiles,
        budgets: Mapping[str, int],
    ) -> ModelPart:
        """See `engine.load_plan.PartChooser`."""
        self.stack = find_stack(model, sources)
        rendezvous = Rendezvous(self._hosts)
        limited = set(self._options.max_memory or {})
        description = {
            "host": f"{socket.gethostname()} {_machine_id()}",
            "identity": identity_of(model, store, self._options),
            "budgets": {device: [nbytes, device in limited] for device, nbytes in budgets.items()},
            "fast_bfloat16": self._options.fast_bfloat16,
        }
        hosts = rendezvous.exchange(description)
        check_identities([host["identity"] for host in hosts])
        shares = [_budgets(host, hosts) for host in hosts]
        names = {unit.name for unit in self.stack.units}
        layers = [cost.ready + cost.routed for cost in costs if cost.name in names]
        # of a mapped embedding only the rows of the current tokens are read, which is negligible
        rest = ready_once(cost for cost in costs if cost.name not in names and not (cost.by_rows and cost.is_view))
        self.spans = plan_spans(layers, rest, [sum(share.values()) for share in shares])
        names_of_hosts = [f"process {rank} ({host['host'].split()[0]})" for rank, host in enumerate(hosts)]
        self.link = rendezvous.connect(names_of_hosts)
        span = self.spans[rendezvous.rank]
        part = {unit.name for unit in self.stack.units[span.begin : span.end]}
        layer_of = {name: enclosing(name, names) for name in set(sources) - names}  # a table is in a layer
        part |= {name for name, layer in layer_of.items() if layer in part or (layer is None and rendezvous.rank == 0)}
        # its defaults in Python and of the commands differ, and a worker computes for the first process
        return ModelPart(frozenset(part), shares[rendezvous.rank], hosts[0]["fast_bfloat16"])


def identity_of(model: StreamedModel, store: WeightFiles, options: RunOptions) -> dict[str, str]:
    """Properties that must be equal on all hosts, by names for messages."""
    import torch
    import transformers

    from rabbitllm.version import __version__

    manifest = getattr(store, "manifest", None)
    made_from = None if manifest is None else [manifest.source.name, manifest.source.commit, manifest.compression]
    tensors = sorted(
        (name, [[part.dtype, list(part.shape), part.nbytes] for part in stored.parts])
        for name, stored in store.tensors.items()
    )
    sums: list[Any] = [[record.file, record.size, record.crc32] for record in manifest.layers] if manifest else []
    config = {key: value for key, value in model.config.to_dict().items() if not key.endswith("name_or_path")}
    return {
        "rabbitllm": __version__,
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "the weights": _digest([made_from, tensors, sums or _samples(store)]),
        "config.json": _digest(config),
        "dtype": str(model.dtype),
        "attn_implementation": str(attention_of(model.config)),
        "exact": str(options.exact),
    }


def check_identities(identities: Sequence[Mapping[str, str]]) -> None:
    """Check that all identities are equal.

    Raises:
        HostsError: names the rank and the property that differ.
    """
    first = identities[0]
    for rank, identity in enumerate(identities):
        wrong = [name for name in first if identity.get(name) != first[name]]
        if wrong:
            name = wrong[0]
            raise HostsError(
                f"Process {rank} differs from process 0 in {name}: {identity.get(name)} instead of {first[name]}.",
                "Every host needs the same versions, the same split directory and the same options.",
            )


def _budgets(host: Any, hosts: Sequence[Any]) -> dict[str, int]:
    """Device -> bytes; without a limit by the user, processes on the same device get equal parts of its free memory."""
    budgets = {}
    for device, (nbytes, is_limited) in host["budgets"].items():
        sharers = sum(1 for process in hosts if process["host"] == host["host"] and device in process["budgets"])
        budgets[device] = int(nbytes) if is_limited else int(nbytes) // sharers
    return budgets


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _samples(store: WeightFiles) -> list[str]:
    """Digests of the first bytes of some tensors, used if no manifest has checksums."""
    names = sorted(store.tensors)
    parts = [store.tensors[name].parts[0] for name in names[:: len(names) // _SAMPLES + 1]]
    return [hashlib.sha256(store.mapped(part.file).bytes_of(part)[:_SAMPLE_BYTES]).hexdigest() for part in parts]


def _machine_id() -> str:
    """An identifier that distinguishes machines of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def load_spread(hosts: Hosts, options: RunOptions, load: Callable[[Sharing], StreamedModel]) -> Any:
    """Load a model that is spread over hosts.

    Args:
        hosts: address, number and role of the processes.
        options: how the model is run in this process.
        load: loads the part that the given `Sharing` chooses.

    Returns:
        In the first process the model, with its `hosts`; in the others a `Worker`.

    Raises:
        HostsError: the hosts cannot compute this model together.
        RabbitLLMError: as `load_model` does; it is reported to the other processes.
    """
    sharing = Sharing(hosts, options)
    try:
        model = load(sharing)
    except BaseException as error:
        if hasattr(sharing, "link"):  # the others wait for this process
            with contextlib.suppress(HostsError):
                _report_load(sharing.link, f"{sharing.link.names[sharing.link.rank]} could not load its part: {error}")
        raise
    failed = _report_load(sharing.link, None)
    if failed is not None:
        raise HostsError(f"A host failed to load its layers: {failed}", "Fix this, then start all processes again.")
    if sharing.link.rank:
        return Worker(model, sharing.stack, sharing.spans, sharing.link)
    model.hosts = Driver(model, sharing.stack, sharing.spans, sharing.link)
    return model


def _report_load(link: Link, failure: str | None) -> str | None:
    """Report the failure of this process, if any; returns the first failure of all processes, or None."""
    if link.rank:
        link.send(0, Frame(FrameType.READY, content=failure))
        reason = link.receive(0).content
        return None if reason is None else str(reason)
    failures = [failure, *(link.receive(rank).content for rank in range(1, link.ranks))]
    first = next((str(text) for text in failures if text is not None), None)
    for rank in range(1, link.ranks):
        link.send(rank, Frame(FrameType.BEGIN, content=first))
    return first
