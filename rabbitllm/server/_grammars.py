"""The grammar of an answer, from `response_format`, `structured_outputs` and `tool_choice`.

Calls that must be made are written in the form that the model's chat template shows; see `_tools`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from rabbitllm.base.terminal import harmless, listed
from rabbitllm.errors import MissingPackageError, OptionError
from rabbitllm.generation.grammar import Grammar, final_head, lark_text, marks_of
from rabbitllm.generation.reasoning import CHANNEL, MESSAGE, Thoughts
from rabbitllm.server._tools import ARGUMENTS, CLOSE, FORMS, MISTRAL, OPEN
from rabbitllm.server.api_error import bad, bad_options, unsupported
from rabbitllm.server.schemas import ChatBody, GenerationBody, ResponseFormat, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT, OUTPUTS, CHOICE = "response_format", "structured_outputs", "tool_choice"
_OF_SCHEMA = ("name", "description", "schema", "strict")
_OF_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
_ANY: Mapping[str, Any] = {"type": "object"}
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""
_NOTES = frozenset(
    {
        *("$comment", "$defs", "default", "definitions", "deprecated", "description", "discriminator", "examples"),
        *("readOnly", "title", "writeOnly"),
    }
)
"""Keywords that exclude no value."""
_ABOUT = _NOTES | {"type"}
"""Keywords of a text that can be written without quotes."""
_ABOUT_ALL = frozenset(
    {
        *("$dynamicRef", "$ref", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas"),
        *("else", "enum", "if", "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames"),
        "then",
    }
)
"""Keywords that concern several parameters, or others than those listed."""
_OF_TEXTS = _ABOUT_ALL - {"const", "enum"} | {"format", "maxLength", "minLength", "pattern"}
"""Keywords that may exclude a text of an `enum`."""
_MOST_BRANCHES = 256
"""Branches of a schema that are looked at: references can go round."""


def must_call(body: ChatBody) -> str | bool:
    """Whether a tool must be called: the name of one, or True for any.

    Raises:
        APIError: `tool_choice` is none of the known forms, or names no tool of the request.
    """
    choice, names = body.tool_choice, [tool.function.name for tool in body.tools or ()]
    if choice in (None, "auto", "none"):
        return False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise unsupported(
            f"{CHOICE}: {harmless(str(choice), 40)} is not supported; expected auto, none, required or a function.",
            CHOICE,
        )
    if not names or (name is not None and name not in names):
        wanted = "a tool" if name is None else harmless(name, 60)
        raise bad(f"{CHOICE} demands {wanted}, which is not among the tools.", CHOICE)
    return True if name is None else str(name)


def answer_grammar(
    body: GenerationBody,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool] = (),
    thoughts: Thoughts | None = None,
    template: str = "",
    *,
    forced: str | bool = False,
) -> Grammar | None:
    """What the answer must be; None for anything.

    Args:
        body: the body.
        tokenizer: the model's tokenizer.
        tools: the tools that are shown to the model.
        thoughts: how the answer is read.
        template: source of the chat template.
        forced: what `must_call` says of the body.

    Raises:
        APIError: it demands what cannot be guaranteed, or twice.
    """
    param = FORMAT if body.structured_outputs is None else OUTPUTS
    try:
        asked = _asked(body)
        if asked is None and not forced:
            return None
        with bad_options("tools" if asked is None else param, "invalid_grammar"):
            head = final_head(thoughts, tokenizer)
            if tools:
                calls = _Calls(template, marks_of(tokenizer), has_channels=bool(head))
                named = [tool for tool in tools if forced in (True, False, tool.function.name)]
                several = not isinstance(forced, str) and getattr(body, "parallel_tool_calls", None) is not False
                grammar = calls.grammar(named, None if forced else asked, head, several=several)
                grammar = grammar.after(thoughts, tokenizer, "")
            else:
                assert asked is not None
                grammar = asked.after(thoughts, tokenizer, head)
            grammar.check(tokenizer)
            return grammar
    except MissingPackageError as error:
        raise unsupported(f"{error.problem} {error.remedy}", param) from None


def _asked(body: GenerationBody) -> Grammar | None:
    """The grammar that a body describes; None for none."""
    form = body.response_format
    is_free = form is None or form.type == "text"
    if body.structured_outputs is None:
        if form is None or is_free:
            return None
        with bad_options(FORMAT, "invalid_grammar"):
            return Grammar.of_schema(_schema(form))
    if not is_free:
        raise bad(f"{FORMAT} and {OUTPUTS} both describe the answer; omit one of them.", OUTPUTS)
    given = {name: value for name, value in body.structured_outputs.items() if value not in (None, False)}
    if len(given) != 1 or not given.keys() <= set(_OF_OUTPUTS):
        raise bad(f"{OUTPUTS} has {_names(given)}; expected one of {', '.join(_OF_OUTPUTS)}.", OUTPUTS)
    (kind, value), makes = next(iter(given.items())), Grammar.of_schema
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise bad(f"{OUTPUTS}.choice is not a list of texts.", OUTPUTS)
        with bad_options(OUTPUTS, "invalid_grammar"):
            return Grammar.of_choice(value)
    if kind in ("regex", "grammar"):
        if not isinstance(value, str):
            raise bad(f"{OUTPUTS}.{kind} is not a text.", OUTPUTS)
        makes = Grammar.of_regex if kind == "regex" else Grammar.of_rules  # type: ignore[assignment]
    with bad_options(OUTPUTS, "invalid_grammar"):
        return makes(_ANY if kind == "json_object" else value)


def _names(given: Mapping[str, Any]) -> str:
    return harmless(listed(list(given), 4, " and "), 100) if given else "nothing"


def _schema(form: ResponseFormat) -> Any:
    """The schema of a format; that of `json_schema` has a name and more around it."""
    json_schema = form.json_schema
    if form.type == "json_object" or (json_schema is None and form.bare is not None):
        return _ANY if form.bare is None else form.bare
    if json_schema is None or "schema" not in json_schema:
        raise bad(f"{FORMAT}.json_schema has no schema.", FORMAT)
    if unknown := [name for name in json_schema if name not in _OF_SCHEMA]:
        raise unsupported(f"{FORMAT}.json_schema.{harmless(unknown[0], 60)} is not supported; omit it.", FORMAT)
    return json_schema["schema"]


@dataclass(frozen=True, slots=True)
class _Form:
    """How a model writes calls; NAME and KEY stand for the names of a function and of a parameter.

    Attributes:
        signs: what its chat template shows.
        head, tail: what is around the arguments.
        between: what is between two calls; None where there can be but one.
        around: what is around all calls.
        value: what is around a parameter; empty where the arguments are JSON.
    """

    signs: tuple[str, ...]
    head: str
    tail: str
    between: str | None = "\n"
    around: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")


_ARGUMENTS = '{"name": "NAME", "arguments": '
_BARE = _Form((), '{"name": "NAME", "parameters": ', "}", None)
_CHANNELS = _Form((), f"{CHANNEL}commentary to=functions.NAME <|constrain|>json{MESSAGE}", "", None)
_M2, _M3 = FORMS["MiniMax M2"], FORMS["MiniMax M3"]
_KIMI, _DEEPSEEK = FORMS["Kimi K2"], FORMS["DeepSeek V3, R1, V3.1"]
_CALL, _ARGUMENT, _DONE = _KIMI.special
_BEGIN, _SEPARATOR, _END = _DEEPSEEK.special
_CALLS = (_DEEPSEEK.opening, _DEEPSEEK.closing)
_CODER = ("<parameter=KEY>\n", "\n</parameter>\n")
_GLM = ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
_CLOSE_GLM = ("<arg_key>KEY</arg_key><arg_value>", "</arg_value>")
_MINIMAX = ('<parameter name="KEY">', "</parameter>\n")
_FORMS = (
    _Form((OPEN, "<function="), f"{OPEN}\n<function=NAME>\n", f"</function>\n{CLOSE}", value=_CODER),
    _Form((OPEN, "</arg_key><arg_value>"), f"{OPEN}NAME", CLOSE, "", value=_CLOSE_GLM),
    _Form((OPEN, "<arg_key>"), f"{OPEN}NAME\n", CLOSE, value=_GLM),
    _Form((_M2.opening,), '<invoke name="NAME">\n', "</invoke>\n", "", (_M2.opening + "\n", _M2.closing), _MINIMAX),
    _Form((_BEGIN, "```json"), f"{_BEGIN}function{_SEPARATOR}NAME\n```json\n", f"\n```{_END}", "\n", _CALLS),
    _Form((_BEGIN,), f"{_BEGIN}NAME{_SEPARATOR}", _END, "", _CALLS),
    # one call: the next has another number
    _Form((_KIMI.opening,), f"{_CALL}functions.NAME:0{_ARGUMENT}", _DONE, None, (_KIMI.opening, _KIMI.closing)),
    replace(_BARE, signs=(_M3.tag,)),
    _Form((OPEN,), f"{OPEN}\n{_ARGUMENTS}", f"}}\n{CLOSE}"),
    _Form(("<tool_calls>",), _ARGUMENTS, "}\n", "", ("<tool_calls>\n", "</tool_calls>")),
    _Form((MISTRAL, ARGUMENTS), f"{MISTRAL}NAME{ARGUMENTS}", "", ""),
    _Form((MISTRAL,), _ARGUMENTS, "}", ", ", (f"{MISTRAL}[", "]")),
    _BARE,
)
"""The first whose signs are in a chat template is its form; JSON, which all models know, where it has none of these."""


@dataclass
class _Calls:
    """Tool calls as Lark rules.

    Attributes:
        template: source of the chat template.
        marks: see `marks_of`.
        has_channels: whether answers are in gpt-oss's channels.
        parts: see `Grammar`; filled by the rules.
    """

    template: str
    marks: Mapping[int, str]
    has_channels: bool
    parts: list[tuple[str, str]] = field(default_factory=list)

    def grammar(self, tools: Sequence[Tool], instead: Grammar | None, head: str, *, several: bool) -> Grammar:
        """A call of one of the tools, or of several one after the other.

        Args:
            tools: the tools.
            instead: what the answer may be instead of a call, after `head`.
            several: whether there may be more than one call.
        """
        rules = [f"call{index}: {self._call(tool)}" for index, tool in enumerate(tools)]
        call = " | ".join(f"call{index}" for index in range(len(tools)))
        before, after = map(self._text, self._form.around)
        between = self._form.between
        more = f" ({self._text(between)} call)*" if several and between is not None else ""
        lines = [f"calls: {before} call{more} {after}", f"call: {call}", *rules]
        if instead is None:
            lines.insert(0, "answer: calls")
        else:
            lines = [f"answer: calls | {head} other", instead.rules.replace("answer:", "other:", 1), *lines]
            self.parts += instead.parts
        return Grammar("\n".join(lines), tuple(self.parts), kind="tools")

    def _text(self, text: str) -> str:
        return lark_text(text, self.marks)

    @property
    def _form(self) -> _Form:
        if self.has_channels:
            return _CHANNELS
        return next(form for form in _FORMS if all(sign in self.template for sign in form.signs))

    def _call(self, tool: Tool) -> str:
        name, schema, form = tool.function.name, tool.function.parameters or _NOTHING, self._form
        written = name if form.value[0] else json.dumps(name, ensure_ascii=False)[1:-1]
        arguments = " ".join(self._parameters(name, schema)) if form.value[0] else self._json(schema)
        return f"{self._text(form.head.replace('NAME', written))} {arguments} {self._text(form.tail)}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        grammar = Grammar.of_schema(schema, f"json{len(self.parts)}")
        self.parts += grammar.parts
        return f"@{grammar.parts[0][0]}"

    def _parameters(self, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """Parameters one by one: texts without quotes, all else as JSON."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        is_plain = isinstance(properties, Mapping) and isinstance(required, list | tuple)
        is_plain = is_plain and "object" in _types(schema, "object")
        if not is_plain or set(schema) & _ABOUT_ALL or not all(key in properties for key in required):
            raise OptionError(f"The parameters of {harmless(name, 60)} are more than a list of properties.")
        for key, value in properties.items():
            branches, (before, after) = _branches(value, schema), self._form.value
            end = self._text(after)
            is_choice = len(branches) == 1 and not branches[0].keys() & _OF_TEXTS
            choices = _choices(branches[0]) if is_choice and "string" in _types(branches[0], "string") else []
            marks = after.strip(), before.partition("KEY")[0]
            if choices and all(isinstance(text, str) and not any(map(text.__contains__, marks)) for text in choices):
                written = f"({' | '.join(map(json.dumps, choices))}) {end}"
            elif json_type(value, schema) in ("", "string"):  # read as it is written
                if not any("string" in _types(branch, "string") and set(branch) <= _ABOUT for branch in branches):
                    raise OptionError(
                        f"The parameter {harmless(key, 60)} is a text with a form, which cannot be guaranteed in the "
                        "way in which this model calls tools."
                    )
                lazy = "" if "<[" in end else "[lazy]"  # a token ends it by itself
                text = json.dumps({"lark_grammar": f"start{lazy}: TEXT {end}\nTEXT: /(.|\\n)*/"})
                self.parts.append((f"text{len(self.parts)}", text))
                written = f"@{self.parts[-1][0]}"
            else:
                shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
                written = f"{self._json({**shared, **value})} {end}"
            parameter = f"{self._text(before.replace('KEY', key))} {written}"
            yield parameter if key in required else f"({parameter})?"


def _branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a schema stands for: it, its branches, and what they refer to, each with the keywords next to them."""
    whole, waiting = list[Mapping[str, Any]](), [{} if schema is True else schema]
    for _ in range(_MOST_BRANCHES):
        if not waiting:
            break
        branch = waiting.pop(0)
        if not isinstance(branch, Mapping):
            whole.append({"not": {}})
            continue
        word = next((word for word in ("$ref", "anyOf", "oneOf") if isinstance(branch.get(word), str | list)), "")
        value = branch.get(word)
        if not word:
            whole.append(branch)
            continue
        siblings = {name: value for name, value in branch.items() if name not in {word, *_NOTES}}
        for inner in [_referred(value, root)] if isinstance(value, str) else value or ():
            clashes = isinstance(inner, Mapping) and any(inner.get(name, of) != of for name, of in siblings.items())
            merged = {**inner, **siblings} if isinstance(inner, Mapping) else inner
            waiting.append({**merged, "allOf": []} if clashes else merged)
    return whole or [{}]


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    first, *names = unquote(reference).split("/")
    for name in names if first == "#" else ("",):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _types(schema: Mapping[str, Any], default: str | None = None) -> list[str]:
    declared = schema.get("type", default)
    return [name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)]


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else []


def json_type(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """The type of a parameter; of several, as of an optional one, "string" if it is among them.

    Args:
        schema: of the parameter.
        root: of all parameters.
    """
    names = []
    for branch in _branches(schema, root):
        names += _types(branch)
        if branch.get("type") is None and (choices := _choices(branch)):
            names.append("string" if any(isinstance(choice, str) for choice in choices) else "number")
    return "string" if "string" in names else next(iter(names), "")


def types_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Each parameter -> its type, and those within it: `c.d` in an object, `c.item` in a list.

    Args:
        parameters: a schema.
    """
    types, waiting = dict[str, str](), [("", parameters)]
    while waiting and len(types) < _MOST_BRANCHES:
        path, schema = waiting.pop(0)
        for branch in _branches(schema, parameters):
            inner = branch.get("properties")
            named = {"item": branch.get("items"), **(inner if isinstance(inner, Mapping) else {})}
            for name, value in named.items():
                if isinstance(value, Mapping):
                    types.setdefault(f"{path}{name}", json_type(value, parameters))
                    waiting.append((f"{path}{name}.", value))
    return types
