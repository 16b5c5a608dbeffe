"""docs/reference/api.md, from the docstrings and signatures of the public names and of the classes that they return."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import griffe

from tools.reference.markdown import cell, one_line, paragraphs, sentence, table
from tools.reference.source import module, sections


@dataclass(frozen=True)
class Shown:
    """A public object.

    Attributes:
        name: the name by which a caller imports or gets it.
        path: its module, a colon, and its name there.
        members: of a class, the methods and properties to show.
        bases: classes of other modules whose attributes it inherits.
        is_made: whether callers make it: its attributes are then arguments with defaults.
    """

    name: str
    path: str
    members: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    is_made: bool = False


_MODEL = (
    "save_pretrained get_memory_footprint num_parameters to resize_token_embeddings save_expert_use load_expert_use"
)
_ESTIMATE = "rabbitllm.estimate.split_estimate"
_OLD = "rabbitllm.rabbitllm_1_names"
GROUPS: Mapping[str, Sequence[Shown]] = {
    "Load a model": (
        Shown("AutoModel.from_pretrained", "rabbitllm.auto_model:AutoModel.from_pretrained"),
        Shown("model", "rabbitllm.engine.streamed_model:StreamedModel", tuple(_MODEL.split())),
        Shown(
            "model.placement",
            "rabbitllm.engine.placement:Placement",
            ("home", "is_resident", "streamed_bytes", "uploaded_bytes", "of", "plot"),
        ),
        Shown("PlacedUnit", "rabbitllm.engine.placement:PlacedUnit"),
        Shown("Tier", "rabbitllm.engine.placement:Tier"),
        Shown(
            "model.profiler",
            "rabbitllm.telemetry.profiler:Profiler",
            ("report", "as_json", "sums", "passes", "bottleneck", "trace", "clear"),
        ),
        Shown("Hosts", "rabbitllm.base.options:Hosts", ("of_torchrun",), is_made=True),
    ),
    "Estimate": (
        Shown("rabbitllm.plan", "rabbitllm.estimate.plan:plan"),
        Shown("Plan", "rabbitllm.estimate.report:Plan", ("at",), (f"{_ESTIMATE}:SplitEstimate",)),
        Shown("Recommendation", f"{_ESTIMATE}:Recommendation"),
        Shown("CompressionEstimate", f"{_ESTIMATE}:CompressionEstimate"),
        Shown("Route", f"{_ESTIMATE}:Route", ("fits",)),
        Shown("GenerationEstimate", "rabbitllm.estimate.cost_model:GenerationEstimate"),
        Shown("Anatomy", f"{_ESTIMATE}:Anatomy"),
    ),
    "Answer many prompts": (
        Shown("rabbitllm.batch", "rabbitllm.batch_jobs.api:batch"),
        Shown("Progress", "rabbitllm.batch_jobs.display:Progress"),
    ),
    "Measure quality": (
        Shown("rabbitllm.quality", "rabbitllm.evaluation.quality:quality"),
        Shown("Quality", "rabbitllm.evaluation.quality:Quality", ("as_json",)),
        Shown("Summary", "rabbitllm.evaluation.compare:Summary"),
        Shown("Divergence", "rabbitllm.evaluation.compare:Divergence"),
    ),
    "Score texts": (
        Shown("OnePassLM", "rabbitllm.harness:OnePassLM", is_made=True),
        Shown("score", "rabbitllm.generation.scoring.score:score"),
        Shown("ScoredText", "rabbitllm.generation.scoring._tasks:ScoredText", is_made=True),
        Shown("Scored", "rabbitllm.generation.scoring._tasks:Scored"),
        Shown("Room", "rabbitllm.generation.scoring._tasks:Room", is_made=True),
    ),
    "Read single tensors": (
        Shown("rabbitllm.lazy_load", "rabbitllm.lazy.load:lazy_load"),
        Shown("LazyCheckpoint", "rabbitllm.lazy.load:LazyCheckpoint", ("nbytes", "close")),
        Shown("LazyTensor", "rabbitllm.lazy._tensor:LazyTensor", ("read",)),
    ),
    "Notebooks": (
        Shown("notebooks.settle", "rabbitllm.notebooks:settle"),
        Shown("notebooks.find", "rabbitllm.notebooks:find"),
        Shown("Places", "rabbitllm.notebooks:Places", ("max_disk",)),
    ),
    "Name layers": (
        Shown("rabbitllm.register_layer_naming", "rabbitllm.checkpoints.naming:register_layer_naming"),
        Shown("naming", "rabbitllm.checkpoints.naming:naming"),
    ),
    "Names of RabbitLLM 1.1": (
        Shown("RabbitLLMBaseModel", f"{_OLD}:RabbitLLMBaseModel"),
        Shown("split_and_save_layers", f"{_OLD}:split_and_save_layers"),
        Shown("compress_layer_state_dict", f"{_OLD}:compress_layer_state_dict"),
        Shown("uncompress_layer_state_dict", f"{_OLD}:uncompress_layer_state_dict"),
    ),
}
OTHER_CLASSES = "`RabbitLLMBaichuan`, `RabbitLLMChatGLM`, `RabbitLLMInternLM`, `RabbitLLMLlama2`, `RabbitLLMMistral`, \
`RabbitLLMMixtral`, `RabbitLLMQWen`, `RabbitLLMQWen2` and `RabbitLLMQWen3` are the same class under other names."
BEGIN = """\
# Python API

Import the names from `rabbitllm`: `from rabbitllm import AutoModel`. Each is loaded when it is first used:
`import rabbitllm` loads neither torch nor transformers. Classes that are only returned are named without a way to
import them. `OnePassLM` is in `rabbitllm.harness`, the other names under "Score texts" in
`rabbitllm.generation.scoring`. `RabbitLLMError` and `NotEnoughSpaceException` are under [Errors](errors.md).
`rabbitllm.__version__` is the version as text.

Sizes are in bytes, times in seconds, unless an entry says otherwise. Arguments for a size take a number of bytes, or
text with a unit: `"50GB"`, `"500MB"`. Names behind `*` must be given by name.
"""


def page() -> str:
    """The page."""
    lines = [BEGIN]
    rows = [
        (group, ", ".join(f"[`{shown.name}`](#{_anchor(shown.name)})" for shown in members))
        for group, members in GROUPS.items()
    ]
    lines += table(["task", "names"], rows)
    for group, members in GROUPS.items():
        lines += ["", f"## {group}"]
        for shown in members:
            lines += ["", *_object(shown)]
            if shown.name == "RabbitLLMBaseModel":
                lines += ["", *OTHER_CLASSES.splitlines()]
    return "\n".join(lines) + "\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def found_at(path: str) -> griffe.Object:
    """The object at a module's path and a name."""
    where, _, name = path.partition(":")
    owner = module(where)[name]
    assert isinstance(owner, griffe.Object)
    return owner


def _object(shown: Shown) -> Iterator[str]:
    owner = found_at(shown.path)
    yield f"### {shown.name}"
    yield ""
    if isinstance(owner, griffe.Function):
        yield from _function(owner)
        return
    assert isinstance(owner, griffe.Class)
    yield from _class(shown, owner, [found_at(base) for base in shown.bases])


def _function(function: griffe.Function) -> Iterator[str]:
    yield from _text(function)
    arguments = {param.name: param for param in function.parameters if param.name not in ("self", "cls")}
    yield from _arguments(function, arguments)
    for section in sections(function):
        if section.kind is griffe.DocstringSectionKind.returns:
            annotation = _type(function.annotation)
            said = sentence(one_line(section.value[0].description))
            yield from ("", f"**Returns** {f'`{annotation}`: ' if annotation not in ('', 'Any') else ''}{said}")
    yield from _raises(function)


def _arguments(owner: griffe.Object, arguments: Mapping[str, griffe.Parameter]) -> Iterator[str]:
    described = dict(_items(owner, griffe.DocstringSectionKind.parameters))
    rows, is_by_name = [], False
    for name, argument in arguments.items():
        by_name = argument.kind is griffe.ParameterKind.keyword_only
        mark = r"\* " if by_name and not is_by_name else ""
        is_by_name = is_by_name or by_name
        if argument.kind is griffe.ParameterKind.var_keyword:
            name = f"**{name}"
        if name.lstrip("*") not in described and name not in described:
            continue
        meaning = described.get(name) or described[name.lstrip("*")]
        rows.append((f"{mark}`{name}`", _code(_type(argument.annotation)), _default(owner, argument), meaning))
    if rows:
        yield ""
        yield from table(["argument", "type", "default", "meaning"], rows)


def _class(shown: Shown, owner: griffe.Class, bases: Sequence[griffe.Object]) -> Iterator[str]:
    yield from _text(owner)
    if shown.is_made and isinstance(initializer := owner.members.get("__init__"), griffe.Function):
        yield from _arguments(owner, {param.name: param for param in initializer.parameters if param.name != "self"})
    members = {name: member for source in (*bases, owner) for name, member in source.members.items()}
    rows = []
    for name, meaning in (item for source in (*bases, owner) for item in _items(source, _ATTRIBUTES)):
        member = members.get(name)
        typed = member if isinstance(member, griffe.Attribute) else None
        annotation = _type(typed.annotation) if typed else ""
        default = "" if not shown.is_made else "required" if not typed or typed.value is None else f"`{typed.value}`"
        if not meaning.endswith("; internal."):
            rows.append((f"`{name}`", _code(annotation), default, meaning))
    methods = []
    for name in shown.members:
        member = members[name]
        if isinstance(member, griffe.Attribute) and "property" in member.labels:
            rows.append((f"`{name}`", _code(_type(member.annotation)), "", _summary(member)))
        elif isinstance(member, griffe.Function):
            methods.append(member)
    if "Enum" in str(owner.bases):
        rows = [(f"`{name}`", f"`{member.value}`", "", _summary(member)) for name, member in owner.attributes.items()]
    if rows:
        yield ""
        head = "argument" if shown.is_made else "attribute"
        yield from table([head, "value" if "Enum" in str(owner.bases) else "type", "default", "meaning"], rows)
    for method in methods:
        yield from ("", f"#### {shown.name}.{method.name}", "")
        yield from _function(method)


def _text(owner: griffe.Object) -> Iterator[str]:
    texts = [section.value for section in sections(owner) if section.kind is griffe.DocstringSectionKind.text]
    yield "\n\n".join(paragraph for text in texts for paragraph in paragraphs(text))


def _summary(owner: griffe.Object | griffe.Alias) -> str:
    return one_line(owner.docstring.value) if owner.docstring else ""


def _raises(owner: griffe.Object) -> Iterator[str]:
    for section in sections(owner):
        if section.kind is not griffe.DocstringSectionKind.raises:
            continue
        yield from ("", "**Raises**", "")
        for error in section.value:
            names = str(error.annotation).strip("()").split(", ")
            yield f"- `{'`, `'.join(names)}`: {one_line(error.description)}"


def _items(owner: griffe.Object, kind: griffe.DocstringSectionKind) -> Iterator[tuple[str, str]]:
    """Name and description; one entry may be about several names."""
    for section in sections(owner):
        if section.kind is kind:
            for item in section.value:
                named = f"{item.name} {item.annotation}" if item.name.endswith(",") else item.name
                for name in named.split(","):
                    yield name.strip(), sentence(one_line(item.description))


def _type(annotation: object) -> str:
    """An annotation in words: `int or str`, without modules and quotation marks."""
    if annotation is None:
        return ""
    text = re.sub(r"\b(?:os|torch|griffe)\.(?=[A-Z])", "", str(annotation)).strip("\"'")
    return text.replace(" | ", " or ").replace("PathLike[str]", "PathLike")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _default(owner: griffe.Object, argument: griffe.Parameter) -> str:
    if argument.kind is griffe.ParameterKind.var_keyword:
        return ""
    if argument.default is None:
        return "required"
    text = str(argument.default)
    if re.fullmatch(r"_?[A-Z][A-Z_]+", text):
        value = getattr(importlib.import_module(owner.module.path), text)
        text = f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)
    if text.startswith("lambda"):
        return "nothing"
    return "`os.environ`" if text == "os.environ" else f"`{cell(text)}`"


_ATTRIBUTES = griffe.DocstringSectionKind.attributes


def described(owner: griffe.Object) -> set[str]:
    """Names of the arguments that a docstring describes."""
    return {name.lstrip("*") for name, _ in _items(owner, griffe.DocstringSectionKind.parameters)}


def public_names() -> Iterable[str]:
    """First parts of the names on the page."""
    return {shown.name.removeprefix("rabbitllm.").partition(".")[0] for members in GROUPS.values() for shown in members}
