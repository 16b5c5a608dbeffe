"""The processor of a checkpoint: makes a model's inputs of text, pictures and sounds.

transformers makes it from files of which every split has copies. Processors for pictures need Pillow, and some of them
torchvision. Without torchvision, a processor is made without its part for videos, if its other parts allow it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rabbitllm.base.terminal import error_line
from rabbitllm.errors import ProcessorError, missing_package
from rabbitllm.formats.bounded import read_json

CONFIG = "config.json"
WHOLE = "processor_config.json"
"""May hold the settings of every part."""
PARTS = {
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}
"""Part of a processor -> the file of its settings, unless `WHOLE` has them."""
FILES = (WHOLE, *dict.fromkeys(PARTS.values()))
_PACKAGES = {"torchvision": "torchvision", "Pillow": "PIL", "PIL": "PIL"}
"""Package, as transformers names it -> its module."""


def read_processor(folder: Path, config: Any, trust_remote_code: bool = False) -> Any | None:
    """The processor in a folder; None if the model takes text alone.

    Args:
        folder: folder of the config and the processor's files.
        config: the model's config.
        trust_remote_code: run Python code of the checkpoint.

    Raises:
        ProcessorError: a file is missing or malformed.
        MissingPackageError: a package is missing that the processor needs.
    """
    from transformers import CONFIG_MAPPING, PROCESSOR_MAPPING, PreTrainedTokenizerBase

    class_ = PROCESSOR_MAPPING.get(type(config), None)
    if class_ is None and (folder / CONFIG).is_file():  # the model may be a part of what the folder has
        model_type = read_json(folder / CONFIG).get("model_type")
        class_ = PROCESSOR_MAPPING.get(CONFIG_MAPPING[model_type], None) if model_type in CONFIG_MAPPING else None
    if class_ is None and not any((folder / name).is_file() for name in FILES):
        return None
    if class_ is not None:
        _check_files(folder, class_)
    try:
        processor = _read(folder, class_, trust_remote_code)
    except Exception as error:  # missing packages and malformed files make transformers raise any error
        missing = [name for name, module in _PACKAGES.items() if importlib.util.find_spec(module) is None]
        named = next((name for name in missing if name.lower() in str(error).lower()), None)
        if named is not None:
            raise missing_package("Pictures for this model need", named, "pictures") from error
        raise ProcessorError(
            f"transformers cannot read the processor in {folder}: {error_line(error, 300).rstrip('.')}.",
            f"Download {', '.join(FILES[:2])} again.",
        ) from error
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _read(folder: Path, class_: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError:
        if class_ is None or "video_processor" not in _parts_of(class_):
            raise
    return _without_videos(folder, class_)


def _without_videos(folder: Path, class_: Any) -> Any:
    """A processor without its part for videos, which needs torchvision in every model."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    autos = {
        "tokenizer": AutoTokenizer,
        "image_processor": AutoImageProcessor,
        "feature_extractor": AutoFeatureExtractor,
    }
    settings, _ = class_.get_processor_dict(folder)
    parts = {
        name: autos[name].from_pretrained(folder) if name in autos else None
        for name in class_.get_attributes()
        if name in autos or name == "video_processor"
    }
    more = {name: value for name, value in settings.items() if name not in (*parts, "processor_class", "auto_map")}

    def check(self: Any, name: str, part: Any) -> Any:
        """Check the class of a part; for an absent one transformers fails."""
        return None if part is None else class_.check_argument_for_proper_class(self, name, part)

    body = {"__module__": class_.__module__, "__doc__": class_.__doc__, "check_argument_for_proper_class": check}
    return type(class_.__name__, (class_,), body)(**parts, **more)


def _check_files(folder: Path, class_: Any) -> None:
    """
    Raises:
        ProcessorError: the settings of a part are in no file.
    """
    whole = read_json(folder / WHOLE) if (folder / WHOLE).is_file() else {}
    for part in _parts_of(class_):
        if part == "video_processor" or part not in PARTS or isinstance(whole.get(part), dict):
            continue  # older checkpoints have one file for pictures and videos
        if not (folder / PARTS[part]).is_file():
            raise ProcessorError(
                f"{folder} lacks {PARTS[part]}, which the processor of this model needs.",
                f"Put the checkpoint's {PARTS[part]} (or {WHOLE}) there. Text needs no processor.",
            )


def _parts_of(class_: Any) -> list[str]:
    try:
        return list(class_.get_attributes())
    except ImportError:  # a stand-in of transformers for a class whose package is missing
        return []
