"""A model over three hosts, none of which could keep it: what callers do with it, and what goes wrong."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rabbitllm.base.options import Hosts
from rabbitllm.engine.placement import READY, Tier
from rabbitllm.errors import ForkedError, HostGoneError, HostsError, OptionError
from rabbitllm.generation.batch import Batch
from rabbitllm.pipeline.stack import Span
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
    with spread(split(folder), [whole_bytes // 2] * 3) as found:
        yield found


@pytest.fixture
def model(spread_model: tuple[Any, Crew]) -> Any:
    return spread_model[0]


def same(got: Any, expected: Any) -> bool:
    return torch.equal(got, expected)


def test_none_could_keep_the_model_and_all_of_it_stays(spread_model: tuple[Any, Crew], whole_bytes: int) -> None:
    model, crew = spread_model
    placements = [model.placement, *(worker.model.placement for worker in crew.workers)]
    units = [{p.unit for p in placement.units if p.tier in READY} for placement in placements]
    assert sum(map(len, units)) == len(set().union(*units)) == len(model.placement.units)
    assert all(p.tier in (*READY, Tier.ELSEWHERE) for placement in placements for p in placement.units)
    for placement in placements:
        here = sum(p.stored for p in placement.units if p.tier in READY)
        assert 0 < here < whole_bytes
    assert model.hosts.spans[0].begin == 0
    assert model.hosts.spans[-1].end == LAYERS
    assert "on another host" in str(model.placement)


def test_logits_have_the_bits_of_transformers(model: Any, plain: Any) -> None:
    with torch.inference_mode():
        for given in ({"input_ids": INPUT}, PADDED, {"input_ids": INPUT, "logits_to_keep": 2}):
            assert same(model(**given).logits, plain(**given).logits)
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
    "no cache": ({"input_ids": INPUT}, {"max_new_tokens": 4, "use_cache": False}),
}


@pytest.mark.parametrize("way", WAYS)
def test_generated_tokens_are_those_of_transformers(model: Any, plain: Any, way: str) -> None:
    """Past the sliding window, too; chance is the first process's alone."""
    given, how = WAYS[way]
    found = []
    for one in (model, plain):
        torch.manual_seed(0)
        found.append(one.generate(**given, **{"do_sample": False, **how}))
    assert same(*found)


def test_a_cache_is_the_callers(model: Any, plain: Any) -> None:
    """Filled, copied, cut and gone on with; both copies go on by themselves."""
    found = []
    for one in (model, plain):
        with torch.inference_mode():
            cache = DynamicCache(config=one.config)
            one(INPUT[:, :6], past_key_values=cache)
            twin = copy.deepcopy(cache)
            cache.crop(-2)
            steps = [one(INPUT[:, 4:7], past_key_values=cache).logits, one(INPUT[:, 6:8], past_key_values=twin).logits]
            twin.batch_repeat_interleave(2)
            twin.batch_select_indices(torch.tensor([1]))
            steps.append(one(INPUT[:, 8:], past_key_values=twin).logits)
            cache.reset()
            steps.append(one(INPUT, past_key_values=cache).logits)
            found.append((*steps, cache.get_seq_length(), twin.get_seq_length()))
    for got, expected in zip(*found, strict=True):
        assert same(got, expected) if isinstance(got, torch.Tensor) else got == expected


def test_layers_that_a_caller_cuts_himself_are_cut_everywhere(model: Any, plain: Any) -> None:
    """As rabbitllm.chat does. In a window that is full nothing can be cut, and that is said."""
    with torch.inference_mode():
        found = []
        for one in (model, plain):
            cache = one(INPUT[:, :6]).past_key_values
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[..., :3, :], layer.values[..., :3, :]
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = 3
            found.append(one(INPUT[:, 3:7], past_key_values=cache).logits)
        assert same(*found)
        cache = model(INPUT).past_key_values
        for layer in cache.layers[model.hosts.spans[0].end :]:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = 3
        with pytest.raises(HostsError, match="11 tokens here and 3 in the first process"):
            model(INPUT[:, :2], past_key_values=cache)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_leaves_no_host_behind(spread_model: tuple[Any, Crew], plain: Any) -> None:
    """It comes while workers compute; the same cache goes on from where all of them are."""
    model, crew = spread_model
    layer = crew.workers[0].model.model.layers[crew.workers[0].span.begin]
    with torch.inference_mode():
        cache, expected = (one(INPUT[:, :4]).past_key_values for one in (model, plain))

        def interrupt(module: Any, args: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

        hook = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(INPUT[:, 4:6], past_key_values=cache)
        hook.remove()
        plain(INPUT[:, 4:6], past_key_values=expected)
        assert cache.get_seq_length() == expected.get_seq_length()
        found = [one(INPUT[:, 6:], past_key_values=own).logits for one, own in ((model, cache), (plain, expected))]
    assert same(*found)


def test_workers_let_go_of_caches_that_were_garbage_collected(spread_model: tuple[Any, Crew]) -> None:
    model, crew = spread_model
    gc.collect()
    model(INPUT[:, :2], use_cache=False)
    before = [len(worker.caches) for worker in crew.workers]
    cache = model(INPUT).past_key_values
    model(INPUT[:, :2], use_cache=False)
    assert [len(worker.caches) for worker in crew.workers] == [held + 1 for held in before]
    held = sum(layer.keys.nbytes for layer in cache.layers[model.hosts.spans[0].end :])
    assert 0 < held <= INPUT.numel() * (LAYERS - model.hosts.spans[0].end)  # a byte a token
    del cache
    gc.collect()
    model(INPUT[:, :2], use_cache=False)
    assert [len(worker.caches) for worker in crew.workers] == before


def test_a_model_that_is_let_go_is_freed_and_its_worker_ends(folder: Path) -> None:
    hosts = Hosts(HERE, 1, timeout=60, patience=60)
    crew = Crew([split(folder)], hosts, [ALL])
    model = load_part(split(folder), replace(hosts, announce=crew.come))
    model(INPUT)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    crew.join()
    assert not crew.errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_hidden_states": True}, "output_hidden_states requests values of layers"),
        ({"past_key_values": "static"}, "cannot be spread over hosts: StaticCache"),
        ({"past_key_values": "of another model"}, "was not filled by these hosts"),
    ],
)
def test_what_a_call_cannot_have(model: Any, plain: Any, given: dict[str, Any], message: str) -> None:
    from transformers import StaticCache

    if given.get("past_key_values") == "static":
        given = {"past_key_values": StaticCache(config=model.config, max_cache_len=32)}
    elif "past_key_values" in given:
        given = {"past_key_values": plain(INPUT).past_key_values}
    with pytest.raises(HostsError, match=message):
        model(INPUT, **given)
    with torch.inference_mode():
        assert same(model(INPUT).logits, plain(INPUT).logits)


def test_an_error_in_a_worker_is_the_callers_and_the_next_pass_is_sound(
    spread_model: tuple[Any, Crew], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, crew = spread_model
    worker = min(crew.workers, key=lambda one: one.span.begin)  # so that another one has to pass it on
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
def test_what_fits_nowhere_is_streamed_by_who_has_it(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tied=True, dtype=torch.bfloat16)
    directory, plain = split(folder, "4bit" if family == "llama" else None), plain_model(folder)
    alone = load(directory)
    with spread(directory, (1 << 19, 0)) as (model, crew):
        assert any(p.tier is Tier.STREAMED for p in crew.workers[0].model.placement.units)
        with torch.inference_mode():
            assert same(model(INPUT).logits, alone(INPUT).logits)
            if family != "llama":
                assert same(model(INPUT).logits, plain(INPUT).logits)


def test_hosts_with_other_weights_or_options_are_refused_at_once(folder: Path, tmp_path: Path) -> None:
    other = split(gemma(tmp_path / "other", seed=1))
    refusing = pytest.raises(HostsError, match="differs from process 0 in the weights")
    with refusing as refused, spread(split(folder), others=[other]):
        pass
    assert "the same split directory" in refused.value.remedy


def test_a_host_that_cannot_load_its_part_is_heard_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rabbitllm.engine import load as loading

    original = loading.skeleton.read_tokenizer

    def only_once(*args: Any) -> Any:
        monkeypatch.setattr(loading.skeleton, "read_tokenizer", original)
        raise MemoryError("full")

    monkeypatch.setattr(loading.skeleton, "read_tokenizer", only_once)
    with pytest.raises((HostsError, MemoryError), match=r"could not load its part: full|full"), spread(split(folder)):
        pass


def test_no_process_waits_for_ever(folder: Path) -> None:
    directory, begun = split(folder), time.monotonic()
    with pytest.raises(HostGoneError, match="did not connect to"):
        load_part(directory, Hosts("127.0.0.1:0", 1, patience=0.5))
    with pytest.raises(HostGoneError, match="cannot be reached at"):
        load_part(directory, Hosts("127.0.0.1:9", patience=0.5))
    assert time.monotonic() - begun < 60


def test_a_host_that_is_silent_ends_it(folder: Path) -> None:
    with spread(split(folder), timeout=1.0) as (model, crew):
        layer = crew.workers[0].model.model.layers[crew.workers[0].span.begin]
        layer.register_forward_pre_hook(lambda module, args: time.sleep(2.5))
        with pytest.raises(HostGoneError, match=r"process 1 .*has ended or does not answer"):
            model(INPUT)
        with pytest.raises(HostGoneError, match="process 1"):  # and it stays so
            model(INPUT)


def test_spans_are_told(model: Any) -> None:
    assert all(isinstance(span, Span) for span in model.hosts.spans)
    assert [name.split()[:2] for name in model.hosts.names] == [["process", str(rank)] for rank in range(3)]
