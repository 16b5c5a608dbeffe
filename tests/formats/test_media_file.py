"""Pictures and sounds of strangers: what is read, what is refused, and how much memory that takes."""

from __future__ import annotations

import io
import struct
import sys
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from rabbitllm.errors import MediaError
from rabbitllm.formats.media_file import MAX_PIXELS, read_picture, read_sound
from tests.support.fresh_process import python
from tests.support.picture_models import RATE, encoded, picture, sound, tone

NAME = "photo"


def chunk(chunk_type: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + chunk_type + data + struct.pack(">I", zlib.crc32(chunk_type + data))


def png(width: int, height: int, rows: int) -> bytes:
    """A PNG file of grey pixels that says its size and has so many rows."""
    body = zlib.compressobj(9)
    data = b"".join(body.compress(bytes(width + 1)) for _ in range(rows)) + body.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """The head of a WebP file of this size, behind which the pixels of a small one follow."""
    inner = encoded(picture(), "WEBP")[12:]
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (width - 1).to_bytes(3, "little")
    body = b"WEBP" + extended + (height - 1).to_bytes(3, "little") + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def rotated(orientation: int) -> bytes:
    """A JPEG whose EXIF says how it is turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(), "JPEG", exif=exif)


def animated(file_format: str) -> bytes:
    return encoded(picture(), file_format, save_all=True, append_images=[picture(1), picture(2)])


RGBA = picture().convert("RGBA")
RGBA.putalpha(Image.linear_gradient("L").resize(RGBA.size))
PICTURES = {
    **{file_format: encoded(picture(), file_format) for file_format in ("PNG", "JPEG", "WEBP", "GIF", "BMP")},
    **{f"orientation {orientation}": rotated(orientation) for orientation in (1, 3, 6, 8)},
    "wrong orientation": rotated(99),
    "alpha": encoded(RGBA),
    "grey with alpha": encoded(RGBA.convert("LA")),
    "palette": encoded(picture().quantize(16)),
    "transparent palette": encoded(RGBA.quantize(16)),
    "black and white": encoded(picture().convert("1")),
    "CMYK": encoded(picture().convert("CMYK"), "JPEG"),
    "one pixel": encoded(picture(size=(1, 1))),
    "animated GIF": animated("GIF"),
    "animated PNG": animated("PNG"),
    "animated WebP": animated("WEBP"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(PICTURES[name])
    expected = load_image(str(tmp_path / "file"))
    image = read_picture(PICTURES[name], NAME)
    assert (image.mode, image.size) == ("RGB", expected.size)
    assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_16_bit_values_lose_the_lower_8() -> None:
    values = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1365
    pixels = np.asarray(read_picture(encoded(Image.fromarray(values)), NAME))
    assert np.array_equal(pixels, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2))


BROKEN = {
    "empty": (b"", "is empty"),
    "text": (b"not a picture at all", "no known format"),
    "PDF": (b"%PDF-1.7\n%", "it is PDF"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is SVG"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
    "TIFF": (encoded(picture(), "TIFF"), "TIFF"),
    "PostScript": (encoded(picture(), "EPS"), "no known format"),
    "truncated JPEG": (PICTURES["JPEG"][:-300], "truncated"),
    "truncated PNG": (PICTURES["PNG"][:-60], "truncated"),
    "truncated GIF": (PICTURES["GIF"][:-200], "truncated"),
    "truncated WebP": (PICTURES["WEBP"][:100], "truncated|damaged"),
    "a wrong sum": (PICTURES["PNG"][:40] + b"\0" + PICTURES["PNG"][41:], "damaged"),
    "too large": (png(8192, 8192, 1), "pixels"),
    "very large": (png(1 << 30, 1 << 30, 0), "pixels"),
    "no pixels": (png(0, 0, 0), "damaged"),
    "WebP too large": (webp(16_384, 16_384), "pixels"),
    "many letters": (
        PICTURES["PNG"][:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27))) + PICTURES["PNG"][33:],
        "damaged",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_picture_is_refused(name: str) -> None:
    data, said = BROKEN[name]
    with pytest.raises(MediaError, match=said):
        read_picture(data, NAME)


BOMBS = """
import resource, sys
from rabbitllm.errors import MediaError
from rabbitllm.formats.media_file import read_picture
small, *bombs = [open(path, "rb").read() for path in sys.argv[1:]]
read_picture(small, "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in bombs:
    try:
        read_picture(data, "bomb")
    except MediaError as error:
        assert "pixels" in str(error), error
    else:
        raise AssertionError("it was read")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in kilobytes")
def test_bombs_take_no_memory(tmp_path: Path) -> None:
    """Files of less than half a megabyte, whose pixels would take 400 MB and 1.6 GB."""
    paths = []
    for index, data in enumerate([PICTURES["PNG"], png(20_000, 20_000, 2_000), webp(16_384, 16_384)]):
        assert len(data) < 500_000
        paths.append(tmp_path / str(index))
        paths[-1].write_bytes(data)
    ran = python(BOMBS, *paths)
    assert int(ran.stdout) < 8 << 10


def test_pictures_share_a_limit() -> None:
    assert read_picture(PICTURES["PNG"], NAME, 90 * 70).size == (90, 70)
    with pytest.raises(MediaError, match=f"{MAX_PIXELS:,} together"):
        read_picture(PICTURES["PNG"], NAME, 90 * 70 - 1)


def test_sound_samples() -> None:
    samples = read_sound(sound(), NAME, RATE)
    assert (samples.dtype, samples.shape) == (np.float32, (RATE // 2,))
    assert np.array_equal(samples, tone(0, RATE // 2).astype(np.float32) / np.float32(32768))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_and_two_channels(width: int) -> None:
    left, right = np.array([0.5, -0.25, 0.0]), np.array([0.25, 0.25, -1.0])
    frames = np.stack([left, right], 1)
    integers = (frames * (1 << (8 * width - 1))).astype(np.int64) + (128 if width == 1 else 0)
    raw = b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in integers.reshape(-1))
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((2, width, RATE, 0, "NONE", ""))
        written.writeframes(raw)
    assert read_sound(file.getvalue(), NAME, RATE).tolist() == [0.375, 0.0, -0.5]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"ID3\x03", "expected WAV"),
        (sound(rate=8000), "expects 16,000"),
        (sound()[:-100], "truncated|can be read"),
        (sound()[:60], "truncated|can be read"),
        (sound(seconds=0), "truncated"),
        (sound()[:20] + b"\x03\0" + sound()[22:], "expected WAV"),
    ],
)
def test_broken_sound_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        read_sound(data, NAME, RATE)
