"""`rabbitllm pull --ray`: a model made ready by the machines of a cluster, in a folder that they share."""

from __future__ import annotations

from rabbitllm.base.terminal import counted
from rabbitllm.models.pull.make import Pulled, Wish, pull
from rabbitllm.ray.batch import everywhere
from rabbitllm.ray.cluster import connected, say
from rabbitllm.ray.ray_shard_executor import RayShardExecutor


def pull_on(address: str, wish: Wish, at_once: int | None = None) -> Pulled:
    """As `pull`, with shards filled into layer files by a Ray cluster.

    Args:
        address: see `connected`.
        wish: what to get ready, and how.
        at_once: shards in work at a time, at most; None for as many as the machines have processors for.

    Raises:
        ClusterError: nothing answers, or a machine cannot take part; nothing was touched.
        RabbitLLMError: as `pull` does.
    """
    with connected(address) as nodes:
        executor = RayShardExecutor(nodes, at_once, quantizes=wish.compression is not None)
        say(f"{counted(len(nodes), 'machine')}, up to {counted(executor.at_once, 'shard')} at a time")
        return pull(everywhere(wish), executor)
