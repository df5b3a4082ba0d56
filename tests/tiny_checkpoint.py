"""A tiny model as files, for programs that load one: 30 KiB, a tokenizer of single letters.

Owns what tests of the batch program start in processes of their own; compiles in seconds.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.models.checkpoints import tiny_config, tiny_tensors, write_hf

SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
# One program for every step, so that answers have the same bits however a job was cut.
ENGINE = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "page_size": 8,
    "num_pages": 80,
    "batch_invariant": True,
}


def tiny_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Writes config, weights and tokenizer into `folder`, and returns it."""
    config = tiny_config(num_hidden_layers=1)
    write_hf(folder, config, tiny_tensors(config, seed))
    vocab = {token: i for i, token in enumerate([*SPECIAL, *string.ascii_lowercase, " ", "."])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def arguments() -> list[str]:
    """The engine's sizes as options of scripts/serve_batch.py."""
    found: list[str] = []
    for name, value in ENGINE.items():
        found.append("--" + name.replace("_", "-"))
        if value is not True:
            found.append(str(value))
    return found
