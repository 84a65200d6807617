"""Writes tiny random GGUF models, one per kind of attention that the cache has to know.

Weights are seeded by model and tensor name, so a model is the same in every run. The projections
of queries and keys are scaled up: attention is then far from uniform, as in a trained model. Tokens
are the 256 bytes and three special ones, so any text and any ids below 259 will do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from beaconkv_gguf.reference import Rope

N_VOCAB = 259
N_CTX_TRAIN = 8192
NO_ROPE = Rope(0)

Shapes = dict[str, tuple[int, ...]]  # in llama.cpp's order: ne[0], the row length, first


@dataclass(frozen=True)
class TinyModel:
    """One model: what its file holds, and the geometry that tests compute with."""

    arch: str
    kv: dict[str, Any]
    shapes: Shapes
    rope: Rope = NO_ROPE
    n_head: int = 0
    n_head_kv: int = 0
    head_dim: int = 0
    layers: tuple[int, ...] = ()  # that have a full-attention cache
    values: dict[str, np.ndarray] = field(default_factory=dict)  # tensors that are not random
    scaled_q: bool = False  # the graph scales the rotated queries, not the logits
    soft_cap: float = 0.0  # of the attention logits

    @property
    def q_scale(self) -> float:
        """What the graph multiplies the rotated queries with."""
        return self.head_dim**-0.5 if self.scaled_q else 1.0

    @property
    def kq_scale(self) -> float:
        """What attention multiplies the products of queries and keys with."""
        return 1.0 if self.scaled_q else self.head_dim**-0.5


def _attention(
    shapes: Shapes,
    il: int,
    n_embd: int,
    n_q: int,
    n_kv: int,
    bias: str = "",
    out_bias: bool = False,
) -> None:
    for name, size in (("q", n_q), ("k", n_kv), ("v", n_kv)):
        shapes[f"blk.{il}.attn_{name}.weight"] = (n_embd, size)
        if name in bias:
            shapes[f"blk.{il}.attn_{name}.bias"] = (size,)
    shapes[f"blk.{il}.attn_output.weight"] = (n_q, n_embd)
    if out_bias:
        shapes[f"blk.{il}.attn_output.bias"] = (n_embd,)


def _norms(shapes: Shapes, il: int, n_embd: int, *names: str, bias: bool = False) -> None:
    for name in names:
        shapes[f"blk.{il}.{name}.weight"] = (n_embd,)
        if bias:
            shapes[f"blk.{il}.{name}.bias"] = (n_embd,)


def _ffn(shapes: Shapes, il: int, n_embd: int, n_ff: int, gate: bool = True) -> None:
    if gate:
        shapes[f"blk.{il}.ffn_gate.weight"] = (n_embd, n_ff)
    shapes[f"blk.{il}.ffn_up.weight"] = (n_embd, n_ff)
    shapes[f"blk.{il}.ffn_down.weight"] = (n_ff, n_embd)


def _ends(n_embd: int, output: bool = True, norm_bias: bool = False) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (n_embd, N_VOCAB), "output_norm.weight": (n_embd,)}
    if output:
        shapes["output.weight"] = (n_embd, N_VOCAB)
    if norm_bias:
        shapes["output_norm.bias"] = (n_embd,)
    return shapes


def _kv(n_embd: int, n_layer: int, n_head: int, n_head_kv: Any, n_ff: int, **more: Any) -> dict:
    return {
        "context_length": N_CTX_TRAIN,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def llama(**rope: Any) -> TinyModel:
    """GQA with heads of 64: quantised caches get the Hadamard rotation."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff = 256, 2, 4, 2, 64, 256
    kv = _kv(n_embd, n_layer, n_head, n_head_kv, n_ff, rope__dimension_count=d)
    shapes = _ends(n_embd)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm")
        _attention(shapes, il, n_embd, n_head * d, n_head_kv * d)
        _ffn(shapes, il, n_embd, n_ff)
    return TinyModel(
        "llama", kv, shapes, Rope(d, **rope), n_head, n_head_kv, d, tuple(range(n_layer))
    )


def llama_factors() -> TinyModel:
    """Per-dimension frequency factors, as Llama 3.1 has."""
    factors = tuple(float(f) for f in np.linspace(1, 8, 32, dtype=np.float32))
    model = llama(factors=factors)
    model.shapes["rope_freqs.weight"] = (32,)
    model.values["rope_freqs.weight"] = np.asarray(factors, np.float32)
    return model


def llama_yarn() -> TinyModel:
    """YaRN, which also scales the rotated vector."""
    model = llama(scale=1 / 4, ext_factor=1.0, n_ctx_orig=256)
    model.kv.update(
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 256,
        }
    )
    return model


def qwen2() -> TinyModel:
    """Biases on queries, keys and values; heads of 32, four to one KV head."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff = 128, 2, 4, 1, 32, 192
    kv = _kv(n_embd, n_layer, n_head, n_head_kv, n_ff, rope__freq_base=1e6)
    shapes = _ends(n_embd)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm")
        _attention(shapes, il, n_embd, n_head * d, n_head_kv * d, bias="qkv")
        _ffn(shapes, il, n_embd, n_ff)
    return TinyModel(
        "qwen2",
        kv,
        shapes,
        Rope(d, neox=True, base=1e6),
        n_head,
        n_head_kv,
        d,
        tuple(range(n_layer)),
    )


def qwen3() -> TinyModel:
    """Norms on queries and keys; heads of 128."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff = 128, 2, 2, 1, 128, 192
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        n_head_kv,
        n_ff,
        attention__key_length=d,
        attention__value_length=d,
        rope__freq_base=1e6,
    )
    shapes = _ends(n_embd)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm")
        _norms(shapes, il, d, "attn_q_norm", "attn_k_norm")
        _attention(shapes, il, n_embd, n_head * d, n_head_kv * d)
        _ffn(shapes, il, n_embd, n_ff)
    return TinyModel(
        "qwen3",
        kv,
        shapes,
        Rope(d, neox=True, base=1e6),
        n_head,
        n_head_kv,
        d,
        tuple(range(n_layer)),
    )


def gemma3() -> TinyModel:
    """Every other layer has a sliding window (iSWA) and another RoPE base; heads of 96."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff = 128, 4, 4, 2, 96, 192
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        n_head_kv,
        n_ff,
        attention__key_length=d,
        attention__value_length=d,
        attention__sliding_window=64,
        attention__sliding_window_pattern=2,
        rope__freq_base=1e6,
    )
    shapes = _ends(n_embd, output=False)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
        _norms(shapes, il, d, "attn_q_norm", "attn_k_norm")
        _attention(shapes, il, n_embd, n_head * d, n_head_kv * d)
        _ffn(shapes, il, n_embd, n_ff)
    return TinyModel(
        "gemma3",
        kv,
        shapes,
        Rope(d, neox=True, base=1e6),
        n_head,
        n_head_kv,
        d,
        (1, 3),
        scaled_q=True,
    )


def gemma2() -> TinyModel:
    """iSWA with a soft cap on the attention logits, low enough to matter; heads of 64."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff, cap = 128, 4, 4, 2, 64, 192, 4.0
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        n_head_kv,
        n_ff,
        attention__key_length=d,
        attention__value_length=d,
        attention__sliding_window=64,
        attn_logit_softcapping=cap,
        final_logit_softcapping=30.0,
    )
    shapes = _ends(n_embd, output=False)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
        _attention(shapes, il, n_embd, n_head * d, n_head_kv * d)
        _ffn(shapes, il, n_embd, n_ff)
    return TinyModel(
        "gemma2",
        kv,
        shapes,
        Rope(d, neox=True),
        n_head,
        n_head_kv,
        d,
        (1, 3),
        scaled_q=True,
        soft_cap=cap,
    )


def stablelm() -> TinyModel:
    """Partial RoPE: 16 of 64 dimensions; LayerNorm with biases."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff = 128, 2, 2, 2, 64, 192
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        n_head_kv,
        n_ff,
        attention__layer_norm_epsilon=1e-5,
        rope__dimension_count=16,
    )
    shapes = _ends(n_embd, norm_bias=True)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm", bias=True)
        _attention(shapes, il, n_embd, n_head * d, n_head_kv * d, bias="qkv")
        _ffn(shapes, il, n_embd, n_ff)
    return TinyModel(
        "stablelm", kv, shapes, Rope(16, neox=True), n_head, n_head_kv, d, tuple(range(n_layer))
    )


def gpt_oss() -> TinyModel:
    """iSWA, learned attention sinks, YaRN, mixture of experts."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff, n_expert = 128, 4, 4, 2, 64, 64, 4
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        n_head_kv,
        n_ff,
        attention__key_length=d,
        attention__value_length=d,
        attention__sliding_window=64,
        rope__dimension_count=d,
        rope__freq_base=150000.0,
        rope__scaling__type="yarn",
        rope__scaling__factor=8.0,
        rope__scaling__original_context_length=512,
        expert_count=n_expert,
        expert_used_count=2,
        expert_feed_forward_length=n_ff,
    )
    shapes = _ends(n_embd)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "post_attention_norm")
        _attention(shapes, il, n_embd, n_head * d, n_head_kv * d, bias="qkv", out_bias=True)
        shapes[f"blk.{il}.attn_sinks.weight"] = (n_head,)
        shapes[f"blk.{il}.ffn_gate_inp.weight"] = (n_embd, n_expert)
        shapes[f"blk.{il}.ffn_gate_inp.bias"] = (n_expert,)
        for name in ("gate", "up", "down"):
            a, b = (n_ff, n_embd) if name == "down" else (n_embd, n_ff)
            shapes[f"blk.{il}.ffn_{name}_exps.weight"] = (a, b, n_expert)
            shapes[f"blk.{il}.ffn_{name}_exps.bias"] = (b, n_expert)
    r = Rope(d, neox=True, base=150000.0, scale=1 / 8, ext_factor=1.0, n_ctx_orig=512)
    return TinyModel("gpt-oss", kv, shapes, r, n_head, n_head_kv, d, (1, 3))


def granite_hybrid() -> TinyModel:
    """Hybrid: layers 1 and 3 attend, the others are Mamba-2."""
    n_embd, n_layer, n_head, n_head_kv, d, n_ff = 128, 4, 4, 2, 32, 192
    d_inner, d_state, n_group, n_ssm_head, d_conv = 2 * n_embd, 32, 2, 4, 4
    attends = (1, 3)
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        [n_head_kv if il in attends else 0 for il in range(n_layer)],
        n_ff,
        ssm__conv_kernel=d_conv,
        ssm__inner_size=d_inner,
        ssm__state_size=d_state,
        ssm__time_step_rank=n_ssm_head,
        ssm__group_count=n_group,
        rope__dimension_count=d,
    )
    shapes = _ends(n_embd)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm")
        _ffn(shapes, il, n_embd, n_ff)
        if il in attends:
            _attention(shapes, il, n_embd, n_head * d, n_head_kv * d)
            continue
        d_xbc = d_inner + 2 * n_group * d_state
        shapes[f"blk.{il}.ssm_in.weight"] = (n_embd, d_inner + d_xbc + n_ssm_head)
        shapes[f"blk.{il}.ssm_conv1d.weight"] = (d_conv, d_xbc)
        shapes[f"blk.{il}.ssm_conv1d.bias"] = (d_xbc,)
        shapes[f"blk.{il}.ssm_dt.bias"] = (n_ssm_head,)
        shapes[f"blk.{il}.ssm_a"] = (1, n_ssm_head)
        shapes[f"blk.{il}.ssm_d"] = (1, n_ssm_head)
        shapes[f"blk.{il}.ssm_norm.weight"] = (d_inner // n_group, n_group)
        shapes[f"blk.{il}.ssm_out.weight"] = (d_inner, n_embd)
    return TinyModel("granitehybrid", kv, shapes, Rope(d), n_head, n_head_kv, d, attends)


def _mla(arch: str, **more: Any) -> TinyModel:
    n_embd, n_layer, n_head, n_ff, n_lora_q, n_lora_kv, n_rot, n_nope, n_v = (
        128,
        2,
        2,
        192,
        64,
        64,
        16,
        32,
        32,
    )
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        1,
        n_ff,
        leading_dense_block_count=n_layer,
        attention__q_lora_rank=n_lora_q,
        attention__kv_lora_rank=n_lora_kv,
        attention__key_length=n_lora_kv + n_rot,
        attention__value_length=n_lora_kv,
        attention__key_length_mla=n_nope + n_rot,
        attention__value_length_mla=n_v,
        rope__dimension_count=n_rot,
        expert_feed_forward_length=64,
        expert_shared_count=1,
        expert_gating_func=2,
        expert_count=2,
        expert_used_count=1,
        **more,
    )
    shapes = _ends(n_embd)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm")
        _norms(shapes, il, n_lora_q, "attn_q_a_norm")
        _norms(shapes, il, n_lora_kv, "attn_kv_a_norm")
        shapes[f"blk.{il}.attn_q_a.weight"] = (n_embd, n_lora_q)
        shapes[f"blk.{il}.attn_q_b.weight"] = (n_lora_q, n_head * (n_nope + n_rot))
        shapes[f"blk.{il}.attn_kv_a_mqa.weight"] = (n_embd, n_lora_kv + n_rot)
        shapes[f"blk.{il}.attn_k_b.weight"] = (n_nope, n_lora_kv, n_head)
        shapes[f"blk.{il}.attn_v_b.weight"] = (n_lora_kv, n_v, n_head)
        shapes[f"blk.{il}.attn_output.weight"] = (n_head * n_v, n_embd)
        _ffn(shapes, il, n_embd, n_ff)
    return TinyModel(arch, kv, shapes)


def deepseek2() -> TinyModel:
    """MLA: one compressed row per token in place of keys and values."""
    return _mla("deepseek2")


def deepseek32() -> TinyModel:
    """DSA: MLA with an indexer, whose cache mirrors the cells of the main one."""
    n_head, d = 2, 64
    model = _mla(
        "deepseek32",
        attention__indexer__head_count=n_head,
        attention__indexer__key_length=d,
        attention__indexer__top_k=32,
    )
    n_embd, n_lora_q = 128, 64
    for il in range(2):
        model.shapes[f"blk.{il}.indexer.k_norm.weight"] = (d,)
        model.shapes[f"blk.{il}.indexer.k_norm.bias"] = (d,)
        model.shapes[f"blk.{il}.indexer.proj.weight"] = (n_embd, n_head)
        model.shapes[f"blk.{il}.indexer.attn_k.weight"] = (n_embd, d)
        model.shapes[f"blk.{il}.indexer.attn_q_b.weight"] = (n_lora_q, n_head * d)
    return model


def bert() -> TinyModel:
    """An encoder: no cache at all."""
    n_embd, n_layer, n_head, n_ff = 64, 2, 2, 128
    kv = _kv(
        n_embd,
        n_layer,
        n_head,
        n_head,
        n_ff,
        attention__layer_norm_epsilon=1e-5,
        attention__causal=False,
        pooling_type=1,
        context_length=512,
    )
    shapes: Shapes = {
        "token_embd.weight": (n_embd, N_VOCAB),
        "token_types.weight": (n_embd, 2),
        "position_embd.weight": (n_embd, 512),
        "token_embd_norm.weight": (n_embd,),
        "token_embd_norm.bias": (n_embd,),
    }
    for il in range(n_layer):
        _attention(shapes, il, n_embd, n_embd, n_embd, bias="qkv", out_bias=True)
        _norms(shapes, il, n_embd, "attn_output_norm", "layer_output_norm", bias=True)
        _ffn(shapes, il, n_embd, n_ff, gate=False)
    return TinyModel("bert", kv, shapes)


def bloom() -> TinyModel:
    """ALiBi: attention depends on distances, not on rotations."""
    n_embd, n_layer, n_head, n_ff = 64, 2, 2, 128
    kv = _kv(n_embd, n_layer, n_head, n_head, n_ff, attention__layer_norm_epsilon=1e-5)
    shapes = _ends(n_embd, norm_bias=True)
    shapes["token_embd_norm.weight"] = shapes["token_embd_norm.bias"] = (n_embd,)
    for il in range(n_layer):
        _norms(shapes, il, n_embd, "attn_norm", "ffn_norm", bias=True)
        shapes[f"blk.{il}.attn_qkv.weight"] = (n_embd, 3 * n_embd)
        shapes[f"blk.{il}.attn_qkv.bias"] = (3 * n_embd,)
        shapes[f"blk.{il}.attn_output.weight"] = (n_embd, n_embd)
        shapes[f"blk.{il}.attn_output.bias"] = (n_embd,)
        _ffn(shapes, il, n_embd, n_ff, gate=False)
        shapes[f"blk.{il}.ffn_up.bias"] = (n_ff,)
        shapes[f"blk.{il}.ffn_down.bias"] = (n_embd,)
    return TinyModel("bloom", kv, shapes)


BOUNDED: dict[str, Callable[[], TinyModel]] = {  # can live in a budget
    f.__name__: f
    for f in (
        llama,
        llama_factors,
        llama_yarn,
        qwen2,
        qwen3,
        gemma2,
        gemma3,
        stablelm,
        gpt_oss,
        granite_hybrid,
    )
}
REFUSED: dict[str, Callable[[], TinyModel]] = {
    f.__name__: f for f in (deepseek2, deepseek32, bert, bloom)
}
ALL = BOUNDED | REFUSED


def _random(model: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a tensor that is not given: of a size that keeps activations near 1."""
    rng = np.random.default_rng(zlib.crc32(f"{model}/{name}".encode()))
    x = rng.standard_normal(shape[::-1], dtype=np.float32)
    if name.endswith("ssm_a"):  # decay: negative
        return -np.abs(x) - 0.1
    if "norm" in name and name.endswith(".weight"):
        gain = 1.4 if "attn_q_norm" in name or "attn_k_norm" in name else 1.0
        return gain + 0.1 * x
    if len(shape) == 1 or name.endswith(("bias", "ssm_d")):
        return 0.2 * x
    if name == "token_embd.weight":
        return x / np.sqrt(shape[0], dtype=np.float32) if model.startswith("gemma") else x
    gain = 1.4 if any(part in name for part in ("attn_q.", "attn_k.", "attn_qkv")) else 1.0
    return gain * x / np.sqrt(shape[0], dtype=np.float32)


def _add_kv(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write(name: str, path: Path) -> Path:
    """Write the model ``name`` of :data:`ALL` to ``path``."""
    model = ALL[name]()
    writer = gguf.GGUFWriter(path, model.arch)
    for key, value in {**model.kv, "vocab_size": N_VOCAB}.items():
        _add_kv(writer, f"{model.arch}.{key}", value)

    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([2, 3, 3] + [6] * 256)  # unknown, control, byte
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if model.arch == "bert":
        writer.add_token_type_count(2)

    for tensor, shape in model.shapes.items():
        value = model.values.get(tensor)
        writer.add_tensor(tensor, _random(name, tensor, shape) if value is None else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
