"""A model over three hosts, none of which could keep it: what callers do with it, and what goes wrong."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rabbitllm.base.forks import DaemonThread, fulfil
from rabbitllm.base.options import Hosts
from rabbitllm.engine.placement import READY, Tier
from rabbitllm.errors import ForkedError, HostGoneError, HostsError, OptionError
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.draft import Drafting
from rabbitllm.pipeline import _driver
from rabbitllm.pipeline._stack import Span
from tests.support.builders import build_checkpoint
from tests.support.forked import in_a_fork
from tests.support.spread_models import HERE, Crew, load_part, spread
from tests.support.tiny_models import ALL, INPUT, load, plain_model, split

PADDED = {
    "input_ids": torch.tensor([[0, 0, 0, 40, 81, 7], [5, 92, 11, 64, 33, 8]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}
LAYERS = 6


def gemma(folder: Path, seed: int = 0) -> Path:
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return build_checkpoint(folder, "gemma3", num_hidden_layers=LAYERS, layer_types=kinds, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma3: some layers have a sliding window, so two kinds of masks and of caches."""
    return gemma(tmp_path_factory.mktemp("spread") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return plain_model(folder)


@pytest.fixture(scope="module")
def whole_bytes(folder: Path) -> int:
    placement = load(split(folder)).placement
    return sum(placed.stored for placed in placement.units)


@pytest.fixture(scope="module")
def spread_model(folder: Path, whole_bytes: int) -> Iterator[tuple[Any, Crew]]:
    with spread(split(folder), [whole_bytes // 2] * 3) as pair:
        yield pair


@pytest.fixture
def model(spread_model: tuple[Any, Crew]) -> Any:
    return spread_model[0]


def same(actual: Any, expected: Any) -> bool:
    return torch.equal(actual, expected)


def test_model_larger_than_one_host_is_resident(spread_model: tuple[Any, Crew], whole_bytes: int) -> None:
    model, crew = spread_model
    placements = [model.placement, *(worker.model.placement for worker in crew.workers)]
    units = [{p.unit for p in placement.units if p.tier in READY} for placement in placements]
    assert sum(map(len, units)) == len(set().union(*units)) == len(model.placement.units)
    assert all(p.tier in (*READY, Tier.ELSEWHERE) for placement in placements for p in placement.units)
    for placement in placements:
        nbytes = sum(p.stored for p in placement.units if p.tier in READY)
        assert 0 < nbytes < whole_bytes
    assert model.hosts.spans[0].begin == 0
    assert model.hosts.spans[-1].end == LAYERS
    assert "on another host" in str(model.placement)


def test_logits_are_bit_equal_to_transformers(model: Any, plain: Any) -> None:
    with torch.inference_mode():
        for inputs in ({"input_ids": INPUT}, PADDED, {"input_ids": INPUT, "logits_to_keep": 2}):
            assert same(model(**inputs).logits, plain(**inputs).logits)
        assert same(model(INPUT, use_cache=False).logits, plain(INPUT, use_cache=False).logits)
        embeds = plain.get_input_embeddings()(INPUT)
        assert same(model(inputs_embeds=embeds).logits, plain(inputs_embeds=embeds).logits)
        base = model.model(**PADDED).last_hidden_state
        assert same(base, plain.model(**PADDED).last_hidden_state)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one text": ({"input_ids": INPUT}, {"max_new_tokens": 50}),
    "a padded batch": (PADDED, {"max_new_tokens": 50}),
    "beams": (PADDED, {"max_new_tokens": 12, "num_beams": 3}),
    "several answers": (PADDED, {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 2}),
    "prompt lookup": ({"input_ids": INPUT.repeat(1, 3)}, {"max_new_tokens": 24, "prompt_lookup_num_tokens": 3}),
    "draft": ({"input_ids": INPUT.repeat(1, 3)}, {"max_new_tokens": 24, "custom_generate": Drafting("ngram")}),
    "no cache": ({"input_ids": INPUT}, {"max_new_tokens": 4, "use_cache": False}),
}


@pytest.mark.parametrize("way", WAYS)
def test_generated_tokens_equal_transformers(model: Any, plain: Any, way: str) -> None:
    """Past the sliding window, too; chance is the first process's alone. Our drafts are for streamed models; the greedy
    answer is the same without."""
    inputs, options = WAYS[way]
    without = {name: value for name, value in options.items() if name != "custom_generate"}
    outputs = []
    for m, own in ((model, options), (plain, without)):
        torch.manual_seed(0)
        outputs.append(m.generate(**inputs, **{"do_sample": False, **own}))
    assert same(*outputs)


def test_cache_operations_equal_transformers(model: Any, plain: Any) -> None:
    """Filled, copied, cut and gone on with; both copies go on by themselves."""
    outputs = []
    for m in (model, plain):
        with torch.inference_mode():
            cache = DynamicCache(config=m.config)
            m(INPUT[:, :6], past_key_values=cache)
            twin = copy.deepcopy(cache)
            cache.crop(-2)
            steps = [m(INPUT[:, 4:7], past_key_values=cache).logits, m(INPUT[:, 6:8], past_key_values=twin).logits]
            twin.batch_repeat_interleave(2)
            twin.batch_select_indices(torch.tensor([1]))
            steps.append(m(INPUT[:, 8:], past_key_values=twin).logits)
            cache.reset()
            steps.append(m(INPUT, past_key_values=cache).logits)
            outputs.append((*steps, cache.get_seq_length(), twin.get_seq_length()))
    for actual, expected in zip(*outputs, strict=True):
        assert same(actual, expected) if isinstance(actual, torch.Tensor) else actual == expected


def test_directly_cut_layers_are_cut_on_workers(model: Any, plain: Any) -> None:
    """As rabbitllm.chat does. In a window that is full nothing can be cut, and that is said."""
    with torch.inference_mode():
        logits = []
        for m in (model, plain):
            cache = m(INPUT[:, :6]).past_key_values
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[..., :3, :], layer.values[..., :3, :]
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = 3
            logits.append(m(INPUT[:, 3:7], past_key_values=cache).logits)
        assert same(*logits)
        cache = model(INPUT).past_key_values
        for layer in cache.layers[model.hosts.spans[0].end :]:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = 3
        with pytest.raises(HostsError, match="11 tokens here and 3 in the first process"):
            model(INPUT[:, :2], past_key_values=cache)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interrupted_pass_completes_on_all_hosts(spread_model: tuple[Any, Crew], plain: Any) -> None:
    """It comes while workers compute; the same cache goes on from where all of them are."""
    model, crew = spread_model
    layer = crew.workers[0].model.model.layers[crew.workers[0].span.begin]
    with torch.inference_mode():
        cache, expected = (m(INPUT[:, :4]).past_key_values for m in (model, plain))

        def interrupt(module: Any, args: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

        hook = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(INPUT[:, 4:6], past_key_values=cache)
        hook.remove()
        plain(INPUT[:, 4:6], past_key_values=expected)
        assert cache.get_seq_length() == expected.get_seq_length()
        logits = [m(INPUT[:, 6:], past_key_values=past).logits for m, past in ((model, cache), (plain, expected))]
    assert same(*logits)


def test_workers_drop_garbage_collected_caches(spread_model: tuple[Any, Crew]) -> None:
    model, crew = spread_model
    gc.collect()
    model(INPUT[:, :2], use_cache=False)
    before = [len(worker.caches) for worker in crew.workers]
    cache = model(INPUT).past_key_values
    model(INPUT[:, :2], use_cache=False)
    assert [len(worker.caches) for worker in crew.workers] == [count + 1 for count in before]
    nbytes = sum(layer.keys.nbytes for layer in cache.layers[model.hosts.spans[0].end :])
    assert 0 < nbytes <= INPUT.numel() * (LAYERS - model.hosts.spans[0].end)  # a byte a token
    del cache
    gc.collect()
    model(INPUT[:, :2], use_cache=False)
    assert [len(worker.caches) for worker in crew.workers] == before


def test_garbage_collected_model_ends_its_workers(folder: Path) -> None:
    hosts = Hosts(HERE, 1, timeout=600, patience=600)
    crew = Crew([split(folder)], hosts, [ALL])
    model = load_part(split(folder), replace(hosts, announce=crew.come))
    model(INPUT)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    crew.join()
    assert not crew.errors


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"output_hidden_states": True}, "output_hidden_states requests values of layers"),
        ({"past_key_values": "static"}, "cannot be spread over hosts: StaticCache"),
        ({"past_key_values": "of another model"}, "was not filled by these hosts"),
    ],
)
def test_unsupported_arguments_are_refused(model: Any, plain: Any, inputs: dict[str, Any], message: str) -> None:
    from transformers import StaticCache

    if inputs.get("past_key_values") == "static":
        inputs = {"past_key_values": StaticCache(config=model.config, max_cache_len=32)}
    elif "past_key_values" in inputs:
        inputs = {"past_key_values": plain(INPUT).past_key_values}
    with pytest.raises(HostsError, match=message):
        model(INPUT, **inputs)
    with torch.inference_mode():
        assert same(model(INPUT).logits, plain(INPUT).logits)


def test_worker_error_is_raised_and_the_next_pass_works(
    spread_model: tuple[Any, Crew], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, crew = spread_model
    worker = min(crew.workers, key=lambda worker: worker.span.begin)  # so that another one has to pass it on
    layer = worker.model.model.layers[worker.span.begin]

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room for the hare")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        with pytest.raises(HostsError, match=r"process 1 .*could not compute its layers: MemoryError: no room"):
            model(INPUT)
    with torch.inference_mode():
        assert same(model(INPUT).logits, plain(INPUT).logits)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_refused(model: Any, plain: Any) -> None:
    with pytest.raises(ForkedError, match="A model whose layers are on several hosts belongs to process"):
        in_a_fork(lambda: model(INPUT).logits.tolist())
    assert same(model(INPUT).logits, plain(INPUT).logits)


def test_a_batch_of_requests_is_refused(model: Any) -> None:
    with pytest.raises(OptionError, match="layers are on other hosts"):
        Batch(model)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "qwen3_moe"])
def test_layers_beyond_memory_are_streamed_by_their_host(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tied=True, dtype=torch.bfloat16)
    directory, plain = split(folder, "4bit" if family == "llama" else None), plain_model(folder)
    alone = load(directory)
    with spread(directory, (1 << 19, 0)) as (model, crew):
        assert any(p.tier is Tier.STREAMED for p in crew.workers[0].model.placement.units)
        with torch.inference_mode():
            assert same(model(INPUT).logits, alone(INPUT).logits)
            if family != "llama":
                assert same(model(INPUT).logits, plain(INPUT).logits)


def test_different_weights_or_options_are_refused(folder: Path, tmp_path: Path) -> None:
    other = split(gemma(tmp_path / "other", seed=1))
    refusing = pytest.raises(HostsError, match="differs from process 0 in the weights")
    with refusing as refused, spread(split(folder), others=[other]):
        pass
    assert "the same split directory" in refused.value.remedy


def test_workers_multiply_bfloat16_as_the_first_process_does(folder: Path) -> None:
    for first, other in ((False, None), (None, False)):
        options = {"exact": False, "fast_bfloat16": first}
        with spread(split(folder), of_workers={"fast_bfloat16": other}, **options) as (_, crew):
            assert crew.workers[0].model._internals.options.fast_bfloat16 is first


def test_failed_load_of_a_host_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rabbitllm.engine import load as loading

    original = loading.skeleton.read_tokenizer

    def only_once(*args: Any) -> Any:
        monkeypatch.setattr(loading.skeleton, "read_tokenizer", original)
        raise MemoryError("full")

    monkeypatch.setattr(loading.skeleton, "read_tokenizer", only_once)
    with pytest.raises((HostsError, MemoryError), match=r"could not load its part: full|full"), spread(split(folder)):
        pass


def test_waiting_for_workers_times_out(folder: Path) -> None:
    directory = split(folder)
    with pytest.raises(HostGoneError, match="did not connect to"):
        load_part(directory, Hosts("127.0.0.1:0", 1, patience=0.5))
    with pytest.raises(HostGoneError, match="cannot be reached at"):
        load_part(directory, Hosts("127.0.0.1:9", patience=0.5))


def test_silent_host_ends_the_run(folder: Path) -> None:
    answers = threading.Event()
    with spread(split(folder), timeout=10.0) as (model, crew):  # a load takes less
        layer = crew.workers[0].model.model.layers[crew.workers[0].span.begin]
        layer.register_forward_pre_hook(lambda module, args: answers.wait(600) and None)
        with pytest.raises(HostGoneError, match=r"process 1 .*has ended or does not answer"):
            model(INPUT)
        with pytest.raises(HostGoneError, match="process 1"):  # and it stays so
            model(INPUT)
        answers.set()


def test_a_pass_after_the_end_of_the_hosts_is_refused(folder: Path) -> None:
    with spread(split(folder)) as (model, _):
        model.hosts.close()
        answer: Future[Any] = Future()
        DaemonThread(fulfil, "pass", answer, lambda: model(INPUT)).start()
        with pytest.raises(HostGoneError, match="were told to end"):
            answer.result(240)


def test_a_heartbeat_that_fails_leaves_passes_possible(
    folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(channel: Any) -> None:
        failed.set()
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(_driver, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(_driver._HostChannel, "_send_heartbeats", fail)
    with spread(split(folder)) as (model, _), torch.inference_mode():
        assert failed.wait(600)
        answer: Future[Any] = Future()
        DaemonThread(fulfil, "pass", answer, lambda: model(INPUT).logits).start()
        assert same(answer.result(240), plain(INPUT).logits)


def test_model_has_spans_and_names(model: Any) -> None:
    assert all(isinstance(span, Span) for span in model.hosts.spans)
    assert [name.split()[:2] for name in model.hosts.names] == [["process", str(rank)] for rank in range(3)]
