"""The private parts of transformers by which GGUF files are read; see `engine/transformers_api.py`."""

from __future__ import annotations

from rabbitllm.base.transformers_version import check_call, checked_parts

with checked_parts():
    from transformers.conversion_mapping import get_model_conversion_mapping as get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming as WeightRenaming
    from transformers.core_model_loading import rename_source_key as rename_source_key
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING as GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_ARCHS as GGUF_ARCHS
    from transformers.integrations.gguf import get_gguf_config as get_gguf_config
    from transformers.integrations.gguf import read_gguf_metadata as read_gguf_metadata
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS as GGUF_PRE_TOKENIZER_SPLITS,
    )
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        select_tokenizer_builder as select_tokenizer_builder,
    )
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS as TENSOR_PROCESSORS
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor as TensorProcessor
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map as get_gguf_hf_weights_map
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint as load_gguf_checkpoint

    check_call(get_gguf_config, "metadata", "names")
    check_call(get_gguf_hf_weights_map, "model", "processor")
    check_call(load_gguf_checkpoint, "path", return_tensors="")
    check_call(rename_source_key, "source", "renamings", "converters")
    check_call(select_tokenizer_builder, "architecture", "model")
    check_call(TensorProcessor.process, "self", weights="", name="", tensor_key_mapping="", parsed_parameters="")
