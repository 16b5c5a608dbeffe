"""The look of `--help`: panels in one order, a word for each value (SIZE) where typer shows the type in Python."""

from __future__ import annotations

from functools import partial
from typing import Any

from typer import Option
from typer.core import TyperCommand, TyperGroup

from rabbitllm.base.validation import problem_of
from rabbitllm.cli._spelling import runs

MODEL_PANEL, ANSWER_PANEL, SAMPLING_PANEL, SHARDS_PANEL = "Model and split", "Prompt and answer", "Sampling", "Shards"
CACHE_PANEL, LIMITS_PANEL, NETWORK_PANEL, HOSTS_PANEL = "KV cache", "Limits", "Network", "Several machines"
OTHER_PANEL, RARE_PANEL = "Other options", "Rarely needed"
PANELS = (
    *(MODEL_PANEL, ANSWER_PANEL, SAMPLING_PANEL, SHARDS_PANEL, CACHE_PANEL),
    *(LIMITS_PANEL, NETWORK_PANEL, HOSTS_PANEL, OTHER_PANEL, RARE_PANEL),
)
"""In the order of the help. A command whose options are of one panel has no panels."""

model_option = partial(Option, rich_help_panel=MODEL_PANEL)
answer_option = partial(Option, rich_help_panel=ANSWER_PANEL)
sampling_option = partial(Option, rich_help_panel=SAMPLING_PANEL)
shards_option = partial(Option, rich_help_panel=SHARDS_PANEL)
cache_option = partial(Option, rich_help_panel=CACHE_PANEL)
limits_option = partial(Option, rich_help_panel=LIMITS_PANEL)
network_option = partial(Option, rich_help_panel=NETWORK_PANEL)
hosts_option = partial(Option, rich_help_panel=HOSTS_PANEL)
rare_option = partial(Option, rich_help_panel=RARE_PANEL)
"""`typer.Option`, one for each panel; an option that names no panel stands in `OTHER_PANEL`."""


NEVER_SUGGESTED = {"--delete-original", "--sequential", "--overwrite", "--only-copy", "--yes"}
"""Options that delete or replace files: a typing error must not lead to one."""
OTHER_WORDS = {"remove": "rm", "delete": "rm", "list": "ls", "generate": "run"}
"""Names of commands in other programs, and ours."""


class _InWords:
    """The common part of commands and their group."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except Exception as error:
            if near := getattr(error, "possibilities", None):
                error.possibilities = [name for name in near if name not in NEVER_SUGGESTED]  # type: ignore[attr-defined]
            refused: Any = error.__cause__
            if hasattr(refused, "errors"):  # of pydantic, by which typer converts values
                error.message = f"{problem_of(refused.errors()).rstrip('.')}."  # type: ignore[attr-defined]
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        panels = {id(parameter): getattr(parameter, "rich_help_panel", None) for parameter in parameters}
        has_panels = len({*panels.values()} - {None}) > 1
        for parameter in parameters:
            parameter._get_number_range_help_str = lambda: None  # "[x>=1]" takes the width of the text
            if parameter.param_type_name == "argument":
                parameter.metavar = parameter.metavar or parameter.name.upper()
                parameter.display_type_rich = lambda ctx: ""
                continue
            parameter.metavar = "" if getattr(parameter, "is_flag", False) else parameter.metavar or word_of(parameter)
            parameter.rich_help_panel = (panels[id(parameter)] or OTHER_PANEL) if has_panels else None
        order = dict(zip(PANELS, range(len(PANELS)), strict=True))
        return sorted(parameters, key=lambda parameter: order.get(str(getattr(parameter, "rich_help_panel", "")), -1))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


class CommandInWords(_InWords, TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        runs(self, ctx.find_root().command)
        return super().parse_args(ctx, args)


class GroupInWords(_InWords, TyperGroup):
    """A group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if args[0] in OTHER_WORDS and hasattr(error, "message"):
                error.message = f"No such command {args[0]!r}. Did you mean {OTHER_WORDS[args[0]]!r}?"
            raise


def word_of(option: Any) -> str:
    """The word for the value of an option that declares none."""
    described = getattr(option, "type_descriptor", None)
    type_name = described.annotation.__name__ if described is not None else option.type.name
    return "N" if type_name in ("int", "integer", "float") else "TEXT"
