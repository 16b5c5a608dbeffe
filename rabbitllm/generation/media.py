"""Pictures and sounds of prompts: from files and URLs to tensors, by the model's processor.

A message of a prompt with pictures has a list of parts as its content:

    {"type": "text", "text": …} | {"type": "image", "file": MediaFile} | {"type": "audio", "file": MediaFile}

The processor renders its chat template, puts the model's placeholders in the place of each picture, and makes tensors
of the pictures. A text that contains a placeholder is refused: the model would read it as a picture.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import torch

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import MediaError
from rabbitllm.formats.media_file import MAX_BYTES, MAX_PIXELS, read_picture, read_sound
from rabbitllm.generation.request import Prompt, PromptMedia
from rabbitllm.generation.template import bounded_template

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

Kind = Literal["image", "audio"]
WORDS: Mapping[str, str] = {"image": "pictures", "audio": "sounds"}
MAX_FILES = 64
"""The most pictures and sounds of a prompt."""
_NOT_INPUTS = ("input_ids", "attention_mask")
_PLACEHOLDERS = (
    *("image_token", "boi_token", "eoi_token", "fake_image_token", "start_image_token", "end_image_token"),
    *("start_of_img_token", "end_of_img_token", "img_patch_token", "image_break_token", "image_end_token"),
    *("vision_start_token", "vision_end_token", "video_token", "audio_token", "boa_token", "eoa_token"),
    *("audio_bos_token", "audio_eos_token"),
)
"""Attributes of processors and tokenizers with texts that stand for pictures and sounds."""


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A picture or a sound, not decoded.

    Attributes:
        kind: "image" or "audio".
        data: content of the file.
        name: what messages call it.
    """

    kind: Kind
    data: bytes
    name: str


def media_file(kind: Kind, path: Path, name: str | None = None) -> MediaFile:
    """A file of the user.

    Args:
        kind: "image" or "audio".
        path: path of the file.
        name: what messages call it; None for its path.

    Raises:
        MediaError: it cannot be read, is no regular file, or is too large.
    """
    shown = harmless(name or str(path))
    try:  # without waiting: opening a pipe would block until a writer opens it too
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise MediaError(f"{shown} cannot be read: {error.strerror}.", "Use the path of an existing file.") from None
    except ValueError:
        raise MediaError(f"{shown} cannot be read: it is no path.", "Use the path of an existing file.") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MediaError(f"{shown} is not a regular file.", "Use the path of a file.")
        if found.st_size > MAX_BYTES:
            raise MediaError(f"{shown} has {found.st_size:,} bytes; at most {MAX_BYTES:,} are read.", "Shrink it.")
        with open(descriptor, "rb", closefd=False) as file:
            return MediaFile(kind, file.read(MAX_BYTES + 1), shown)
    finally:
        os.close(descriptor)


def media_files(pictures: Sequence[Path], sounds: Sequence[Path]) -> list[MediaFile]:
    """Files of the user: pictures, then sounds.

    Raises:
        MediaError: see `media_file`.
    """
    return [*(media_file("image", path) for path in pictures), *(media_file("audio", path) for path in sounds)]


def media_of_url(kind: Kind, url: str, folder: Path | None, name: str) -> MediaFile:
    """The picture or sound that a URL names. No request is ever sent.

    Args:
        kind: "image" or "audio".
        url: a `data:` URL (RFC 2397) with base64, or a `file:` URL.
        folder: folder whose files may be named; None for none.
        name: what messages call it.

    Raises:
        MediaError: another kind of URL, a malformed one, or a file that is not allowed.
    """
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        return MediaFile(kind, _of_data_url(kind, url, name), name)
    if scheme == "file":
        return media_file(kind, _allowed(url, folder, name), name)
    if scheme in ("http", "https"):
        raise MediaError(
            f"{name} is an address of the web; nothing is fetched from there.",
            "Send the content itself in a data: URL with base64.",
        )
    raise MediaError(f"{name} is no data: URL; it begins with {harmless(url[:16])!r}.", "Use data:image/png;base64,…")


def openai_part(part: Mapping[str, Any], where: str, folder: Path | None = None) -> dict[str, Any] | None:
    """A part of a message in OpenAI's form as one of this module; None if it is neither a picture nor a sound.

        {"type": "image_url", "image_url": {"url": …, "detail": "auto"}}
        {"type": "input_audio", "input_audio": {"data": …, "format": "wav"}}

    (https://platform.openai.com/docs/api-reference/chat/create)

    Args:
        part: the part.
        where: what messages call it.
        folder: see `media_of_url`.

    Raises:
        MediaError: it is malformed, or its file cannot be read.
    """
    kind, given = part.get("type"), part.get(str(part.get("type")))
    if kind == "image_url":
        url = given if isinstance(given, str) else given.get("url") if isinstance(given, Mapping) else None
        detail = given.get("detail") if isinstance(given, Mapping) else None
        if not isinstance(url, str):
            raise MediaError(f"{where} has no url; expected image_url with a url.", "Add the url.")
        if detail not in (None, "auto", "high"):
            raise MediaError(f"{where} has the detail {harmless(str(detail), 20)}; expected auto.", "Omit it.")
        return {"type": "image", "file": media_of_url("image", url, folder, where)}
    if kind == "input_audio":
        data = given.get("data") if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping) or not isinstance(data, str) or given.get("format") != "wav":
            raise MediaError(f"{where} is no sound in WAV; expected input_audio with data and format wav.", "Use WAV.")
        return {"type": "audio", "file": media_of_url("audio", f"data:audio/wav;base64,{data}", None, where)}
    return None


def text_of_parts(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """The content of a message: one text if all of its parts are texts, else the parts."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def _of_data_url(kind: Kind, url: str, name: str) -> bytes:
    head, comma, body = url.partition(",")
    words = head[len("data:") :].split(";")
    if not comma or words[-1].strip().lower() != "base64":
        raise MediaError(f"{name} is a data: URL without base64.", f"Use data:{kind}/…;base64,…")
    if words[0] and not words[0].lower().startswith(f"{kind}/"):
        raise MediaError(f"{name} has the type {harmless(words[0], 40)}; expected {kind}/…", f"Use a {kind}/ type.")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise MediaError(f"{name} has {len(body):,} characters; at most {MAX_BYTES:,} bytes are read.", "Shrink it.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} is not valid base64: {error}.", "Encode the file again.") from None


def _allowed(url: str, folder: Path | None, name: str) -> Path:
    """The file of a `file:` URL, which is inside the folder after links are followed."""
    if folder is None:
        raise MediaError(f"{name} is a file: URL, and no folder is allowed.", "Use a data: URL.")
    refused = MediaError(f"{name} is outside of the folder that is allowed.", "Name a file of that folder.")
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (ValueError, OSError):
        raise refused from None
    if parts.netloc not in ("", "localhost") or not inside:
        raise refused
    return path


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a picture or a sound."""
    return any(True for _ in _files(messages))


def _files(messages: Sequence[Mapping[str, Any]]) -> Iterator[MediaFile]:
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part["file"] for part in content if part["type"] != "text")


def media_prompt(
    model: StreamedModel,
    messages: Sequence[Mapping[str, Any]],
    refused: Callable[[Exception], Exception],
    **more: Any,
) -> Prompt:
    """A conversation with pictures or sounds, up to the beginning of the model's answer.

    Args:
        model: a model with its `processor`.
        messages: each with its `role` and its `content`: a text, or a list of parts; see the module.
        refused: makes the error to raise from the template's own: it rejects these messages, or fails on them.
        more: further variables of the template.

    Raises:
        MediaError: the model takes no such files, or one of them cannot be used.
        ProcessorError, MissingPackageError: the processor cannot be made.
    """
    processor = _processor(model, list(_files(messages)))
    if not getattr(processor, "chat_template", None):
        raise MediaError(
            "The processor of this model has no chat template, so pictures and sounds have no place in a message.",
            "Use --raw with the model's placeholders in the prompt, or add chat_template.jinja to the checkpoint.",
        )
    rate, budget = _rate(processor), _MediaBudget()
    given = [_loaded(message, processor, budget, rate) for message in messages]
    try:
        with bounded_template():
            made = processor.apply_chat_template(
                given, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **more
            )
    except Exception as error:  # templates and processors may raise anything
        raise refused(error) from error
    return _prompt(model, made)


def raw_media_prompt(model: StreamedModel, text: str, files: Sequence[MediaFile]) -> Prompt:
    """A text that has the model's placeholders itself, with its pictures and sounds in their order.

    Raises:
        MediaError: see `media_prompt`; also if there are more or fewer placeholders than files.
        ProcessorError, MissingPackageError: the processor cannot be made.
    """
    processor = _processor(model, files)
    rate, budget = _rate(processor), _MediaBudget()
    pictures = [budget.picture(file) for file in files if file.kind == "image"]
    sounds = [read_sound(file.data, file.name, rate) for file in files if file.kind == "audio"]
    named: dict[str, Any] = {"images": pictures} if pictures else {}
    if sounds:
        named |= {"audio": sounds, "sampling_rate": rate}
    try:
        made = processor(text=text, return_tensors="pt", **named)
    except Exception as error:  # processors may raise anything
        raise MediaError(
            f"The model's processor refuses this prompt: {harmless(str(error), 300)}.",
            f"--raw needs one placeholder ({getattr(processor, 'image_token', '…')}) for each picture in the prompt.",
        ) from error
    return _prompt(model, made)


class _MediaBudget:
    """Decodes the pictures of a prompt within one limit of pixels."""

    def __init__(self) -> None:
        self._left = MAX_PIXELS

    def picture(self, file: MediaFile) -> Any:
        found = read_picture(file.data, file.name, self._left)
        self._left -= found.width * found.height
        return found


def _processor(model: StreamedModel, files: Sequence[MediaFile]) -> Any:
    if len(files) > MAX_FILES:
        raise MediaError(
            f"The prompt has {len(files):,} pictures and sounds; at most {MAX_FILES} are possible.", "Use fewer."
        )
    processor = model.processor
    parts = {"image": "image_processor", "audio": "feature_extractor"}
    for kind in sorted({file.kind for file in files}):
        if getattr(processor, parts[kind], None) is None or getattr(processor, "tokenizer", None) is None:
            raise MediaError(f"This model takes no {WORDS[kind]}.", "Leave them out, or use a model that takes them.")
    return processor


def _rate(processor: Any) -> int:
    return int(getattr(getattr(processor, "feature_extractor", None), "sampling_rate", 16_000))


def _loaded(message: Mapping[str, Any], processor: Any, budget: _MediaBudget, rate: int) -> dict[str, Any]:
    """A message as processors expect it; every content is a list, which all templates for pictures read."""
    content = message.get("content")
    parts: list[dict[str, Any]] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text":
            _refuse_placeholders(part["text"], processor)
            found.append({"type": "text", "text": part["text"]})
        elif part["type"] == "image":
            found.append({"type": "image", "image": budget.picture(part["file"])})
        else:
            found.append({"type": "audio", "audio": read_sound(part["file"].data, part["file"].name, rate)})
    return {**message, "content": found}


def _refuse_placeholders(text: str, processor: Any) -> None:
    """
    Raises:
        MediaError: a text contains a placeholder.
    """
    holders = (getattr(owner, name, None) for name in _PLACEHOLDERS for owner in (processor, processor.tokenizer))
    for holder in holders:
        if isinstance(holder, str) and holder and holder in text:
            raise MediaError(
                f"The text contains {harmless(holder)}, by which this model marks pictures or sounds: it has another "
                "number of them than the prompt.",
                "Leave it out.",
            )


def _prompt(model: StreamedModel, made: Mapping[str, Any]) -> Prompt:
    ids = made["input_ids"]
    tensors = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in made.items()
        if name not in _NOT_INPUTS and isinstance(value, torch.Tensor)
    }
    return Prompt(tuple(int(token) for token in ids[0]), PromptMedia(tensors))
