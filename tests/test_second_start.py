"""A second start, in a process of its own, compiles nothing and answers the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tiny_checkpoint import tiny_checkpoint

START = """
import json, sys
from collections import Counter
import jax.monitoring
count = Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: count.update([event]))
from pagedjax import LLM, SamplingParams
llm = LLM(
    sys.argv[1], max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, page_size=8,
    num_pages=20, swap_space=0.001,
)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=2)
answers = llm.generate([[5, 6, 7], [8] * 20], params, use_tqdm=False)
llm.engine.runner.programs.wait()
print(json.dumps({
    "compiled": count["/jax/core/compile/backend_compile_duration"],
    "lowered": count["/jax/core/compile/jaxpr_to_mlir_module_duration"],
    "tokens": [[sample.token_ids for sample in answer.outputs] for answer in answers],
    "report": llm.report.to_dict(),
}))
"""


def start(model: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name
    }
    root = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-c", START, str(model)],
        env=environment | {"PAGEDJAX_CACHE_DIR": str(cache), "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output)


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Nor do two first starts at once, which keep the same programs, disturb each other."""
    model, cache = tiny_checkpoint(tmp_path / "model"), tmp_path / "cache"
    first, beside = [told(it) for it in [start(model, cache), start(model, cache)]]
    assert first["report"]["num_compiled"] > 0
    assert first["compiled"] == first["report"]["num_compiled"]
    second = told(start(model, cache))
    assert (second["compiled"], second["lowered"]) == (0, 0)
    assert second["report"]["num_compiled"] == 0
    assert second["report"]["num_programs"] == first["report"]["num_programs"]
    assert second["tokens"] == first["tokens"] == beside["tokens"]
    names = {it["name"]: it["seconds"] for it in second["report"]["programs"]}
    assert all(seconds > 0 for seconds in names.values())
    assert not list(cache.glob("*.tmp"))
