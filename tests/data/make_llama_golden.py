"""Writes llama_golden.json with transformers 5.24.0 and torch 2.13.0, which no test needs.

    python -m venv V && V/bin/pip install torch==2.13.0 transformers==5.24.0 numpy
    V/bin/python tests/data/make_llama_golden.py

For each config: inverse frequencies and attention factor of the rotary embedding, and the logits
of the tiny random model of `tests/models/checkpoints.py` for its tokens, in float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models"))

from checkpoints import tiny_config, tiny_tensors, tiny_tokens  # noqa: E402  # pyright: ignore

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3_as_released": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "head_dim": 64,
        "rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    },
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn_with_everything": {
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "truncate": False,
        },
    },
    "yarn_own_attention_factor": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8}
    },
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "mistral_sliding_window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 5,
    },
}


def golden(changes: dict[str, Any]) -> dict[str, Any]:
    """What transformers computes for one config."""
    config = tiny_config(**changes)
    is_mistral = config["model_type"] == "mistral"
    kinds = (MistralConfig, MistralForCausalLM) if is_mistral else (LlamaConfig, LlamaForCausalLM)
    theirs = kinds[0](**{k: v for k, v in config.items() if k not in ("torch_dtype",)})
    theirs._attn_implementation = "eager"
    model = kinds[1](theirs).to(torch.float64).eval()
    state = {name: torch.tensor(t).double() for name, t in tiny_tensors(config).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    rotary = model.model.rotary_emb
    inv_freq = rotary.inv_freq.float().tolist()
    with torch.no_grad():
        logits = model(torch.tensor(tiny_tokens(config))[None].long()).logits[0]
    return {
        "changes": changes,
        "inverse_frequencies": inv_freq,
        "attention_factor": float(rotary.attention_scaling),
        "last_logits": [[round(x, 7) for x in row] for row in logits[-2:].tolist()],
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    cases = {name: golden(changes) for name, changes in CONFIGS.items()}
    (HERE / "llama_golden.json").write_text(json.dumps(cases, indent=1) + "\n")
