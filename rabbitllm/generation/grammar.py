"""Grammars that answers follow: a JSON schema, a regular expression, a choice of texts, or rules in Lark's form.

llguidance says which tokens may follow, and which must. Masks are computed in a thread while a pass reads weights. A
forced token needs no logits, so it is a further row of the next pass; an end that is forced needs no pass at all. All
else is the sampling of `generate`: the mask is one of its processors, after penalties and before temperature.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LogitsProcessor

from rabbitllm.base.forks import DaemonThread, Workers, fulfil, own_lock
from rabbitllm.base.terminal import harmless
from rabbitllm.errors import OptionError, missing_package
from rabbitllm.generation._recommended import end_tokens, tokenizer_of
from rabbitllm.generation._schemas import exact
from rabbitllm.generation.kv_cache import common_prefix
from rabbitllm.generation.reasoning import CHANNEL, END, MESSAGE, START, Thoughts, special_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from rabbitllm.engine.streamed_model import StreamedModel

JSON_FORM: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most texts have it on one line: so models know it, and all but the values is forced."""
_STRICT: Mapping[str, Any] = {"lenient": False, "coerce_one_of": False}
"""A keyword that llguidance does not know is an error, whatever a schema's `x-guidance` says."""
_KEPT = 64
"""Compiled grammars of a tokenizer that are kept."""
_MOST_LETTERS, _MOST_OF_RULES = 1 << 18, 1 << 16
"""Limits of a grammar as llguidance reads it, and of rules or a pattern in it: more takes minutes."""
_MOST_SYMBOLS = 20_000
"""Symbols of a grammar; with more, llguidance's time grows with their square."""
_MOST_ITEMS = 5_000
"""Rules that one letter may continue, such as 1,250 optional properties: a token with as many takes some 0.2 s."""
_STACK_BYTES = 128 << 20
"""Stack for llguidance, which goes from reference to reference, and from rule to rule, by recursion."""
_REASON = 400
"""Letters of llguidance's message that are shown."""
_TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be.

    Attributes:
        rules: Lark rules that define `answer`; `@name` is one of the parts.
        parts: name and definition, as JSON of llguidance, of further grammars.
        lead: Lark rules that define `lead`, which comes before the answer, such as reasoning; "" for none.
        kind: the words for it in messages.
    """

    rules: str
    parts: tuple[tuple[str, str], ...] = ()
    lead: str = ""
    kind: str = "grammar"

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | str | bool, name: str = "json") -> Grammar:
        """JSON that a schema describes; properties come in the order of the schema.

        Args:
            schema: the schema, or its text. `x-guidance` may set the form of whitespace.
            name: name of the part.

        Raises:
            OptionError: it is no JSON schema.
            MissingPackageError: llguidance is not installed.
        """
        _llguidance()
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            schema = {} if schema is True else schema
            options = schema.get("x-guidance", {}) if isinstance(schema, Mapping) else None
            if not isinstance(schema, Mapping) or not isinstance(options, Mapping):
                raise OptionError("The JSON schema is not an object; expected one.", "Use a JSON schema.")
            whole = {**exact(schema), "x-guidance": {**JSON_FORM, **options, **_STRICT}}
            part = _dumped({"json_schema": whole})
        except OptionError:
            raise
        except RecursionError:
            raise OptionError("The JSON schema is nested too deeply.", "Use a flatter one.") from None
        except (TypeError, ValueError) as error:  # of Python: a set, or a number of over 4,300 digits
            raise OptionError(f"The JSON schema is not valid JSON: {error}.", "Use a JSON schema.") from None
        return cls(f"answer: @{name}", ((name, part),), kind="JSON schema")

    @classmethod
    def of_regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches from its beginning to its end."""
        _check_text("regular expression", pattern, _MOST_OF_RULES)
        source = json.loads(_llguidance().LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return cls("answer: @regex", (("regex", _dumped({"lark_grammar": source})),), kind="regular expression")

    @classmethod
    def of_choice(cls, texts: Iterable[str]) -> Grammar:
        """One of some texts.

        Raises:
            OptionError: there is none, or one is empty.
        """
        listed = list(texts)
        if not all(listed) or not listed:
            raise OptionError("A choice has no texts, or an empty one.", "Use texts that are not empty.")
        return cls("answer: CHOICE\nCHOICE: " + " | ".join(map(_dumped, listed)), kind="choice")

    @classmethod
    def of_rules(cls, rules: str) -> Grammar:
        """Rules in Lark's form, from `start`, or in llama.cpp's (GBNF), from `root`.

        Raises:
            OptionError: rules in llama.cpp's form cannot be read.
        """
        _llguidance()
        from llguidance.gbnf_to_lark import any_to_lark

        _check_text("grammar", rules, _MOST_OF_RULES)
        try:
            lark = any_to_lark(rules)
        except Exception as error:  # of its own parser
            raise OptionError(
                f"The grammar cannot be used: {_short(str(error))}.", "Use a grammar in Lark's form, or GBNF."
            ) from None
        return cls("answer: @rules", (("rules", _dumped({"lark_grammar": lark})),))

    def after(self, thoughts: Thoughts | None, tokenizer: Any, head: str | None = None) -> Grammar:
        """The same after reasoning, where the model writes it: between its marks anything is allowed.

        Args:
            thoughts: how the answer to the prompt is read; None where all text is the answer.
            tokenizer: the model's tokenizer.
            head: Lark text between both; None for `final_head`.
        """
        if thoughts is None:
            return self
        head = final_head(thoughts, tokenizer) if head is None else head
        return replace(self, lead=_lead_of(thoughts, tokenizer, head))

    @property
    def source(self) -> str:
        """The grammar as llguidance reads it."""
        lark = f"start: lead answer\n{self.lead}\n{self.rules}" if self.lead else f"start: answer\n{self.rules}"
        parts = [{"name": name, **json.loads(definition)} for name, definition in self.parts]
        return _dumped({"grammars": [{"name": "whole", "lark_grammar": lark}, *parts]})

    def check(self, tokenizer: Any) -> None:
        """Check that answers can follow it, before one is requested.

        Raises:
            OptionError: it has an error, or demands what cannot be guaranteed; or the tokenizer is of another kind.
            MissingPackageError: llguidance is not installed.
        """
        _vocabulary_of(tokenizer).compiled(self)

    def state(self, model: StreamedModel) -> GrammarState:
        """The state of one answer; also for `model.generate(..., logits_processor=[state])`.

        Raises:
            OptionError, MissingPackageError: see `check`.
        """
        vocabulary = _vocabulary_of(tokenizer_of(model))
        matcher = vocabulary.compiled(self).deep_copy()
        return GrammarState(matcher, self.ends(model), vocabulary.end, self.kind, vocabulary.tokens)

    def ends(self, model: StreamedModel) -> list[int]:
        """The tokens that end an answer; of a tokenizer without an end token, one that no text has."""
        return end_tokens(model) or [_vocabulary_of(tokenizer_of(model)).end]


class GrammarState(LogitsProcessor):  # type: ignore[misc]
    """How far one answer has come in its grammar. It follows the ids that it is given, also back, as after a draft.

    Args:
        matcher: llguidance's state at the beginning.
        ends: the tokens that end a text.
        end: the one that stands for them in llguidance.
        kind: see `Grammar`.
        tokens: the vocabulary in llguidance.

    Attributes:
        saved: number of forced tokens that had no pass of their own; counted by those who run passes.
        end_tokens: see `Grammar.ends`.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], end: int, kind: str, tokens: LLTokenizer) -> None:
        self.saved = 0
        self._matcher, self._tokens = matcher, tokens
        self.end_tokens, self._end, self._kind = list(ends), end, kind
        self._prompt: int | None = None  # tokens before the answer
        self._known: list[int] = []  # tokens of the answer, and those that must follow them
        self._free = 0  # number of the former
        self._read = 0  # tokens that the matcher has read: all but an end token
        self._banned: Future[torch.Tensor] | None = None  # the mask after `_known`
        self._move([])

    def forced(self, ids: Sequence[int]) -> list[int]:
        """The tokens that must follow, up to the first choice; the last is an end token if nothing else can follow.

        Args:
            ids: prompt and answer so far; the first call has the prompt alone.
        """
        if self._prompt is None:
            self._prompt = len(ids)
        tokens = list(ids[self._prompt :])
        if len(tokens) < self._free or self._known[: len(tokens)] != tokens:
            self._move(tokens)
        return self._known[len(tokens) :]

    def ends(self, forced: Sequence[int]) -> bool:
        """Whether the answer is over after these tokens that must follow."""
        return bool(forced) and forced[-1] in self.end_tokens

    def rows(self, ids: Sequence[int]) -> list[int]:
        """Those of `forced` that are rows of a pass: all but an end token."""
        forced = self.forced(ids)
        return forced[:-1] if self.ends(forced) else forced

    def valid(self, ids: Sequence[int], draft: Sequence[int]) -> int:
        """How many tokens of a draft after `ids` the grammar allows."""
        if (following := self.forced(ids)) or self._banned is None:
            return common_prefix(draft, following)
        self._wait()
        return self._matcher.validate_tokens(list(draft))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Exclude tokens that may not follow.

        Args:
            input_ids: prompt and answer so far, (1, tokens).
            scores: (1, vocabulary).

        Raises:
            OptionError: several sequences, or a grammar that became too complex.
        """
        if len(input_ids) != 1:
            raise OptionError(
                f"A grammar's state is for one sequence; found {len(input_ids)}.", "Generate one sequence a call."
            )
        following = self.forced(input_ids[0].tolist())
        if following or self._banned is None:  # after an end at which `generate` does not stop, further ones
            only = torch.full_like(scores, -torch.inf)
            only[0, (following or self.end_tokens)[0]] = 0
            return only
        known = self._banned.result()[: scores.shape[-1]].to(scores.device)
        banned = torch.ones(scores.shape[-1], dtype=torch.bool, device=scores.device)
        banned[: len(known)] = known
        allowed = scores.masked_fill(banned, -torch.inf)
        if float(allowed.amax()) == -torch.inf:  # another processor excludes all that may follow
            allowed = torch.zeros_like(scores).masked_fill(banned, -torch.inf)
        return allowed

    def _move(self, tokens: list[int]) -> None:
        """Go to an answer of these tokens, and on to the next choice."""
        self._wait()
        self._banned = None
        same, end = common_prefix(tokens, self._known[: self._read]), len(tokens)
        while end > same and tokens[end - 1] in self.end_tokens:
            end -= 1
        matcher, new, is_over = self._matcher, tokens[same:end], end < len(tokens)
        if self._read > same:
            matcher.rollback(self._read - same)
        read = matcher.try_consume_tokens(new)
        forced = [] if is_over else _follow(matcher, self._tokens)
        self._check(len(new) - read)
        self._free, self._read = len(tokens), same + len(new) + len(forced)
        self._known = [*tokens, *forced]
        if is_over or matcher.is_stopped():
            self._known += [] if is_over else self.end_tokens[:1]
        else:
            self._banned = _workers().submit(self._mask)

    def _mask(self) -> torch.Tensor:
        """Whether each token may not follow, bool of shape (vocabulary of the tokenizer,)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check(0)
        banned = torch.from_numpy(np.unpackbits(bits, bitorder="little") == 0)
        goes_on = bool(banned[self._end])
        banned[self._end] = True
        banned[self.end_tokens] = goes_on
        return banned

    def _check(self, unread: int) -> None:
        if unread or self._matcher.is_error():
            reason = self._matcher.get_error() or "the answer left it"
            raise OptionError(f"The {self._kind} cannot be followed: {_short(reason)}.", "Use a simpler one.")

    def _wait(self) -> None:
        """Wait for the thread, which uses the matcher."""
        if self._banned is not None:
            self._banned.result()


class _GrammarVocabulary:
    """The vocabulary of a tokenizer in llguidance, and the grammars compiled for it.

    Attributes:
        end: the token that ends a text.
        tokens: the vocabulary itself.
        marks: id and text of each token that no text has, such as `<think>`, special or not.

    Raises:
        OptionError: the tokenizer is none of the library tokenizers, or has no special token.
    """

    def __init__(self, tokenizer: Any) -> None:
        llguidance = _llguidance()
        from llguidance.hf import from_tokenizer

        ends = [tokenizer.eos_token_id, *special_tokens(tokenizer)]
        end = next((token for token in ends if token is not None), None)
        try:
            if end is None:
                raise ValueError("it has no end token")
            self.end = int(end)
            self.tokens = from_tokenizer(tokenizer, eos_token=self.end)
            added = tokenizer.get_added_vocab().items()
            self.marks = {token: text for text, token in added if self.tokens.is_special_token(token)}
        except Exception as error:  # ValueError, or a panic in Rust
            raise OptionError(
                f"A {type(tokenizer).__name__} cannot be used with a grammar: {harmless(str(error), _REASON)}.",
                "Use a checkpoint with a tokenizer.json.",
            ) from None
        limits = llguidance.LLParserLimits(max_grammar_size=_MOST_SYMBOLS, max_items_in_row=_MOST_ITEMS)
        self._matcher = functools.partial(llguidance.LLMatcher, self.tokens, log_level=0, limits=limits)
        self.compiled = functools.lru_cache(_KEPT)(functools.partial(_on_deep_stack, self._compiled))

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning, to be copied.

        Raises:
            OptionError: see `Grammar.check`.
        """
        _check_text(grammar.kind, source := grammar.source, _MOST_LETTERS)
        matcher: LLMatcher = self._matcher(source)
        first = matcher if matcher.is_error() else matcher.deep_copy()
        if not matcher.is_error():  # the first step is the longest, and shows whether anything can follow
            _follow(first, self.tokens)
            bits = np.unpackbits(np.frombuffer(first.compute_bitmask(), np.uint8), bitorder="little")
            if bits.any() and not first.is_stopped():  # limits of the first letter are checked after it
                first.try_consume_tokens([int(bits.argmax())])
        if first.is_error():
            reason, advice = _explained(_short(first.get_error()))
            raise OptionError(f"The {grammar.kind} cannot be used: {reason}.", advice)
        return matcher


_VOCABULARIES: weakref.WeakKeyDictionary[Any, _GrammarVocabulary] = weakref.WeakKeyDictionary()
_lock = own_lock(threading.Lock())


def _vocabulary_of(tokenizer: Any) -> _GrammarVocabulary:
    """The vocabulary of a tokenizer, made once; that takes about a second for 150,000 tokens."""
    with _lock:
        if tokenizer not in _VOCABULARIES:
            _VOCABULARIES[tokenizer] = _GrammarVocabulary(tokenizer)
        return _VOCABULARIES[tokenizer]


def _on_deep_stack(work: Callable[[Grammar], LLMatcher], grammar: Grammar) -> LLMatcher:
    """Compile in a thread of a large stack: a stack that overflows would end the process."""
    future = Future[Any]()
    thread = DaemonThread(fulfil, "rabbitllm-grammar", future, work, grammar)
    with _lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    matcher: LLMatcher = future.result()
    return matcher


@functools.cache
def _workers() -> Workers:
    return Workers(1, "rabbitllm-grammar")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise missing_package("Grammars and JSON schemas need", "llguidance", "grammar") from None
    return llguidance


def _follow(matcher: LLMatcher, vocabulary: LLTokenizer) -> list[int]:
    """Take in the tokens that must follow, and return them."""
    forced: list[int] = []
    while tokens := list(matcher.compute_ff_tokens()):
        if valid := matcher.validate_tokens(tokens):
            tokens = tokens[:valid]
        else:  # the text `<|im_end|>` must follow, and not the token of that name
            tokens = list(vocabulary.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore")))
        if not matcher.consume_tokens(tokens) or not tokens:
            break
        forced += tokens
    return forced


def _check_text(kind: str, text: str, most: int) -> None:
    if letter := re.search("[\ud800-\udfff]", text):
        raise OptionError(
            f"The {kind} has the half letter \\u{ord(letter[0]):x}; expected whole ones.", "Write the other half too."
        )
    if len(text) > most:
        raise OptionError(f"The {kind} has {len(text):,} letters; expected at most {most:,}.", "Use a shorter one.")


def _short(reason: str) -> str:
    """A message of llguidance on one line, without its state and a full stop."""
    reason = reason.partition("<state>")[0].partition("<backtrace>")[0]
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return harmless(" ".join(lines), _REASON).rstrip(".")


def _explained(reason: str) -> tuple[str, str]:
    """A message of llguidance, clearer about what refers to itself, and what to do."""
    if beside := re.search(r"circular references with sibling keys.*json-schema://[^#]*(#\S*)", reason):
        what = f'a "$ref" to {beside[1]} lies within it and has other keys beside it'
        return what, "Leave these keys out there, or put them into what it refers to."
    if reason.startswith("oneOf constraints"):
        _, _, place = reason.partition(" while processing ")
        where = f" of {place.removeprefix('json-schema:///')}" if place else ""
        return (
            f'two alternatives of the "oneOf"{where} may fit one value',
            'Use "anyOf", or make them differ in a type.',
        )
    if "max is" in reason:
        reason = reason.partition(";")[0]
        return f"too much may follow one letter ({reason})", "Use fewer optional properties, or fewer alternatives."
    if "NoExtensionBias" not in reason and "Too many items" not in reason:
        return reason, "Leave out what it names, or say it in another way."
    advice = "Give what refers to itself an end, such as an optional property or null, and use shorter texts."
    return f"no answer to it ends, since it leads back to itself, or it is very long ({reason})", advice


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def marks_of(tokenizer: Any) -> Mapping[int, str]:
    """Id and text of each token that no text has, such as `<think>`, special or not.

    Raises:
        OptionError, MissingPackageError: see `Grammar.check`.
    """
    return _vocabulary_of(tokenizer).marks


def lark_text(text: str, marks: Mapping[int, str]) -> str:
    """A text in a Lark rule.

    Args:
        text: the text.
        marks: see `marks_of`.
    """
    for token, name in marks.items():
        if name and name in text:
            before, _, rest = text.partition(name)
            return f"{lark_text(before, marks)} <[{token}]> {lark_text(rest, marks)}".strip()
    return json.dumps(text, ensure_ascii=False) if text else ""


def final_head(thoughts: Thoughts | None, tokenizer: Any) -> str:
    """Lark text of what begins an answer that is no tool call: the channel of gpt-oss; "" for nothing."""
    if thoughts is None or not thoughts.form.has_channels:
        return ""
    return lark_text(CHANNEL + "final" + MESSAGE, marks_of(tokenizer))


def _lead_of(thoughts: Thoughts, tokenizer: Any, head: str) -> str:
    """Lark rules of what a model writes before its answer; "" for nothing."""
    marks, tail = marks_of(tokenizer), thoughts.tail.rstrip()
    text = functools.partial(lark_text, marks=marks)
    if thoughts.form.has_channels:
        thinks = f"{text(CHANNEL + 'analysis' + MESSAGE)} TEXT {text(END + START + 'assistant')}"
        return f"lead: ({thinks})? {head}\n{_TEXT}"
    known = tokenizer.get_added_vocab()
    for first, last in thoughts.form.pairs:
        is_open = tail.endswith(first)
        if is_open or (last in known and not tail.endswith(last)):
            is_mark = last in marks.values()
            thought = f"TEXT {text(last)}" if is_mark else "thought"
            lead = f"{thought} GAP" if is_open else f"({text(first)} {thought} GAP)?"
            lazy = "" if is_mark else f"\nthought[lazy]: TEXT {text(last)}"
            return f"lead: {lead}{lazy}\n{_TEXT}\nGAP: /\\n{{0,2}}/"
    return ""
