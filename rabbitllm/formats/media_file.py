"""Reads untrusted pictures and sounds: bounded before they are decoded, with the pixels of transformers' `load_image`.

A picture becomes RGB with 8 bits for each value, upright by its EXIF orientation (Exif 2.32, tag 0x0112). Transparency
is dropped, and its colours are kept. Of an animation the first frame is used. Values of 16 bits lose the lower 8.

A sound is a WAV file of PCM at the rate that the model expects. Its channels are averaged.
"""

from __future__ import annotations

import contextlib
import io
import struct
import wave
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import MediaError, missing_package

if TYPE_CHECKING:
    from PIL.Image import Image

Samples: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64_000_000
"""Limit of the pixels of all pictures of a prompt; decoded they take three bytes each."""
MAX_BYTES = 64 << 20
"""Limit of a file."""
MAX_SECONDS = 3600.0
"""Limit of a sound."""
_WEBP_SIZES = {b"VP8X": 24, b"VP8 ": 26, b"VP8L": 21}
"""Kind of the first chunk -> offset of the picture's size (https://developers.google.com/speed/webp/docs/riff_container)."""
_KNOWN = {
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\1\0": "ICO",
    b"8BPS": "PSD",
    b"<!DO": "HTML",
    b"<htm": "HTML",
    b"\xff\xd8": "a damaged JPEG",
    b"\x89PNG": "a damaged PNG",
    b"GIF8": "a damaged GIF",
    b"RIFF": "a damaged WebP, or a sound",
    b"BM": "a damaged BMP",
}
_ADVICE = f"Use a picture in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."


def read_picture(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> Image:
    """The picture in a file, in RGB.

    Args:
        data: the content of a file.
        name: its name in messages.
        max_pixels: maximum number of pixels, checked before they are decoded.

    Raises:
        MediaError: it is in no format of `FORMATS`, too large, damaged or truncated.
        MissingPackageError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise missing_package("Pictures need", "Pillow", "pictures") from None
    name = harmless(name)
    _check_size(data, name)
    _check_pixels(_webp_size(data), name, max_pixels)  # its decoder reserves memory when it is opened
    try:
        picture: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_pixels(picture.size, name, max_pixels)
        picture.load()
    except UnidentifiedImageError:
        raise MediaError(f"{name} is not a picture that can be read: it is {_kind_of(data)}.", _ADVICE) from None
    except Image.DecompressionBombError:
        raise MediaError(f"{name} has more than {max_pixels:,} pixels.", "Use a smaller picture.") from None
    except MediaError:
        raise
    except Exception as error:  # damaged files make Pillow raise any error
        said = harmless(str(error) or type(error).__name__).rstrip(".")
        raise MediaError(f"{name} is a damaged or truncated picture: {said}.", "Save it again.") from None
    with contextlib.suppress(Exception):  # without a valid orientation it is upright
        picture = ImageOps.exif_transpose(picture)
    return _in_rgb(picture)


def _in_rgb(picture: Any) -> Image:
    from PIL import Image

    if picture.mode == "I" or picture.mode.startswith("I;16"):
        values = np.asarray(picture).astype(np.int64)
        return Image.fromarray((values.clip(0, 0xFFFF) >> 8).astype(np.uint8), "L").convert("RGB")
    converted: Image.Image = picture.convert("RGB")
    return converted


def _check_size(data: bytes, name: str) -> None:
    if not data:
        raise MediaError(f"{name} is empty.", "Use a file with content.")
    if len(data) > MAX_BYTES:
        raise MediaError(f"{name} has {len(data):,} bytes; at most {MAX_BYTES:,} are read.", "Use a smaller file.")


def _check_pixels(size: tuple[int, int], name: str, limit: int) -> None:
    width, height = size
    if width * height > limit:
        raise MediaError(
            f"{name} has {width:,} x {height:,} pixels; the pictures of a prompt may have {MAX_PIXELS:,} together.",
            "Use smaller pictures.",
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height of a WebP file; (0, 0) for other files."""
    pos = _WEBP_SIZES.get(data[12:16])
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or pos is None or len(data) < pos + 6:
        return 0, 0
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[pos : pos + 3], "little"), 1 + int.from_bytes(data[pos + 3 : pos + 6], "little")
    if data[12:16] == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, pos)
        return width & 0x3FFF, height & 0x3FFF
    bits = int.from_bytes(data[pos : pos + 4], "little")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


def _kind_of(data: bytes) -> str:
    head = data[:16].lstrip()
    if data[4:8] == b"ftyp":
        return "HEIC, AVIF or a video"
    file_format = next((name for magic, name in _KNOWN.items() if head.lower().startswith(magic.lower())), None)
    return file_format or "in no known format"


def read_sound(data: bytes, name: str, rate: int) -> Samples:
    """A sound as samples from -1 to 1, float32 of shape (samples,).

    Args:
        data: the content of a WAV file of PCM with 8, 16, 24 or 32 bits.
        name: its name in messages.
        rate: samples a second that the model expects.

    Raises:
        MediaError: it is no such file, has another rate, is too long, damaged or truncated.
    """
    name = harmless(name)
    _check_size(data, name)
    advice = f"Convert it: ffmpeg -i IN -ac 1 -ar {rate} -c:a pcm_s16le OUT.wav"
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, actual_rate, frames = file.getparams()[:4]
            raw = file.readframes(frames)
    except Exception as error:  # damaged files make `wave` raise several kinds
        said = harmless(str(error) or type(error).__name__).rstrip(".")
        raise MediaError(f"{name} is not a sound that can be read ({said}); expected WAV with PCM.", advice) from None
    if actual_rate != rate:
        raise MediaError(f"{name} has {actual_rate:,} samples a second; this model expects {rate:,}.", advice)
    if len(raw) != frames * channels * width or not raw:
        raise MediaError(f"{name} is a truncated sound: it has {len(raw):,} bytes of samples.", "Save it again.")
    if frames > MAX_SECONDS * rate:
        raise MediaError(f"{name} is longer than {MAX_SECONDS:,.0f} s.", "Use a shorter sound.")
    samples: Samples = _samples(raw, width).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return samples


def _samples(raw: bytes, width: int) -> Samples:
    if width == 1:  # the only one without a sign
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return padded.reshape(-1).view("<i4").astype(np.float32) / np.float32(1 << 31)
    return np.frombuffer(raw, np.dtype(f"<i{width}")).astype(np.float32) / np.float32(1 << (8 * width - 1))
