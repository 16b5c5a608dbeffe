"""The report of `rabbitllm doctor` as text. Decides nothing.

The layout is for 80 columns. A terminal gets colours and wrapped lines; elsewhere each is one plain line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import counted, harmless, large, put, put_fact, shortened, size, speed
from rabbitllm.estimate.doctor.records import (
    AtCompression,
    Hub,
    MachineInfo,
    Memory,
    ModelEstimate,
    Package,
    Processor,
    Report,
)
from rabbitllm.estimate.report import moment
from rabbitllm.quant.schemes import COMPRESSIONS
from rabbitllm.storage.folders import Folder

_CELL = 17
_NAME = 21
_SIZE = 8
_MARKS = {"standard": "", "sequential_ahead": ", seq.", "sequential_file": ", seq.", "sequential_stream": ", stream"}
_ROUTES = ("standard", "sequential_file", "sequential_stream")
_LEGEND = (
    "seq.: fits only with --sequential; stream: only with --sequential, which then",
    "streams the shards; no: does not fit, and needs this much disk",
    "rabbitllm plan MODEL also shows auto: bits by tensor for this memory and disk",
)
_LEGEND_OF_ALL = (
    "standard, sequential, stream: peak disk use; sequential: one shard at a time;",
    "stays: resident in memory or on GPUs; read: per token, from disk or page cache",
)


def show(report: Report, console: Console, *, every: bool = False) -> None:
    """Print a report.

    Args:
        report: the report.
        console: the console to print to.
        every: print all values of each model, instead of a line for each.
    """
    put(console, Text(f"RabbitLLM {report.version} on this machine", "bold"))
    console.print()
    for name, value in _machine_values(report.machine):
        put_fact(console, name, value)
    for failure in report.failures:
        put(console, Text(f"not checked: {failure.what} ({harmless(failure.problem)})", "yellow"))
    if report.models:
        console.print()
        _show_models(console, report, every)
    console.print()
    _show_advice(console, report)


# The machine.


def _machine_values(machine: MachineInfo) -> Iterator[tuple[str, str]]:
    if machine.memory is not None:
        yield "memory", _memory(machine.memory)
    if machine.processor is not None:
        yield "processor", _processor(machine.processor)
    if machine.gpus is not None:
        yield from _gpus(machine)
    if machine.host is not None:
        yield "this is", f"{machine.host.name}: {'; '.join(machine.host.hints)}"
    yield from _folders(machine.folders)
    if machine.hub is not None:
        yield "hub", _hub(machine.hub)
    if machine.packages:
        yield "packages", _packages(machine.packages)
    for index, rate in enumerate(machine.rates):
        yield "" if index else "measured", f"{speed(rate.bytes_per_second)} {rate.what}"


def _memory(memory: Memory) -> str:
    text = f"{size(memory.total)}, {size(memory.free)} free"
    named = [(f"a control group (v{group.version})", group.limit, group.room) for group in memory.groups]
    named += [(group.name, group.limit, group.room) for group in memory.limits]
    for name, limit, room in named:
        if limit < memory.total:
            text += f"; {name} allows {size(limit)}, {size(room)} of it free"
    return text


def _processor(processor: Processor) -> str:
    present = ", ".join(name for name, has in processor.instructions.items() if has)
    absent = ", ".join(name for name, has in processor.instructions.items() if not has)
    instructions = "; ".join(filter(None, (present, absent and f"no {absent}")))
    cores = f"{processor.usable:g} of {counted(processor.cores, 'core')}"
    return f"{harmless(processor.name)}, {cores}" + (f": {instructions}" if instructions else "")


def _gpus(machine: MachineInfo) -> Iterator[tuple[str, str]]:
    assert machine.gpus is not None
    if not machine.gpus.found:
        yield "GPU", "none usable by torch" if machine.gpus.driver else "none"
    for gpu in machine.gpus.found:
        major, minor = gpu.capability
        dtype = "bfloat16" if gpu.bf16 else "float16: it has no bfloat16"
        room = f"{size(gpu.free)} of {size(gpu.total)} free"
        yield "GPU", f"{gpu.device}, {harmless(gpu.name)}, {room}, capability {major}.{minor}, computes in {dtype}"


def _folders(folders: Sequence[Folder]) -> Iterator[tuple[str, str]]:
    first_use: dict[int, str] = {}
    for index, folder in enumerate(folders):
        if folder.disk in first_use:
            room = f"the same disk as {first_use[folder.disk]}"
        else:
            fs = f", {folder.filesystem}" if folder.filesystem else ""
            room = f"{size(folder.free)} free of {size(folder.total)}{fs}" + (", in RAM" if folder.in_memory else "")
        first_use.setdefault(folder.disk, folder.uses[0])
        quota = f", {size(folder.quota)} at most" if folder.quota is not None else ""
        access = "" if folder.writable else ", not writable"
        path = shortened(folder.path)
        yield "" if index else "disks", f"{' and '.join(folder.uses)}: {room}{quota}{access} ({path})"


def _hub(hub: Hub) -> str:
    token = "token set" if hub.token else "no token"
    if hub.offline:
        return f"{hub.endpoint}, not checked: HF_HUB_OFFLINE is set; {token}"
    if not hub.reachable:
        return f"{hub.endpoint} does not answer; {token}"
    return f"{hub.endpoint} answers in {moment(hub.seconds)}; {token}"


def _packages(packages: Sequence[Package]) -> str:
    usable = [package for package in packages if package.sound]
    main = ("torch", "transformers", "bitsandbytes")
    shown = ", ".join(f"{package.name} {package.found}" for package in usable if package.name in main)
    absent = [f"{package.name} ({package.brings})" for package in packages if package.optional and not package.found]
    text = f"{len(usable)} of {len(packages)} usable" + (f", such as {shown}" if shown else "")
    return text + (f"; optional, not installed: {', '.join(absent)}" if absent else "")


# Models.


def _show_models(console: Console, report: Report, every: bool) -> None:
    timed = any(choice.generation for model in report.models for choice in model.at)
    title = f"seconds per token on {', '.join(report.devices)}" if timed else "size of the layer files"
    put(console, Text(f"Models that fit, and {title}", "bold"))
    if every:
        for model in report.models:
            _show_model(console, model)
        console.print()
        for line in _LEGEND_OF_ALL:
            put(console, Text(line, "dim"))
        return
    shown = COMPRESSIONS if console.width >= _NAME + _SIZE + len(COMPRESSIONS) * _CELL else COMPRESSIONS[:-1]
    width = max(_NAME, *(len(_name(model)) + 1 for model in report.models))
    if console.is_terminal:
        width = max(_NAME, min(width, console.width - _SIZE - len(shown) * _CELL))
    head = f"{'':<{width}}{'size':>6}  " + "".join(f"{name or 'as published':<{_CELL}}" for name in shown)
    put(console, Text(head.rstrip(), "dim"))
    for model in report.models:
        put(console, _line(model, shown, timed, width))
    for line in _LEGEND:
        put(console, Text(line, "dim"))


def _name(model: ModelEstimate) -> str:
    name = model.name.replace("-Instruct", "")
    return f"{name} ({model.quantized})" if model.quantized else name


def _line(model: ModelEstimate, shown: Sequence[str | None], timed: bool, width: int) -> Text:
    name = _name(model)
    name = name if len(name) < width else harmless(name, width - 2)
    billions = model.parameters / 1e9
    parameters = f"{billions:.1f} B" if billions < 99.5 else f"{billions:.0f} B"
    line = Text.assemble((f"{name:<{width}}", "bold"), f"{parameters:>6}  ")
    choices = {choice.compression: choice for choice in model.at}
    for compression in shown:
        cell, style = _cell(choices[compression], timed) if compression in choices else ("", "")
        line.append(cell, style)
        line.append(" " * (_CELL - len(cell)))
    line.rstrip()
    return line


def _cell(choice: AtCompression, timed: bool) -> tuple[str, str]:
    """Return the cell of a model at a compression, and its colour."""
    if choice.route is None:
        return f"no: {_rough(min(need.disk_bytes for need in choice.needs))}", "red"
    value = moment(choice.token_seconds) if timed else _rough(choice.output_bytes)
    return value + _MARKS[choice.route], "yellow" if _MARKS[choice.route] else "green"


def _rough(nbytes: int) -> str:
    return f"{nbytes / 1e9:.0f} GB" if nbytes >= 99.5e9 else f"{nbytes / 1e9:.1f} GB"


def _show_model(console: Console, model: ModelEstimate) -> None:
    console.print()
    quantized = f", {model.quantized}" if model.quantized else ""
    sizes = f": {large(model.parameters)} parameters, {size(model.checkpoint_bytes)} as published{quantized}"
    put(console, Text.assemble((model.repository, "bold"), sizes))
    heads = ("standard", "sequential", "stream", "fits by", "stays", "read", "a token")
    put(console, Text(_columns("GB", *heads), "dim"))
    for choice in model.at:
        needs = {need.route: need.disk_bytes for need in choice.needs}
        disk = [f"{needs[route] / 1e9:,.1f}" for route in _ROUTES]
        route = "stream" if choice.route == "sequential_stream" else (choice.route or "nothing").split("_")[0]
        gen = choice.generation
        stays, read = (f"{gen.stays_bytes / 1e9:,.1f}", f"{gen.read_bytes / 1e9:,.1f}") if gen else ("", "")
        name = choice.compression or ("as published" if model.quantized else "uncompressed")
        row = _columns(name, *disk, route, stays, read, moment(choice.token_seconds))
        put(console, Text(row, "red" if choice.route is None else ""))
        if choice.problem is not None:
            put(console, Text(f"  no speed estimate: {harmless(choice.problem)}", "yellow"))


def _columns(name: str, *values: str) -> str:
    widths = (10, 12, 9, 12, 8, 9, 9)
    lead = f"  {name:<13}" if name != "GB" else f"{name:>15}"
    return lead + "".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


# Advice.


def _show_advice(console: Console, report: Report) -> None:
    for advice in report.advice:
        head = ("missing: ", "bold red") if advice.essential else ("advice: ", "yellow")
        put(console, Text.assemble(head, harmless(advice.text, 500)))
        if advice.command is not None:
            console.print(Text(f"    {harmless(advice.command, 500)}"), soft_wrap=True)
    if report.advice:
        console.print()
    if report.can_run:
        put(console, Text("This machine can run models.", "bold green"))
    else:
        put(console, Text("This machine cannot run models until this is fixed.", "bold red"))
    put(console, Text(f"Times are estimates. The checks took {report.seconds:.1f} s.", "dim"))
