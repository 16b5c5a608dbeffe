"""Where each tensor of a layer goes, and what its file is called."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open

from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.safetensors_file import parse_header
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.schemes import StoredForm, stored_form
from rabbitllm.store.layer_file import LayerLayout, lay_out, layer_file_name

LAYER = LayerName("layers.0", "model.layers.0")


def form(name: str, shape: tuple[int, ...], dtype: str = "BF16", compression: str | None = None) -> StoredForm:
    return stored_form(TensorSpec(name, dtype, shape, "shard", 0, byte_size(dtype, shape)), compression)


def order_of(layout: LayerLayout) -> list[str]:
    return sorted(layout.places, key=lambda name: (layout.places[name], name))


FORMS = [
    form("h.10.weight", (64, 64)),  # 8192 bytes: whole blocks
    form("h.2.weight", (64, 32)),  # 4096 bytes
    form("b", (160,)),  # 320 bytes: a multiple of 64
    form("a", (32,)),  # 64 bytes
    form("c", (7,)),  # 14 bytes: neither
    form("scalar", (), "F32"),
]


def test_order_and_alignment() -> None:
    layout = lay_out(LAYER, FORMS)
    assert order_of(layout) == ["h.2.weight", "h.10.weight", "a", "b", "c", "scalar"]
    assert len(layout.header) == 4096
    assert list(layout.places.values()) == [4096, 8192, 16384, 16448, 16768, 16782]
    assert layout.size == 16786
    assert layout.file_name == "model.layers.0.safetensors"


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_whatever_fills_a_cache_line_starts_on_one(compression: str | None) -> None:
    shapes = [(64, 64), (65, 67), (160, 64), (7,), (64,), (32,), (4096, 3), (1, 4100), (100, 100)]
    forms = [form(f"w{number}", shape, compression=compression) for number, shape in enumerate(shapes)]
    layout = lay_out(LAYER, forms)
    for part in (part for stored in forms for part in stored.parts):
        if part.nbytes % 4096 == 0:
            assert layout.places[part.name] % 4096 == 0
        elif part.nbytes % 64 == 0:
            assert layout.places[part.name] % 64 == 0


def test_layout_depends_on_the_tensors_alone() -> None:
    expected = lay_out(LAYER, FORMS)
    for seed in range(10):
        layout = lay_out(LAYER, random.Random(seed).sample(FORMS, len(FORMS)))
        assert (layout.header, layout.places, layout.size) == (expected.header, expected.places, expected.size)


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_any_safetensors_reader_opens_it(tmp_path: Path, compression: str | None) -> None:
    forms = [
        form(f"w{number}", shape, compression=compression) for number, shape in enumerate([(65, 67), (9,), (0, 5)])
    ]
    layout = lay_out(LAYER, forms)
    (tmp_path / layout.file_name).write_bytes(layout.header.ljust(layout.size, b"\0"))
    with safe_open(tmp_path / layout.file_name, framework="pt") as opened:
        assert set(opened.keys()) == {part.name for stored in forms for part in stored.parts}
    header = parse_header(layout.header[8:], layout.size, "f")
    assert {tensor.name: tensor.offset for tensor in header.tensors} == layout.places


def test_name_that_is_a_part_of_another_tensor() -> None:
    taken = form("w.4bit.absmax", (68,), "F32")
    with pytest.raises(
        InvalidIndexError, match=r"Two tensors of layer layers.0 would be stored as 'w.4bit.absmax'"
    ) as bad:
        lay_out(LAYER, [form("w", (65, 67), compression="4bit"), taken])
    assert "Leave compression out." in str(bad.value)
    assert lay_out(LAYER, [form("w", (65, 67)), taken]).places.keys() == {"w", "w.4bit.absmax"}


# File names


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("model.layers.0", "model.layers.0.safetensors"),
        ("lm_head", "lm_head.safetensors"),
        ("model.embed-tokens_2~", "model.embed-tokens_2~.safetensors"),
        ("../../etc/passwd", "%2E.%2F..%2Fetc%2Fpasswd.safetensors"),
        ("..", "%2E..safetensors"),
        (".hidden", "%2Ehidden.safetensors"),
        ("/abs", "%2Fabs.safetensors"),
        ("a\\b:c*d", "a%5Cb%3Ac%2Ad.safetensors"),
        ("a b", "a%20b.safetensors"),
        ("100%", "100%25.safetensors"),
        ("%2Ehidden", "%252Ehidden.safetensors"),
        ("слой", "%D1%81%D0%BB%D0%BE%D0%B9.safetensors"),
    ],
)
def test_file_name(stem: str, name: str) -> None:
    assert layer_file_name(stem) == name


def test_long_names_are_cut_and_stay_apart() -> None:
    stems = ["x" * 179, "x" * 180, "x" * 181, "x" * 5000, "x" * 5001, "猫" * 100, "猫" * 101, "猫" * 99 + "犬"]
    names = [layer_file_name(stem) for stem in stems]
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) + len(".done") <= 255 for name in names)
    assert names[1] == "x" * 180 + ".safetensors"
    assert names[2].startswith("x" * 160 + "-")


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)


@given(st.lists(st.one_of(TEXT, st.text("./\\%2Ee", min_size=1)), min_size=2, unique=True))
@example([".", "%2E"])
@example(["/", "%2F", "%252F"])
def test_names_are_plain_and_apart(stems: list[str]) -> None:
    names = [layer_file_name(stem) for stem in stems]
    for first, second in itertools.combinations(names, 2):
        assert first != second
    for name in names:
        assert Path(name).name == name
        assert name.isascii()
        assert name.isprintable()
        assert not name.startswith(".")
        assert not set(name) & set('/\\:*?"<>| ')
        assert len(name) <= 200
