"""Hugging Face directories: single file, shards, dtypes, the small files, and everything wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

from pagedjax.errors import ModelFormatError
from pagedjax.weights import LoadedModel, load_model
from tests.models.checkpoints import tiny_config, tiny_tensors, write_hf

SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = tiny_config()
    return write_hf(tmp_path / "tiny", config, tiny_tensors(config))


def parameters(loaded: LoadedModel) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(value[...])
        for path, value in nnx.to_flat_state(nnx.state(loaded.model))
    }


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    replaced = change(header)
    text = replaced if isinstance(replaced, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_parameters_hold_the_files_rows(directory: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    loaded = load_model(directory)
    got = parameters(loaded)
    attention = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    np.testing.assert_array_equal(got["layers.1.qkv.weight"], np.concatenate(attention))
    np.testing.assert_array_equal(got["head.weight"], tensors["lm_head.weight"])
    assert (loaded.name, str(loaded.dtype)) == ("tiny", "float32")
    assert loaded.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert loaded.directory == directory


def test_shards_equal_a_single_file(directory: Path, tmp_path: Path) -> None:
    config = tiny_config()
    sharded = write_hf(tmp_path / "sharded", config, tiny_tensors(config), num_shards=3)
    whole, parts = parameters(load_model(directory)), parameters(load_model(sharded))
    assert whole.keys() == parts.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_auto_is_the_files_dtype_and_numbers_are_kept(dtype: Any, tmp_path: Path) -> None:
    config = tiny_config()
    tensors = {name: t.astype(dtype) for name, t in tiny_tensors(config).items()}
    loaded = load_model(write_hf(tmp_path, config, tensors))
    assert loaded.dtype == np.dtype(dtype)
    got = parameters(loaded)["layers.0.out.weight"]
    np.testing.assert_array_equal(got, tensors["model.layers.0.self_attn.o_proj.weight"])
    assert parameters(load_model(tmp_path, dtype="float32"))["norm.weight"].dtype == np.float32


def test_progress_counts_to_the_models_bytes(directory: Path) -> None:
    calls: list[tuple[int, int]] = []
    loaded = load_model(directory, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (loaded.num_bytes, loaded.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_loading_makes_no_initial_values(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = nnx.Param.__init__
    monkeypatch.setattr(
        nnx.Param, "__init__", lambda self, v, **kw: (made.append(v), real(self, v, **kw))[1]
    )
    load_model(directory)
    assert made
    assert all(isinstance(value, Tracer) for value in made)


def test_generation_config_and_template_are_read(directory: Path) -> None:
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "top_p": None, "top_k": 20, "x": 1}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    templates = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    loaded = load_model(directory)
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (1, (2, 5))
    assert loaded.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert loaded.chat_template_source == "D"
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert load_model(directory).chat_template_source == "{{ messages }}"


def test_tied_files_may_repeat_the_embedding(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert "head.weight" not in parameters(load_model(write_hf(tmp_path, config, tensors)))


def test_all_problems_with_tensors_come_in_one_error(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["extra.weight"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = np.zeros((40, 23), np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((24, 36), np.int8)
    write_hf(tmp_path, config, tensors)
    with pytest.raises(ModelFormatError) as error:
        load_model(tmp_path)
    message = str(error.value)
    assert "5 problem(s)" in message
    assert "2 missing: " in message
    assert "model.norm.weight" in message
    assert "1 unexpected: extra.weight" in message
    assert "lm_head.weight (expected [40, 24], got [40, 23])" in message
    assert "model.layers.1.mlp.down_proj.weight (I8)" in message


def test_truncated_file_names_the_tensors(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=r"truncated: \S+ \(ends at byte \d+, the file at"):
        load_model(directory)


def test_overlapping_tensors_are_refused(directory: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
        header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]

    rewrite_header(directory / "model.safetensors", overlap)
    with pytest.raises(ModelFormatError, match="1 overlapping: "):
        load_model(directory)


def set_dtype(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["dtype"] = "C64"


def set_shape(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [25]


def set_negative(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [-24]


def repeat_key(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()[:-1] + b', "model.norm.weight": {}}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_dtype, "`model.norm.weight` must have a dtype among"),
        (set_shape, "must have data_offsets that are 100 bytes apart"),
        (set_negative, "must have a shape of at most 8 sizes"),
        (repeat_key, "key 'model.norm.weight' comes twice"),
        (lambda _: b"[" * 100_000, "must be a JSON object"),
        (lambda _: b"[1]", "must be a JSON object. Got list"),
        (lambda _: b"\xff\xff\xff", "must be a JSON object"),
    ],
)
def test_damaged_headers_are_refused(change: Any, message: str, directory: Path) -> None:
    rewrite_header(directory / "model.safetensors", change)
    with pytest.raises(ModelFormatError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a git-lfs pointer"),
        (b"PK\x03\x04 something", "a zip or pickle file"),
        (struct.pack("<Q", 2**63) + b"{}", r"must begin with a safetensors header of 2 to 2 bytes"),
    ],
)
def test_mislabelled_weights_say_what_they_look_like(
    content: bytes, message: str, directory: Path
) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFormatError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../outside.safetensors"}, "must map tensor names to file names in the same"),
        ({"a": "pytorch_model.bin"}, "must map tensor names to file names in the same"),
        ([], "must map tensor names to file names"),
        ({"a": "gone.safetensors"}, "1 missing shards: gone.safetensors"),
        ({"model.norm.weight": SHARD}, "not where the index says: "),
    ],
)
def test_wrong_index_is_refused(weight_map: Any, message: str, tmp_path: Path) -> None:
    config = tiny_config()
    write_hf(tmp_path, config, tiny_tensors(config), num_shards=3)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFormatError, match=message):
        load_model(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    write_hf(tmp_path, config, tiny_tensors(config), num_shards=3)
    second = tmp_path / "model-00002-of-00003.safetensors"
    second.write_bytes((tmp_path / SHARD).read_bytes())
    with pytest.raises(ModelFormatError, match=r"in two shards: .*\. \d+ missing: "):
        load_model(tmp_path)


def test_pickles_are_never_read(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"pytorch_model.bin.*loading a pickle runs code"):
        load_model(directory)


def test_directory_without_config_says_so(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelFormatError, match=r"must hold config.json, and does not\.$"):
        load_model(directory)
    (directory / "model.Q8_0.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"It holds model.Q8_0.gguf: give that file itself"):
        load_model(directory)


def test_unknown_dtype_is_refused(directory: Path) -> None:
    with pytest.raises(ModelFormatError, match="`dtype` must be one of auto, float32"):
        load_model(directory, dtype="int8")
