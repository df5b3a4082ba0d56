#!/usr/bin/env python3
"""Writes a GGUF file's weights, dequantised, in the formats that other engines read.

Makes `OUT/hf-DTYPE/` (Hugging Face's layout: vLLM, transformers, and optimum-intel, which turns it
into OpenVINO's) and `OUT/gguf-DTYPE.gguf` (llama.cpp) for each dtype, so that all engines of a
comparison multiply the very same numbers. Llama models only. Needs pagedjax[gguf].
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import gguf  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from pagedjax import ConfigError, PagedJaxError  # noqa: E402
from pagedjax.tokenizer import TextTokenizer  # noqa: E402
from pagedjax.weights import resolve_model  # noqa: E402

DTYPES = {
    "float32": (np.dtype(np.float32), gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (
        np.dtype(ml_dtypes.bfloat16),
        gguf.GGMLQuantizationType.BF16,
        gguf.LlamaFileType.MOSTLY_BF16,
    ),
}
# GGUF's name of a tensor -> Hugging Face's. `{}` is the layer.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.weight")


def main() -> int:
    """Reads once, writes each dtype."""
    args = _arguments()
    try:
        reader = gguf.GGUFReader(_source(args.model))
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        for dtype in args.dtype.split(","):
            print(write_hf(reader, metadata, dtype, args.out / f"hf-{dtype}"))
            print(write_gguf(reader, metadata, dtype, args.out / f"gguf-{dtype}.gguf"))
    except PagedJaxError as error:
        print(f"export_model: {error}", file=sys.stderr)
        return 2
    return 0


def write_hf(reader: Any, metadata: dict[str, Any], dtype: str, folder: Path) -> Path:
    """Config, weights and tokenizer in Hugging Face's layout; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        name, kind = hf_name(tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            values = to_halves(values, heads[kind])
        tensors[name] = np.ascontiguousarray(values.astype(DTYPES[dtype][0]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(metadata, dtype, tied="lm_head.weight" not in tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(metadata, folder)
    return folder


def write_gguf(reader: Any, metadata: dict[str, Any], dtype: str, path: Path) -> Path:
    """The same file with its matrices in `dtype`; vectors stay float32, as llama.cpp wants them."""
    _, kind, file_type = DTYPES[dtype]
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    dropped = {"general.architecture", "general.file_type", "general.quantization_version"}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in dropped:
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, metadata[key], field.types[0], sub_type)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        chosen = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_name(name: str) -> tuple[str, str]:
    """Hugging Face's name of a GGUF tensor, and what kind of tensor it is.

    Raises:
      ConfigError: no Llama model has such a tensor.
    """
    match = _TENSOR.fullmatch(name)
    if match is None or match[2] not in NAMES:
        raise ConfigError(f"`--model` must be a plain Llama model. Got the tensor {name!r} in it.")
    return NAMES[match[2]].format(match[1]) + ".weight", match[2]


def to_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key matrix [heads * head_dim, in] from rotated pairs to rotated halves."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def hf_config(metadata: dict[str, Any], dtype: str, *, tied: bool) -> dict[str, Any]:
    """`config.json` of a Llama model."""
    of_llama = {key.removeprefix("llama."): value for key, value in metadata.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": of_llama["vocab_size"],
        "hidden_size": of_llama["embedding_length"],
        "intermediate_size": of_llama["feed_forward_length"],
        "num_hidden_layers": of_llama["block_count"],
        "num_attention_heads": of_llama["attention.head_count"],
        "num_key_value_heads": of_llama["attention.head_count_kv"],
        "head_dim": of_llama.get("attention.key_length", of_llama["rope.dimension_count"]),
        "max_position_embeddings": of_llama["context_length"],
        "rope_theta": of_llama["rope.freq_base"],
        "rms_norm_eps": of_llama["attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": dtype,
    }


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    tokenizer = TextTokenizer.from_gguf(metadata)
    tokenizer._backend.save(str(folder / "tokenizer.json"))  # the text is nowhere else
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _source(model: str) -> Path:
    path = resolve_model(model)
    if not path.is_file():
        raise ConfigError(f"`--model` must be a GGUF file. Got {str(path)!r}.")
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write into")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a GGUF file")
    parser.add_argument(
        "--dtype", default="bfloat16,float32", help="comma-separated (default: bfloat16,float32)"
    )
    args = parser.parse_args()
    unknown = [dtype for dtype in args.dtype.split(",") if dtype not in DTYPES]
    if unknown:
        parser.error(f"`--dtype` must be of {', '.join(DTYPES)}. Got {', '.join(unknown)}.")
    return args


if __name__ == "__main__":
    sys.exit(main())
