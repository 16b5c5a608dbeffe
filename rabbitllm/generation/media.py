"""Pictures and sounds of prompts, from files and URLs. `template` gives them to the model's processor.

A message of a prompt with pictures has a list of parts as its content:

    {"type": "text", "text": …} | {"type": "image", "file": MediaFile} | {"type": "audio", "file": MediaFile}
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import MediaError
from rabbitllm.formats.bounded import read_regular
from rabbitllm.formats.media_file import MAX_BYTES

Kind = Literal["image", "audio"]
WORDS: Mapping[str, str] = {"image": "pictures", "audio": "sounds"}
MAX_FILES = 64
"""The most pictures and sounds of a prompt."""


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A picture or a sound, not decoded.

    Attributes:
        kind: "image" or "audio".
        data: content of the file.
        name: its name in messages.
    """

    kind: Kind
    data: bytes
    name: str


def media_file(kind: Kind, path: Path, name: str | None = None) -> MediaFile:
    """A file of the user.

    Args:
        kind: "image" or "audio".
        path: path of the file.
        name: its name in messages; None for its path.

    Raises:
        MediaError: it cannot be read, is not a regular file, or is too large.
    """
    shown = harmless(name or str(path))

    remedy = f"Use the path of a file of at most {MAX_BYTES:,} bytes."
    try:
        data = read_regular(
            path, MAX_BYTES, lambda problem: MediaError(f"{shown} cannot be used: it {problem}.", remedy)
        )
    except OSError as error:
        raise MediaError(f"{shown} cannot be read: {error.strerror}.", remedy) from None
    except MediaError:
        raise
    except ValueError:
        raise MediaError(f"{shown} cannot be read: it is not a valid path.", remedy) from None
    return MediaFile(kind, data, shown)


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
        name: its name in messages.

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
            f"{name} is a web URL. Web URLs are not fetched.", "Send the content itself in a data: URL with base64."
        )
    raise MediaError(
        f"{name} is not a data: URL; it begins with {harmless(url[:16])!r}.", "Use data:image/png;base64,…"
    )


def openai_part(part: Mapping[str, Any], where: str, folder: Path | None = None) -> dict[str, Any] | None:
    """A part of a message in OpenAI's form as one of this module; None if it is neither a picture nor a sound.

        {"type": "image_url", "image_url": {"url": …, "detail": "auto"}}
        {"type": "input_audio", "input_audio": {"data": …, "format": "wav"}}

    (https://platform.openai.com/docs/api-reference/chat/create)

    Args:
        part: the part.
        where: its name in messages.
        folder: see `media_of_url`.

    Raises:
        MediaError: it is malformed, or its file cannot be read.
    """
    kind, content = part.get("type"), part.get(str(part.get("type")))
    if kind == "image_url":
        url = content if isinstance(content, str) else content.get("url") if isinstance(content, Mapping) else None
        detail = content.get("detail") if isinstance(content, Mapping) else None
        if not isinstance(url, str):
            raise MediaError(f"{where} has no url; expected image_url with a url.", "Add the url.")
        if detail not in (None, "auto", "high"):
            raise MediaError(f"{where} has the detail {harmless(str(detail), 20)}; expected auto.", "Omit it.")
        return {"type": "image", "file": media_of_url("image", url, folder, where)}
    if kind == "input_audio":
        data = content.get("data") if isinstance(content, Mapping) else None
        if not isinstance(content, Mapping) or not isinstance(data, str) or content.get("format") != "wav":
            raise MediaError(f"{where} is not a WAV sound; expected input_audio with data and format wav.", "Use WAV.")
        return {"type": "audio", "file": media_of_url("audio", f"data:audio/wav;base64,{data}", None, where)}
    return None


def text_of_parts(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """The content of a message: one text if all of its parts are texts, else the parts."""
    has_media = any(part["type"] != "text" for part in parts)
    return list(parts) if has_media else "".join(part["text"] for part in parts)


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
    refused = MediaError(f"{name} is outside the allowed folder.", "Name a file in that folder.")
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (ValueError, OSError):
        raise refused from None
    if parts.netloc not in ("", "localhost") or not inside:
        raise refused
    return path


def files_in(messages: Sequence[Mapping[str, Any]]) -> list[MediaFile]:
    """The pictures and sounds of messages, in their order."""
    contents = (message.get("content") for message in messages)
    return [
        part["file"] for content in contents if isinstance(content, list) for part in content if part["type"] != "text"
    ]
