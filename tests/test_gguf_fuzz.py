"""Damaged GGUF files never end the process: they are refused, or load and run."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_fuzz
import pytest
import tiny_models
from gguf_fuzz import Gguf, Value

from beaconkv_gguf import Llama
from beaconkv_gguf.gguf_layout import check_model

TinyPath = Callable[[str], Path]
RUNS = int(os.environ.get("BEACONKV_FUZZ_RUNS", "600"))  # python tests/gguf_fuzz.py for many


@pytest.mark.skipif(sys.platform == "win32", reason="its pipes can't be waited for")
def test_damaged_files_are_refused_or_run(tmp_path: Path) -> None:
    answers = dict(gguf_fuzz.run(range(RUNS), tmp_path))
    bad = [f"{case}: {answer}" for case, answer in answers.items() if gguf_fuzz.is_bad(answer)]
    assert not bad, "\n".join(bad)
    n_refused = sum(answer.startswith("refused") for answer in answers.values())
    assert 0.5 * RUNS < n_refused < 0.98 * RUNS  # else the damage is not of the right kind


# --- what is refused before llama.cpp sees it ---------------------------------------------------


@pytest.mark.parametrize("name", sorted(tiny_models.ALL))
def test_sound_files_pass(tiny_path: TinyPath, name: str) -> None:
    check_model(tiny_path(name))


def test_real_files_pass(smollm2_path: Path, gemma_path: Path) -> None:
    check_model(smollm2_path)
    check_model(gemma_path)


def damaged(source: Path, folder: Path, damage: Callable[[Gguf], None]) -> Path:
    model = gguf_fuzz.read(source)
    damage(model)
    model.lay_out()
    path = folder / "damaged.gguf"
    path.write_bytes(model.header() + model.data)
    return path


def changed(key: str, kind: int, value: Any) -> Callable[[Gguf], None]:
    def damage(model: Gguf) -> None:
        model.pairs = [pair for pair in model.pairs if pair[0] != key.encode()]
        model.pairs.append((key.encode(), Value(kind, value)))

    return damage


U32, F32, STRING = 4, 6, 8


@pytest.mark.parametrize(
    ("name", "key", "kind", "value", "allowed"),
    [
        ("llama", "block_count", U32, 0, "1 to 512"),
        ("llama", "block_count", U32, 513, "1 to 512"),
        ("llama", "nextn_predict_layers", U32, 3, "0 to block_count=2"),
        ("llama", "context_length", U32, 2**31, "0 to 268435456"),
        ("llama", "expert_used_count", U32, 1, "0 to expert_count=0"),
        ("gpt_oss", "expert_used_count", U32, 0, "1 to expert_count=4"),
        ("gpt_oss", "expert_count", U32, 1025, "0 to 1024"),
        ("gpt_oss", "expert_group_count", U32, 4, "0 to 3"),
        ("gpt_oss", "expert_group_count", U32, 3, "a divisor of expert_count=4"),
        ("gpt_oss", "attention.value_length", U32, 32, "a key's size, 64"),
        ("gpt_oss", "attention.value_length_swa", U32, 0, "a key's size, 64"),
        ("gpt_oss", "attention.sliding_window_pattern", U32, 1, "one of 4 layers the window of 64"),
        ("llama", "rope.scaling.type", STRING, b"yawn", "none, linear, yarn, longrope"),
        ("llama", "attention.layer_norm_rms_epsilon", F32, -1.0, "0 or more"),
        ("llama", "attention.layer_norm_rms_epsilon", F32, float("nan"), "0 or more"),
        ("stablelm", "rope.dimension_count", U32, 0, "an even number from 2"),
        ("stablelm", "rope.dimension_count", U32, 15, "an even number from 2"),
        ("stablelm", "rope.dimension_count", U32, 66, "to the size of a head, 64"),
        ("deepseek2", "attention.head_count_kv", U32, 2, "1 with MLA"),
        ("deepseek2", "attention.key_length_mla", U32, 16, "more than 16"),
        ("deepseek2", "attention.key_length", U32, 64, "kv_lora_rank=64 and 16"),
        ("granite_hybrid", "ssm.inner_size", U32, 128, "2 x embedding_length=128"),
    ],
)
def test_wrong_numbers_are_named(
    tiny_path: TinyPath,
    tmp_path: Path,
    name: str,
    key: str,
    kind: int,
    value: Any,
    allowed: str,
) -> None:
    full = f"{tiny_models.ALL[name]().arch}.{key}"
    path = damaged(tiny_path(name), tmp_path, changed(full, kind, value))
    with pytest.raises(ValueError) as caught:
        Llama(path, verbose=False)
    assert str(caught.value).startswith(f"{path}: ")
    assert f"{key} is " in str(caught.value)
    assert allowed in str(caught.value)


def tokens(model: Gguf) -> list[bytes]:
    return dict(model.pairs)[b"tokenizer.ggml.tokens"].value


def repeat_token(model: Gguf) -> None:
    tokens(model)[99] = tokens(model)[98]


def lose_byte_token(model: Gguf) -> None:
    tokens(model)[99] = b"<px60>"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (repeat_token, "'<0x5F>' 2 times; allowed is once"),
        (lose_byte_token, "255 of the tokens '<0x00>' to '<0xFF>'; allowed are all of them"),
        (changed("tokenizer.ggml.model", STRING, b"bert"), "allowed with 'bert' are none"),
    ],
)
def test_vocabularies_that_abort_the_tokenizer_are_refused(
    tiny_path: TinyPath, tmp_path: Path, damage: Callable[[Gguf], None], reason: str
) -> None:
    path = damaged(tiny_path("llama"), tmp_path, damage)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.token") as caught:
        Llama(path, vocab_only=True, verbose=False)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "kind", "halves", "reason"),
    [
        ("blk.0.attn_norm.weight", 8, False, "q8_0; allowed are f32"),
        ("blk.0.attn_norm.weight", 1, False, "f16; allowed are f32"),
        ("blk.0.attn_norm.weight", 8, True, "q8_0; allowed are f32, f16 or bf16"),
        ("blk.0.attn_norm.weight", 1, True, ""),
        ("blk.1.ffn_down.weight", 26, False, "i32; allowed are floats"),
        ("blk.1.ffn_down.weight", 9, False, "q8_1; allowed are floats"),
        ("blk.1.ffn_down.weight", 8, False, ""),
    ],
)
def test_tensors_that_nothing_computes_with_are_named(
    tiny_path: TinyPath, tmp_path: Path, tensor: str, kind: int, halves: bool, reason: str
) -> None:
    def damage(model: Gguf) -> None:
        next(t for t in model.tensors if t.name == tensor.encode()).kind = kind

    path = damaged(tiny_path("llama"), tmp_path, damage)
    if not reason:
        check_model(path, halves=halves)
        return
    with pytest.raises(ValueError, match=f"tensor {tensor} has the type {reason}"):
        check_model(path, halves=halves)


def test_every_part_of_a_split_model_is_checked(tiny_path: TinyPath, tmp_path: Path) -> None:
    first = tmp_path / "model-00001-of-00002.gguf"
    damaged(tiny_path("llama"), tmp_path, changed("split.count", 2, 2)).rename(first)

    def damage(model: Gguf) -> None:
        model.tensors[0].kind = 26

    second = tmp_path / "model-00002-of-00002.gguf"
    damaged(tiny_path("llama"), tmp_path, damage).rename(second)
    with pytest.raises(ValueError, match=f"{second}: tensor token_embd.weight"):
        check_model(first)


def test_overridden_values_are_the_ones_that_count(tiny_path: TinyPath, tmp_path: Path) -> None:
    key = "llama.expert_used_count"
    path = damaged(tiny_path("llama"), tmp_path, changed(key, U32, 2))
    check_model(path, {key: 0})
    with Llama(path, kv_overrides={key: 0}, verbose=False) as llm:
        assert llm.n_vocab() == tiny_models.N_VOCAB
    with pytest.raises(ValueError, match=key):
        check_model(path)


def test_what_can_t_be_read_is_left_to_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    check_model(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63))
    check_model(path)
    with pytest.raises(ValueError, match="number of tensors"):
        Llama(path, verbose=False)


# --- what comes after loading -------------------------------------------------------------------


def test_token_outside_the_vocabulary_is_an_error(tiny_path: TinyPath) -> None:
    with Llama(tiny_path("llama"), vocab_only=True, verbose=False) as llm:
        for token in (-1, tiny_models.N_VOCAB, 10**6):
            with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary"):
                llm.detokenize([token])


def test_text_for_a_model_without_vocabulary_is_an_error(
    tiny_path: TinyPath, tmp_path: Path
) -> None:
    damage = changed("tokenizer.ggml.model", STRING, b"none")
    path = damaged(tiny_path("llama"), tmp_path, damage)
    llm = Llama(path, vocab_only=True, verbose=False)
    with pytest.raises(ValueError, match="no vocabulary"):
        llm.tokenize(b"text")
    llm.close()


@pytest.mark.parametrize("kv_budget", [0.5, "auto"])
def test_model_without_a_context_length_is_named(
    tiny_path: TinyPath, tmp_path: Path, kv_budget: Any
) -> None:
    def damage(model: Gguf) -> None:
        model.pairs = [pair for pair in model.pairs if pair[0] != b"llama.context_length"]

    path = damaged(tiny_path("llama"), tmp_path, damage)
    with pytest.raises(ValueError, match=r"llama\.context_length is missing"):
        Llama(path, n_ctx=0, kv_budget=kv_budget, verbose=False)
