from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
from test_cli import invoke

from beaconkv_gguf import BeaconConfig, Llama, _native, fit
from beaconkv_gguf.cli.fit import parse_memory
from beaconkv_gguf.config import auto_budget
from beaconkv_gguf.fit import Cache, Memory
from beaconkv_gguf.gguf_layout import Attention, Layout, layout_of, read_layout, read_metadata
from native import GGML_TYPES, Context, Model, log

MIB = 1 << 20
TinyPath = Callable[[str], Path]


def assert_agrees(stats: dict[str, int], layout: Layout, cache: Cache) -> None:
    """All bytes as the context reports them; of the other caches up to their tensors' padding."""
    needs = fit.needs(layout, cache)
    assert (needs.k, needs.v) == (stats["bytes_k"], stats["bytes_v"])
    assert (needs.ring, needs.beacon) == (stats["bytes_ring"], stats["bytes_beacon"])
    whole = fit.needs(layout, dataclasses.replace(cache, budget=None))
    assert whole.k + whole.v == stats["bytes_full"]
    assert len(layout.full) == stats["n_layer"]
    # ggml aligns tensors to 32 bytes on a CPU, to at most 256 elsewhere
    n_tensors = 2 * (len(layout.swa) + layout.n_recurrent)
    padding = stats["bytes_other"] - (needs.swa + needs.recurrent)
    assert 0 <= padding <= 256 * n_tensors


@pytest.mark.parametrize(
    ("budget", "kv_type", "n_seq"),
    [(None, "f16", 1), (None, "q4_0", 2), (1024, "f16", 2), (1024, "q8_0", 1), (300, "q4_0", 1)],
)
@pytest.mark.parametrize("name", tiny_models.BOUNDED)
def test_bytes_are_those_of_the_context(
    tiny: Callable[[str], Model],
    tiny_path: TinyPath,
    name: str,
    budget: int | None,
    kv_type: str,
    n_seq: int,
) -> None:
    params = BeaconConfig().params(budget) if budget else None
    types = {"type_k": kv_type, "type_v": kv_type}
    with Context(tiny(name), params, n_ctx=2048, n_seq_max=n_seq, **types) as context:
        stats = _native.stats(context.ptr)
    number = GGML_TYPES[kv_type]
    cache = Cache(2048, budget, number, number, n_seq=n_seq, swa_full=False)
    assert_agrees(stats, read_layout(tiny_path(name)), cache)


@pytest.mark.parametrize(
    "beacon", [BeaconConfig(n_beacon=5, n_probe=7), BeaconConfig(window=64, n_probe=32)]
)
def test_bytes_of_other_settings(
    tiny: Callable[[str], Model], tiny_path: TinyPath, beacon: BeaconConfig
) -> None:
    with Context(tiny("gpt_oss"), beacon.params(700), n_ctx=1000) as context:
        stats = _native.stats(context.ptr)
    cache = Cache(1000, 700, swa_full=False, beacon=beacon)
    assert_agrees(stats, read_layout(tiny_path("gpt_oss")), cache)


@pytest.mark.parametrize("budget", [None, 1280])
@pytest.mark.parametrize("types", [(None, None), ("q8_0", "q4_0")])
@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_bytes_are_those_of_llama(
    request: pytest.FixtureRequest,
    model: str,
    types: tuple[str | None, str | None],
    budget: int | None,
) -> None:
    path = request.getfixturevalue(model)
    type_k, type_v = types
    with Llama(
        path, n_ctx=4096, kv_budget=budget, type_k=type_k, type_v=type_v, flash_attn=True,
        verbose=False,
    ) as llm:  # fmt: skip
        stats = dataclasses.asdict(llm.kv_stats())
    cache = Cache(4096, budget, GGML_TYPES[type_k or "f16"], GGML_TYPES[type_v or "f16"])
    assert_agrees(stats, read_layout(path), cache)


@pytest.mark.parametrize("budget", [None, 1280, 384])
@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_allowance_covers_the_compute_buffers(
    request: pytest.FixtureRequest, model: str, budget: int | None
) -> None:
    layout = read_layout(request.getfixturevalue(f"{model}_path"))
    params = BeaconConfig().params(budget) if budget else None
    with log() as lines:
        Context(request.getfixturevalue(model), params, n_ctx=8192).close()
    sizes = re.findall(r"compute buffer size = +([\d.]+) MiB", "".join(lines))
    measured = sum(float(size) for size in sizes) * MIB
    assert 0 < measured < fit.needs(layout, Cache(8192, budget)).compute < 2 * measured + 256 * MIB


def test_metadata_is_that_of_the_gguf_package(tiny_path: TinyPath) -> None:
    for name in tiny_models.ALL:
        expected: dict[str, Any] = {}
        for key, field in gguf.GGUFReader(tiny_path(name)).fields.items():
            if not key.startswith("GGUF."):
                is_list = key.startswith("tokenizer.") and isinstance(field.contents(), list)
                expected[key] = len(field.data) if is_list else field.contents()
        assert read_metadata(tiny_path(name)) == expected


def metadata(arch: str, **more: Any) -> dict[str, Any]:
    keys = {
        "context_length": 8192,
        "block_count": 4,
        "embedding_length": 512,
        "feed_forward_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def is_swa(arch: str, **more: Any) -> list[bool]:
    return [layer.is_swa for layer in layout_of(metadata(arch, **more)).attention]


def test_windows_follow_the_architecture() -> None:
    n, window = "block_count", "attention__sliding_window"
    pattern = "attention__sliding_window_pattern"
    assert is_swa("llama") == [False] * 4
    assert is_swa("gemma2") == [True, False] * 2  # it has a window without saying so
    assert is_swa("gemma3") == [False] * 4
    assert is_swa("gemma3", **{window: 512, n: 7}) == [True] * 5 + [False, True]
    assert is_swa("gemma3", **{window: 512, pattern: 2}) == [True, False] * 2
    assert is_swa("gpt-oss", **{window: 128}) == [True, False] * 2
    listed = [False, True, True, False]
    assert is_swa("any", **{window: 128, pattern: listed}) == listed
    assert is_swa("phi3", **{window: 2048}) == [False] * 4  # llama.cpp leaves it out
    assert layout_of(metadata("llama4")).n_swa == 8192


def test_head_sizes_may_differ_by_layer_and_kind() -> None:
    layout = layout_of(
        metadata(
            "gemma4",
            block_count=6,
            attention__head_count=[8, 8, 4, 8, 8, 4],
            attention__head_count_kv=[2, 2, 1, 2, 2, 1],
            attention__key_length=128,
            attention__value_length=96,
            attention__key_length_swa=64,
            attention__value_length_swa=32,
            attention__sliding_window=256,
            attention__sliding_window_pattern=[True, True, False] * 2,
            attention__shared_kv_layers=3,
        )
    )
    window, full = Attention(True, 8, 2, 64, 32), Attention(False, 4, 1, 128, 96)
    assert layout.attention == (window, window, full)  # the other half reads their cells
    needs = fit.needs(layout, Cache(4096, 1024))
    assert (needs.k, needs.v) == (2 * 128 * 1024, 2 * 96 * 1024)
    assert needs.swa == 2 * (2 * 2 * (64 + 32)) * 768  # 256 of the window and a batch of 512
    assert needs.ring == 2 * 33 * 4 * 128
    assert needs.beacon == 4 * 16 * (128 + 1 + 1)


def test_shared_layers_of_gemma3n_have_no_cache() -> None:
    layout = layout_of(metadata("gemma3n", block_count=30, attention__sliding_window=512))
    assert (len(layout.swa), len(layout.full)) == (16, 4)


def test_layers_that_predict_ahead_have_no_cache() -> None:
    assert len(layout_of(metadata("glm4moe", nextn_predict_layers=1)).attention) == 3


@pytest.mark.parametrize(
    ("arch", "more", "full", "recurrent"),
    [
        ("granitehybrid", {"attention.head_count_kv": [0, 2, 0, 0]}, 1, 3),
        ("qwen35", {}, 1, 3),
        ("qwen35", {"full_attention_interval": 2}, 2, 2),
        ("falcon-h1", {}, 4, 4),
        (
            "nemotron_h",
            {"attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 64, 0, 0]},
            1,
            2,
        ),
    ],
)
def test_hybrid_layers(arch: str, more: dict[str, Any], full: int, recurrent: int) -> None:
    ssm = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.group_count": 2}
    layout = layout_of(metadata(arch, **ssm, **more))
    assert (len(layout.full), layout.n_recurrent) == (full, recurrent)
    assert layout.n_state == 3 * (64 + 2 * 2 * 16) + 16 * 64


@pytest.mark.parametrize("name", tiny_models.REFUSED)
def test_refused_models_are_named_with_the_native_reason(
    tiny: Callable[[str], Model], tiny_path: TinyPath, name: str
) -> None:
    layout = read_layout(tiny_path(name))
    with pytest.raises(RuntimeError) as caught:
        Context(tiny(name), BeaconConfig().params(1024))
    assert str(caught.value) == f"{layout.arch} can't live in a KV budget: {layout.declined}"
    assert fit.recommend_budget(Cache(8192), layout, Memory(1, "")) == auto_budget(8192)


@pytest.mark.parametrize(
    ("arch", "more", "text"),
    [
        ("new", {"attention__sliding_window": 512}, "sliding window"),
        ("new", {"ssm__state_size": 16}, "recurrent"),
        ("minimax-01", {}, "which caches"),
        ("mamba", {"ssm__state_size": 16}, "not a cache of keys and values"),
    ],
)
def test_unknown_layouts_are_not_guessed(arch: str, more: dict[str, Any], text: str) -> None:
    layout = layout_of(metadata(arch, **more))
    assert text in layout.unsure
    assert layout.attention == ()
    assert fit.recommend_budget(Cache(32768), layout, Memory(1, "")) == auto_budget(32768)


# one layer with one KV head of 64 + 64 numbers of f16: 256 bytes per cell
PLAIN = Layout("llama", weights=100 * MIB, attention=tuple([Attention(False, 4, 1, 64, 64)] * 400))


@pytest.mark.parametrize("n_ctx", [512, 2048, 32768, 131072])
def test_memory_that_suffices_does_not_matter(n_ctx: int) -> None:
    memory = Memory(1 << 50, "")
    assert fit.recommend_budget(Cache(n_ctx), PLAIN, memory) == auto_budget(n_ctx)


@pytest.mark.parametrize(("n_ctx", "mib"), [(1024, 300), (32768, 400), (131072, 700)])
def test_too_little_memory_gives_the_largest_multiple_that_fits(n_ctx: int, mib: int) -> None:
    budget = fit.recommend_budget(Cache(n_ctx), PLAIN, Memory(mib * MIB, ""))
    assert budget is not None
    assert budget % 256 == 0
    assert fit.needs(PLAIN, Cache(n_ctx, budget)).total <= mib * MIB
    assert fit.needs(PLAIN, Cache(n_ctx, budget + 256)).total > mib * MIB


def test_reduced_budget_by_hand() -> None:
    # 400 layers: per cell 102,400 bytes, 6 x 512 of the mask, 12 x 400 of tables; per context
    # rings of 2 x 4 x 64 x 33 and beacons of 4 x 66 x 16 bytes per layer
    per_cell = 400 * 256 + 6 * 512 + 12 * 400
    fixed = 100 * MIB + 128 * MIB + 400 * (2 * 4 * 64 * 33 + 4 * 66 * 16)
    memory = Memory(fixed + 2048 * per_cell, "")
    assert fit.recommend_budget(Cache(131072), PLAIN, memory) == 2048
    less = dataclasses.replace(memory, n_bytes=memory.n_bytes - 1)
    assert fit.recommend_budget(Cache(131072), PLAIN, less) == 1792


def test_too_little_memory_for_any_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"8192 tokens does not fit into 200 MiB \(as given\)"):
        fit.recommend_budget(Cache(8192), PLAIN, parse_memory("200MiB"))


def test_auto_looks_at_the_memory(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout = read_layout(smollm2_path)
    memory = Memory(fit.needs(layout, Cache(8192, 768)).total, "available RAM")
    monkeypatch.setattr(fit, "ram", lambda: memory)
    with Llama(smollm2_path, n_ctx=8192, kv_budget="auto", verbose=False) as llm:
        assert llm.kv_budget == 768
    monkeypatch.setattr(fit, "ram", lambda: Memory(MIB, "available RAM"))
    assert fit.model_budget(str(smollm2_path), Cache(8192)) == 1280  # mapped weights are tried
    gpu = [Memory(MIB, "memory of GPU0")]
    monkeypatch.setattr(fit, "gpu_memories", lambda: gpu)
    with pytest.raises(ValueError, match="does not fit into 1 MiB"):
        fit.model_budget(str(smollm2_path), Cache(8192), n_gpu_layers=-1)
    with Llama(smollm2_path, n_ctx=8192, kv_budget=1280, verbose=False) as llm:
        assert llm.kv_budget == 1280  # tried all the same

    unreadable = tmp_path / "text.gguf"
    unreadable.write_text("no model")
    assert fit.model_budget(str(unreadable), Cache(8192)) == 1280
    assert fit.model_budget("missing.gguf", Cache(8192)) == 1280


def test_a_shared_out_model_follows_the_rule(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache, gpu = str(smollm2_path), Cache(8192), Memory(400 * MIB, "free on GPU0")
    layout = read_layout(path)
    small = dataclasses.replace(gpu, n_bytes=fit.needs(layout, Cache(8192, 512)).total)
    monkeypatch.setattr(fit, "ram", lambda: Memory(1 << 40, "available RAM"))
    monkeypatch.setattr(fit, "gpu_memories", lambda: [small])
    assert fit.device_memory() == small
    assert fit.model_budget(path, cache, n_gpu_layers=-1) == 512
    assert fit.model_budget(path, cache, n_gpu_layers=31) == 512
    assert fit.model_budget(path, cache, n_gpu_layers=0) == 1280
    assert fit.model_budget(path, cache, n_gpu_layers=10) == 1280
    assert fit.model_budget(path, cache, n_gpu_layers=-1, offload_kqv=False) == 1280
    monkeypatch.setattr(fit, "gpu_memories", lambda: [small, small])
    assert fit.model_budget(path, cache, n_gpu_layers=-1) == 1280


def test_memory_texts() -> None:
    texts = ["8GiB", "8 gb", "1.5MiB", ".5KB", "17B", "2TiB"]
    n_bytes = [8 << 30, 8 * 10**9, 3 << 19, 500, 17, 2 << 40]
    assert [parse_memory(text).n_bytes for text in texts] == n_bytes


@pytest.mark.parametrize("text", ["8", "much", "-8GiB", "0GiB", "8 GiB RAM", ""])
def test_bad_memory_text_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=rf"'{text}' must be .*such as 8GiB"):
        parse_memory(text)


def test_memory_of_this_machine_is_plausible() -> None:
    psutil = pytest.importorskip("psutil")
    assert 0 < fit.ram().n_bytes <= psutil.virtual_memory().total


def write_part(path: Path, i: int, n: int) -> int:
    """One file of a split model; its size."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", n)
    writer.add_uint16("split.no", i)
    for key, value in metadata("llama").items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_tensor(f"blk.{i}.attn_norm.weight", np.zeros(512 + i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def test_all_files_of_a_split_model_count(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    total = sum(write_part(path, i, 3) for i, path in enumerate(paths))
    assert read_layout(paths[0]).weights == total
    with pytest.raises(ValueError, match="ends in -00001-of-00003"):
        read_layout(paths[1])
    paths[2].unlink()
    with pytest.raises(OSError, match="00003-of-00003"):
        read_layout(paths[0])


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (4, "truncated: .*failed to read header"),
        (300, "truncated: .*failed to read key-value pairs"),
        (-100_000, "is truncated: it has [0-9,]+ bytes, its tensors need"),
        (-1, "is truncated: it has [0-9,]+ bytes, its tensors need"),
    ],
)
def test_truncated_files_are_named(
    tiny_path: TinyPath, tmp_path: Path, keep: int, reason: str
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_path("llama").read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"cut\.gguf.*{reason}"):
        read_layout(path)


def test_damaged_files_never_crash(tiny_path: TinyPath, tmp_path: Path) -> None:
    data = tiny_path("llama").read_bytes()[:20000]
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(100):
        damaged = bytearray(data)
        for at in rng.integers(4, 1000, 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged\.gguf"):
            read_layout(path)


@pytest.mark.parametrize(
    "more",
    [
        {"attention__key_length": [64, 64]},
        {"attention__head_count": "many"},
        {"attention__head_count_kv": [2]},
        {"attention__sliding_window": 64, "attention__sliding_window_pattern": [True]},
    ],
)
def test_odd_metadata_is_a_value_error(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gemma3\.attention"):
        layout_of(metadata("gemma3", **more))


def test_recommendation_prefers_length_then_quality() -> None:
    layout = dataclasses.replace(PLAIN, n_ctx_train=32768)
    caches = [Cache(n, type_k=t, type_v=t) for n in (4096, 8192, 32768) for t in (1, 8)]

    def best(mib: int) -> tuple[int, int, int | None] | None:
        cache = fit.recommend(layout, Memory(mib * MIB, ""), caches)
        return cache and (cache.n_ctx, cache.type_k, cache.budget)

    assert best(10_000) == (32768, 1, 5632)
    assert best(500) == (8192, 1, 1280)
    # 236 MiB are fixed; 256 cells take 26.2 MiB of f16 or 14.5 MiB of q8_0, tables included
    assert best(300) == (4096, 1, 512)
    assert best(270) == (4096, 1, 256)
    assert best(255) == (4096, 8, 256)
    assert best(100) is None


def test_command_prints_a_table_and_advice(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = invoke("fit", smollm2_path, "--memory", "8GiB", "--n-ctx", 8192, "--type-k", "f16")
    assert result.exit_code == 0, result.output
    assert "Recommended: n_ctx=8192, kv_budget=1280" in result.stdout
    assert "an estimate" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("8,192")]
    # 30 layers of 3 KV heads of 64 + 64 numbers of f16: 23,040 bytes per cell
    assert rows[0][:4] == ["8,192", "f16", "off", "180.0"]
    assert rows[1][:5] == ["8,192", "f16", "auto:", "1,280", "28.1"]
    assert {row[-1] for row in rows} == {"yes"}


def test_command_prints_json(gemma_path: Path) -> None:
    result = invoke(
        "fit", gemma_path, "--memory", "1GiB", "--n-ctx", 4096, "--n-ctx", 32768, "--json",
        "--type-k", "q8_0", "--parallel", 2, "--kv-budget", "off", "--kv-budget", "8x",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["layers"] == {"all": 18, "full": 3, "swa": 15, "recurrent": 0}
    assert report["bytes_weights"] == gemma_path.stat().st_size
    assert report["memory"] == {"bytes": 1 << 30, "source": "as given"}
    assert [(row["n_ctx"], row["kv_budget"]) for row in report["rows"]] == [
        (4096, None), (4096, 512), (32768, None), (32768, 4096),
    ]  # fmt: skip
    row = report["rows"][3]
    assert row["bytes_k"] == row["bytes_v"] == 2 * 3 * 4096 * 256 * 34 // 32
    assert row["bytes_kv"] == sum(
        row[f"bytes_{kind}"] for kind in ("k", "v", "ring", "beacon", "swa", "recurrent")
    )
    assert row["bytes_needed"] == row["bytes_kv"] + row["bytes_compute"] + report["bytes_weights"]
    assert [row["fits"] for row in report["rows"]] == [
        row["bytes_needed"] <= 1 << 30 for row in report["rows"]
    ]
    assert report["recommended"]["type_k"] == report["recommended"]["type_v"] == "q8_0"


@pytest.mark.parametrize("name", [*tiny_models.BOUNDED, *tiny_models.REFUSED])
def test_command_takes_every_model(tiny_path: TinyPath, name: str) -> None:
    result = invoke("fit", tiny_path(name), "--memory", "8GiB", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    if name in tiny_models.BOUNDED:
        assert report["declined"] is None
        assert report["recommended"]["kv_budget"] == auto_budget(tiny_models.N_CTX_TRAIN)
    else:
        assert any("takes no KV budget" in note for note in report["notes"])
        assert not any(row["kv_budget"] for row in report["rows"])
    table = invoke("fit", tiny_path(name), "--memory", "8GiB")
    assert table.exit_code == 0, table.output


def test_nothing_fits_is_said(smollm2_path: Path) -> None:
    result = invoke("fit", smollm2_path, "--memory", "10MiB")
    assert result.exit_code == 0, result.output
    assert "Nothing fits" in result.stdout
    assert "yes" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.gguf"], "missing.gguf"),
        (["{text}"], "no GGUF file"),
        (["{model}", "--memory", "lots"], "'lots'"),
        (["{model}", "--type-k", "q9"], "q8_0"),
        (["{model}", "--kv-budget", "10"], "minimum"),
        (["{model}", "--kv-budget", "900000"], "above n_ctx"),
    ],
)
def test_errors_are_one_line(
    smollm2_path: Path, tmp_path: Path, arguments: list[str], text: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("no model")
    result = invoke("fit", *(a.format(text=file, model=smollm2_path) for a in arguments))
    assert result.exit_code == 1, result.output
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("text", ["much", "0.5x"])
def test_bad_budget_text_is_named(smollm2_path: Path, text: str) -> None:
    result = invoke("fit", smollm2_path, "--kv-budget", text)
    assert result.exit_code == 2, result.output
    assert repr(text) in result.stderr
