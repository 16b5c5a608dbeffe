"""Answers that follow a grammar do so whatever the model, and forced tokens save passes without another answer."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rabbitllm.errors import MissingPackageError, OptionError
from rabbitllm.generation import _scheduler
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.draft import NGRAM, prepare_draft
from rabbitllm.generation.grammar import Grammar, GrammarState
from rabbitllm.generation.kv_cache import cost_by_config
from rabbitllm.generation.reasoning import AnswerFormat, Thoughts
from rabbitllm.generation.request import BatchStats, FinishReason, Limits, Request, Sampling
from rabbitllm.generation.session import answer
from tests.generation.submitting import Submitted, answered_together, prompt
from tests.support.builders import FAMILIES, build_checkpoint, make_tokenizer
from tests.support.draws import draws
from tests.support.hybrid_families import HYBRIDS
from tests.support.schemas import check, public_schemas, schema_of
from tests.support.tiny_models import ALL, load, split

TOKENS = 900
NONE, LOOKUP = Limits(draft="none", running=32), Limits(draft="ngram", running=32)
PERSON: Any = {
    "type": "object",
    "properties": {"first name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["first name", "age"],
    "additionalProperties": False,
}
Ask = Callable[..., tuple[list[Submitted], BatchStats]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("grammar") / "llama"
    return split(build_checkpoint(checkpoint, "llama", dtype=torch.float32, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder, 60_000, dtype="float32", exact=False)


@pytest.fixture(scope="module")
def ask(model: Any) -> Ask:
    def run(requests: Sequence[Request], limits: Limits = NONE, on: Any = None) -> tuple[list[Submitted], BatchStats]:
        with Batch(on or model, limits) as batch:
            answers = answered_together(batch, requests)
            return answers, batch.stats

    return run


def request(schema: Any, seed: int, **options: Any) -> Request:
    sampling = Sampling(temperature=1.5, seed=seed)
    return Request(prompt(7, seed), TOKENS, sampling, grammar=Grammar.of_schema(schema), **options)


def tokens_of(answers: Sequence[Submitted]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def test_every_answer_fits_its_schema(ask: Ask) -> None:
    schemas = [schema_of(seed) for seed in range(draws(20))]
    answers, stats = ask([request(schema, seed) for seed, schema in enumerate(schemas)])
    for answered, schema in zip(answers, schemas, strict=True):
        assert answered.finished.finish is FinishReason.STOP
        check(schema, json.loads(answered.text))
    assert stats.forced_tokens > stats.new_tokens / 2


def drawn(grammar: Grammar, seed: int, tokenizer: Any, most: int = TOKENS) -> str:
    """An answer without a model, from logits that are drawn."""
    state, generator, ids = grammar.state(fake(tokenizer)), torch.Generator().manual_seed(seed), [7]
    while len(ids) < most and not state.ends(forced := state.forced(ids)):
        ids += forced
        scores = state(torch.tensor([ids]), torch.randn((1, len(tokenizer)), generator=generator))
        ids.append(int(scores.softmax(-1)[0].multinomial(1, generator=generator)))
        if state.ends(ids):
            break
    return str(tokenizer.decode([*ids, *state.forced(ids)][1:], skip_special_tokens=True))


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(1000), marks=pytest.mark.long)])
def test_every_drawn_answer_fits_its_schema(seeds: range) -> None:
    tokenizer = make_tokenizer()
    for seed in seeds:
        schema = schema_of(seed)
        check(schema, json.loads(drawn(Grammar.of_schema(schema), seed, tokenizer)))


@pytest.mark.long
def test_every_answer_fits_a_public_schema(ask: Ask) -> None:
    """Unless its schema is refused, or it is cut; closing marks are likelier, since texts have no longest length."""
    tokenizer, schemas, refusals = make_tokenizer(), [], []
    for schema in public_schemas(40, 1):
        try:
            Grammar.of_schema(schema).check(tokenizer)
            schemas.append(schema)
        except OptionError as refusal:
            refusals.append(refusal.problem)
    assert all("cannot be used" in refusal for refusal in refusals)
    bias = tuple((int(token), 3.0) for token in tokenizer('"}],', add_special_tokens=False)["input_ids"])
    requests = [request(schema, seed) for seed, schema in enumerate(schemas)]
    requests = [
        replace(each, max_new_tokens=300, sampling=replace(each.sampling, logit_bias=bias)) for each in requests
    ]
    answers, _ = ask(requests, Limits(draft="none", running=32, waiting=len(schemas), cache_bytes=1 << 28))
    whole = [answer.finished.finish is FinishReason.STOP for answer in answers]
    assert sum(whole) > 25
    for answered, schema, ended in zip(answers, schemas, whole, strict=True):
        if ended:
            check(schema, json.loads(answered.text))


@pytest.mark.parametrize("limits", [NONE, LOOKUP])
def test_forced_tokens_save_passes_and_change_nothing(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    schema = {**PERSON, "properties": {**PERSON["properties"], "tags": {"type": "array", "items": {"maxLength": 3}}}}
    requests = [
        request(PERSON, 1),
        request(schema, 2),
        request(PERSON, 3, stop=('":',)),
        request({"const": [1, "x"]}, 4),
    ]
    answers, stats = ask(requests, limits)
    monkeypatch.setattr(_scheduler, "can_go_back", lambda model: False)
    without, plain = ask(requests)
    assert tokens_of(answers) == tokens_of(without)
    assert [answered.text for answered in answers] == [answered.text for answered in without]
    assert 2 * stats.passes < plain.passes
    assert answers[2].text == '{"first name'
    # the whole answer was forced: its first token took a pass, the others and the end none
    assert answers[3].text == '[1, "x"]'
    assert answers[3].finished.forced_tokens == len(answers[3].tokens) - 1


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_windows_and_states_follow_grammars(ask: Ask, tmp_path: Path, family: str) -> None:
    model = load(split(build_checkpoint(tmp_path, {**FAMILIES, **HYBRIDS}[family])), 60_000, exact=False)
    requests = [
        Request(prompt(40, seed), 90, Sampling(1.5, seed=seed), grammar=Grammar.of_schema(PERSON)) for seed in (1, 2)
    ]
    answers, _ = ask(requests, on=model)
    for asked, answered in zip(requests, answers, strict=True):
        check(PERSON, json.loads(answered.text))
        alone = answer(model, asked, lambda text: None)
        assert alone.text == answered.text
        assert alone.forced_tokens > 20


@pytest.mark.parametrize("draft", [None, NGRAM, "model"])
def test_alone_an_answer_is_that_of_generate(folder: Path, tmp_path: Path, draft: Any) -> None:
    """Of transformers with the state as a processor, one token a pass."""
    model = load(folder, 60_000, dtype="float32", exact=False, profiling=True)
    if draft == "model":
        draft = load(split(build_checkpoint(tmp_path, "llama", seed=1)), ALL, exact=False)
        prepare_draft(model, draft)
    asked = Request(prompt(9, 3), 200, Sampling(0), grammar=Grammar.of_schema(schema_of(5)))
    ids = torch.tensor([asked.prompt])
    assert asked.grammar is not None
    state = asked.grammar.state(model)
    options: Any = {"logits_processor": [state], "max_new_tokens": 200, "do_sample": False}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 9:].tolist()
    model.profiler.clear()
    result = answer(model, asked, lambda text: None, draft=draft)
    assert list(result.tokens) == plain
    check(schema_of(5), json.loads(result.text))
    assert result.work.passes <= len(plain) - result.forced_tokens
    assert result.forced_tokens > len(plain) / 3


def test_a_draft_model_is_held_to_the_grammar(ask: Ask, folder: Path, tmp_path: Path) -> None:
    draft = load(split(build_checkpoint(tmp_path, "llama", seed=1, max_position_embeddings=2048)), ALL, exact=False)
    requests = [request(schema_of(seed), seed) for seed in range(4)]
    answers, _ = ask(requests, Limits(draft=draft), load(folder, 0, dtype="float32", exact=False))
    assert tokens_of(answers) == tokens_of(ask(requests)[0])


def test_preempted_answers_go_on_in_their_grammar(model: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitllm.generation._sequence.RESERVED_TOKENS", 4)
    requests = [request(PERSON, seed) for seed in range(6)]
    expected, roomy = ask(requests)
    room = cost_by_config(model.config, torch.float32).bytes_for(120)
    answers, stats = ask(requests, Limits(draft="none", cache_bytes=room))
    assert stats.preempted > roomy.preempted == 0
    assert tokens_of(answers) == tokens_of(expected)
    assert stats.forced_tokens > roomy.forced_tokens / 2


def test_probabilities_are_the_models_own(ask: Ask) -> None:
    answers, _ = ask([request(PERSON, 1, top_logprobs=1), request(PERSON, 1)])
    first, second = answers
    assert first.tokens == second.tokens
    assert all(chosen.logprob is not None and chosen.logprob < -0.01 for chosen in first.chosen)
    assert any(chosen.top_logprobs[0].token != chosen.token for chosen in first.chosen)


def test_an_answer_that_is_too_long_is_cut(ask: Ask) -> None:
    asked = Request(prompt(5, 1), 11, Sampling(1.5, seed=1), grammar=Grammar.of_schema(PERSON))
    (answered,), _ = ask([asked])
    assert answered.finished.finish is FinishReason.LENGTH
    assert len(answered.tokens) == 11
    assert '{"first name": "'.startswith(answered.text)


def test_masks_are_made_in_their_thread(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[str]()
    plain = GrammarState._mask

    def mask(state: GrammarState) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return plain(state)

    monkeypatch.setattr(GrammarState, "_mask", mask)
    ask([request(PERSON, 1)])
    assert threads == {"rabbitllm-grammar_0"}


def fake(tokenizer: Any) -> Any:
    """What a state needs of a model."""
    return SimpleNamespace(tokenizer=tokenizer, can_generate=lambda: False)


def test_a_penalty_never_excludes_all_that_may_follow() -> None:
    state = Grammar.of_choice(["a", "b"]).state(fake(make_tokenizer()))
    allowed = state(torch.tensor([[5, 6]]), torch.full((1, 300), -torch.inf))
    assert torch.isfinite(allowed).sum() == 2


def follows(grammar: Grammar, text: str, tokenizer: Any) -> bool:
    """Whether a whole answer may be this text."""
    state = grammar.state(fake(tokenizer))
    state.forced([7])
    ids = [7, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    try:
        scores = state(torch.tensor([ids]), torch.zeros(1, len(tokenizer)))
    except OptionError:
        return False
    return bool(torch.isfinite(scores[0, tokenizer.eos_token_id]))


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar.of_schema({"type": "object"}), '{"a": [1, {"b": null}]}', '{"a": 1'),
        (Grammar.of_schema('{"type": "integer"}'), "-17", "1.5"),
        (Grammar.of_schema(True), '"text"', "text"),
        (Grammar.of_regex("a/b+\\d"), "a/bb7", "a/7"),
        (Grammar.of_choice(["yes", "yes, but", 'a "b"\n']), 'a "b"\n', "yes,"),
        (Grammar.of_rules('start: "x" y+\ny: /[0-9]/'), "x12", "x"),
        (Grammar.of_rules('root ::= "x" [0-9]+'), "x12", "x"),
    ],
)
def test_forms_of_grammars(grammar: Grammar, right: str, wrong: str) -> None:
    tokenizer = make_tokenizer()
    assert follows(grammar, right, tokenizer)
    assert not follows(grammar, wrong, tokenizer)


def test_a_state_goes_back_with_the_ids() -> None:
    tokenizer = make_tokenizer()
    state = Grammar.of_choice(["abcd", "abxyz"]).state(fake(tokenizer))

    def forced(text: str) -> str:
        return str(tokenizer.decode(state.forced([7, *tokenizer(text, add_special_tokens=False)["input_ids"]])))

    assert [forced(text) for text in ("", "abc", "abx", "ab", "a", "abcd", "abx")] == [
        *("ab", "d<eos>", "yz<eos>", "", "b", "<eos>", "yz<eos>")
    ]


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_comes_before_the_answer(special: bool) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    form = AnswerFormat.of((), tokenizer)
    yes = Grammar.of_choice(["yes"])
    free = yes.after(Thoughts(form, "user: a\n"), tokenizer)
    for text in ("yes", "<think>no {</think>\n\nyes"):
        assert follows(free, text, tokenizer), text
    for text in ("<think>yes", "no</think>yes", "<think>a</think>b", "<think>a</think>"):
        assert not follows(free, text, tokenizer)
    opened = yes.after(Thoughts(form, "assistant: <think>\n"), tokenizer)
    assert follows(opened, "Hm.</think>yes", tokenizer)
    assert not follows(opened, "yes", tokenizer)
    closed = yes.after(Thoughts(form, "<think>\n\n</think>\n\n"), tokenizer)
    assert follows(closed, "yes", tokenizer)
    assert not follows(closed, "<think></think>yes", tokenizer)


def test_channels_come_before_the_answer() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|end|>"], special_tokens=True)
    thoughts = Thoughts(AnswerFormat.of((), tokenizer), "<|start|>assistant")
    grammar = Grammar.of_choice(["yes"]).after(thoughts, tokenizer)
    final = "<|channel|>final<|message|>yes"
    assert follows(grammar, final, tokenizer)
    assert follows(grammar, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}", tokenizer)
    assert not follows(grammar, "yes", tokenizer)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Grammar.of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.of_schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (lambda: Grammar.of_schema({"format": "iban", "type": "string"}), "iban"),
        (lambda: Grammar.of_schema({"$ref": "#/$defs/none"}), "none"),
        (lambda: Grammar.of_schema({"$ref": "http://example.com/x"}), "example.com"),
        (
            lambda: Grammar.of_schema({"oneOf": [{"minLength": 1}, {"maxLength": 5}]}),
            'two alternatives of the "oneOf" may',
        ),
        (
            lambda: Grammar.of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"minimum": 1}, {}]}}}),
            'the "oneOf" of #/[$]defs/a may fit one value',
        ),
        (lambda: Grammar.of_schema({"enum": [-(1 << 63)]}), "number -9223372036854775808, which has too many digits"),
        (lambda: Grammar.of_schema({"const": {"a": [(1 << 60) + 1]}}), "number 1152921504606846977, which"),
        (
            lambda: Grammar.of_schema({"type": "integer", "exclusiveMinimum": 1 << 63}),
            "number 9223372036854775808, which",
        ),
        (lambda: Grammar.of_schema({"const": float("inf")}), "number inf, which"),
        (lambda: Grammar.of_schema({"enum": [0.5, 0.10805286906483291]}), "number 0.10805286906483291, which"),
        (
            lambda: Grammar.of_schema({"allOf": [{"multipleOf": step} for step in (9.7, 89, 83, 79)]}),
            "56,606,581 remainders; expected at most 100,000",
        ),
        (
            lambda: Grammar.of_schema({"prefixItems": [{"multipleOf": 99_991}, {"multipleOf": 11}]}),
            "100,002 remainders",
        ),
        (lambda: Grammar.of_schema({"multipleOf": True}), "'multipleOf', got true"),
        (lambda: Grammar.of_schema({"const": "\ud83d"}), r"the half letter \\ud83d"),
        (lambda: Grammar.of_regex("\ud83d"), "half letter"),
        (
            lambda: Grammar.of_rules("start: " + " | ".join(f'"x{n}"' for n in range(6000))),
            "too much may follow one letter",
        ),
        (lambda: Grammar.of_schema("{"), "not valid JSON"),
        (lambda: Grammar.of_schema({"const": 10**5000}), "not valid JSON: Exceeds the limit"),
        (lambda: Grammar.of_schema({"default": {1}}), "not valid JSON: Object of type set"),
        (lambda: Grammar.of_schema('{"items":' * 3000 + "{}" + "}" * 3000), "nested too deeply"),
        (lambda: Grammar.of_schema(False), "not an object"),
        (lambda: Grammar.of_regex("(?=a)b"), "look-ahead"),
        (lambda: Grammar.of_rules("start: x"), "unknown name"),
        (lambda: Grammar.of_rules("root ::= ["), "Unexpected end"),
        (lambda: Grammar.of_choice([]), "no texts"),
        (lambda: Grammar.of_rules("start: start"), "leads back to itself, or it is very long"),
        (lambda: Grammar.of_rules('root ::= "a" root'), "Too many items"),
        (lambda: Grammar.of_rules("root ::= " + " | ".join(f'"a{n}"' for n in range(50_000))), "letters; expected"),
        (lambda: Grammar.of_regex("a" * 1_000_000), "1,000,000 letters; expected at most 65,536"),
        (lambda: Grammar.of_schema({"enum": [f"{n:100}" for n in range(100_000)]}), "at most 262,144"),
        (lambda: Grammar.of_rules("start: " + "X? " * 18_000 + '\nX: "x"'), "too big"),
    ],
)
def test_what_cannot_be_guaranteed_is_refused_by_name(make: Callable[[], Grammar], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        make().check(make_tokenizer())


DATE, CLOCK, MOMENT = ({"type": "string", "format": name} for name in ("date", "time", "date-time"))
WHOLE: Any = {"type": "integer"}
NAMED: Any = {"additionalProperties": WHOLE, "propertyNames": {"type": "string", "enum": ["a", "b"]}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (DATE, ("2024-02-29", "2000-02-29", "2021-02-28", "0001-12-31"), ("2021-02-29", "1900-02-29", "0000-01-01")),
        ({**DATE, "allOf": [{"pattern": "^2"}]}, ("2024-02-29",), ("1999-01-01", "2021-02-29")),
        (CLOCK, ("23:59:59Z", "12:00:00.5+01:00"), ("22:59:60Z",)),
        (MOMENT, ("2024-02-29T23:59:59Z",), ("2023-02-29T23:59:59Z", "1998-12-31T23:58:60Z")),
        ({"properties": {"format": {"const": "date"}}}, ({"format": "date"},), ({"format": "time"},)),
        ({**WHOLE, "minimum": -(1 << 63)}, (-5, 12), ()),
        ({**WHOLE, "minimum": 0, "maximum": (1 << 64) - 1}, (0, (1 << 63) - 1024), (-1,)),
        ({"type": "number", "maximum": 1e300}, (10**17, -2.5), ()),
        ({**WHOLE, "minimum": (1 << 53) + 1, "maximum": (1 << 53) + 3}, ((1 << 53) + 2,), (1 << 53, (1 << 53) + 4)),
        ({**WHOLE, "exclusiveMaximum": 10**19}, (5, 10**18), (10**19,)),
        ({**WHOLE, "exclusiveMinimum": 1 << 53}, ((1 << 53) + 8,), (1 << 53,)),
        ({"type": "number", "exclusiveMaximum": 1 << 60}, (10**17,), (1 << 60, (1 << 60) + 1)),
        ({"type": "number", "maximum": 1 << 60}, (10**17,), ((1 << 60) + 1, (1 << 60) + 24)),
        ({"type": "string", "x-meta": {"const": 1 << 70, "multipleOf": 1000003}}, ("a",), (1,)),
        (
            {"properties": {"a": {"$ref": "#/x~1y/b"}}, "x/y": {"b": DATE}},
            ({"a": "2020-02-29"},),
            ({"a": "2021-02-29"},),
        ),
        (
            {"type": "array", "items": {"anyOf": [{"multipleOf": 997}, {"multipleOf": 991}]}},
            ([1994, 991],),
            ([1],),
        ),
        ({"const": {"multipleOf": 1000003}}, ({"multipleOf": 1000003},), ({"multipleOf": 3},)),
        ({"const": {"minimum": 1 << 60, "propertyNames": True}}, ({"minimum": 1 << 60, "propertyNames": True},), ()),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": WHOLE},
            ({"x": 1},),
            ({"x": ""},),
        ),
        ({"type": "object", **NAMED}, ({}, {"b": 1}), ({"c": 1}, {"a": ""})),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ({"ab": 1},), ({"b": 1},)),
        ({"properties": {"a": WHOLE}, "unevaluatedProperties": False}, ({"a": 1},), ({"b": 1},)),
        ({"const": {"a": [-0.1, 1e22, 0.1 + 0.2]}}, ({"a": [-0.1, 1e22, 0.1 + 0.2]},), ({"a": [-0.1, 1e22, 0.3]},)),
        ({"type": "number", "minimum": 0.38120423768821243}, (0.4,), (0.3812042376882124,)),
        ({"enum": [(1 << 53) - 1, -(1 << 62)]}, ((1 << 53) - 1, -(1 << 62)), (1 << 62,)),
    ],
)
def test_what_llguidance_reads_inexactly_is_exact(schema: Any, right: Sequence[Any], wrong: Sequence[Any]) -> None:
    grammar, tokenizer = Grammar.of_schema(schema), make_tokenizer()
    for value in right:
        check(schema, value)
    expected = [True] * len(right) + [False] * len(wrong)
    assert [follows(grammar, json.dumps(value), tokenizer) for value in (*right, *wrong)] == expected


def test_a_choice_of_many_and_an_object_of_many() -> None:
    texts = [f"{number * 7919:x}" for number in range(5000)]
    assert drawn(Grammar.of_choice(texts), 1, make_tokenizer()) in texts
    many: Any = {"properties": {f"f{n}": {"enum": [n]} for n in range(700)}, "additionalProperties": False}
    check(many, json.loads(drawn(Grammar.of_schema({"type": "object", **many}), 1, make_tokenizer())))


@pytest.mark.parametrize("of_node", [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}])
def test_a_schema_of_which_no_answer_ends_says_so(of_node: Any) -> None:
    with pytest.raises(OptionError) as refused:
        Grammar.of_schema(of_node).check(make_tokenizer())
    assert "no answer to it ends, since it leads back to itself" in refused.value.problem
    assert "null" in refused.value.remedy


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.of_schema({**{f"{n}": {"$ref": f"#/{n + 1}"} for n in range(4000)}, "$ref": "#/0"}),
        lambda: Grammar.of_rules("start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(3000)) + '\na3000: "0"'),
    ],
)
def test_long_chains_do_not_overflow_the_stack(make: Callable[[], Grammar]) -> None:
    assert follows(make(), "0", make_tokenizer())


def test_a_reference_to_what_it_lies_in_stands_alone() -> None:
    inner = {"$ref": "#/$defs/a", "minProperties": 1}
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"z": inner}}}}
    with pytest.raises(OptionError, match=re.escape('a "$ref" to #/$defs/a lies within it and has other keys beside')):
        Grammar.of_schema(schema).check(make_tokenizer())
    del inner["minProperties"]
    Grammar.of_schema(schema).check(make_tokenizer())


def test_a_forced_text_may_be_the_name_of_a_mark() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    mark = tokenizer.convert_tokens_to_ids("<|im_end|>")
    state = Grammar.of_schema({"const": "a<|im_end|>b"}).state(fake(tokenizer))
    ids = [1]
    while not state.ends(forced := state.forced(ids)):
        scores = state(torch.tensor([ids]), torch.zeros(1, len(tokenizer)))
        ids.append(forced[0] if forced else int(scores.argmax()))
    ids += forced[:-1]
    assert mark not in ids
    assert tokenizer.decode(ids[1:]) == '"a<|im_end|>b"'


@pytest.mark.parametrize("logprobs", [None, 0])
def test_ignoring_the_end_does_not_hold_what_can_only_end(ask: Ask, logprobs: int | None) -> None:
    asked = request(PERSON, 1, top_logprobs=logprobs)
    endless = replace(asked, sampling=replace(asked.sampling, ignore_eos=True))
    first, second = ask([asked, endless])[0]
    assert first.tokens == second.tokens
    assert second.finished.finish is FinishReason.STOP


def test_an_answer_ends_without_an_end_token(folder: Path) -> None:
    model: Any = load(folder, ALL, dtype="float32", exact=False)
    model.tokenizer = make_tokenizer()
    model.tokenizer.eos_token, model.generation_config.eos_token_id = None, None
    texts = "the rain", "the rainbow"  # one may end where the other goes on
    grammar = Grammar.of_choice(texts)
    asked = [Request(prompt(9, seed), 30, Sampling(1.5, seed=seed), grammar=grammar) for seed in range(3)]
    results = [answer(model, each, lambda text: None, draft=draft) for each in asked for draft in (None, NGRAM)]
    for limits in (NONE, LOOKUP):
        with Batch(model, limits) as batch:
            results += [submitted.finished for submitted in answered_together(batch, asked)]
    assert {(result.text in texts, result.finish) for result in results} == {(True, FinishReason.STOP)}
    state, ids = grammar.state(model), torch.tensor([asked[0].prompt])
    options: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "logits_processor": [state]}
    tokens = model.generate(ids, **options)[0, 9:].tolist()  # without an end token it goes on
    assert model.tokenizer.decode(tokens, skip_special_tokens=True) in texts
    assert len(tokens) == 12
    assert tokens[-1] == state.end_tokens[0]


def test_other_tokenizers_are_refused_by_name() -> None:
    class Slow:
        eos_token_id = 2

    with pytest.raises(OptionError, match="A Slow cannot be used with a grammar: Only fast tokenizers"):
        Grammar.of_choice(["a"]).check(Slow())


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackageError, match="grammar"):
        Grammar.of_schema({})


def test_several_sequences_are_refused() -> None:
    state = Grammar.of_choice(["a", "b"]).state(fake(make_tokenizer()))
    with pytest.raises(OptionError, match="one sequence; found 2"):
        state(torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 272))
