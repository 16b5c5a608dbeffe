"""`rabbitllm pull --ray`: a model prepared by the machines of a cluster, in a shared folder."""

from __future__ import annotations

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.terminal import counted
from rabbitllm.models.pull import Pulled, pull
from rabbitllm.ray.batch import everywhere
from rabbitllm.ray.cluster import connected, say
from rabbitllm.ray.ray_shard_executor import RayShardExecutor


def pull_on(address: str, request: LoadRequest, at_once: int | None = None) -> Pulled:
    """Like `pull`, but a Ray cluster fills the layer files.

    Args:
        address: see `connected`.
        request: the model and its split.
        at_once: limit of shards in work at a time; None for as many as the processors of the machines allow.

    Raises:
        ClusterError: the cluster does not answer, or a machine cannot take part; nothing was changed.
        RabbitLLMError: see `pull`.
    """
    with connected(address) as nodes:
        executor = RayShardExecutor(nodes, at_once, quantizes=request.spec.compression is not None)
        say(f"{counted(len(nodes), 'machine')}, up to {counted(executor.at_once, 'shard')} at a time")
        return pull(everywhere(request), executor)
