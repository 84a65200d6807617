"""Pytest plugin of run_server.py: models at hand for llama.cpp's server tests, and what can't run.

Random models stand in for what the tests download, under its names in a cache of their own. Their
vocabularies are real ones that llama.cpp carries, so text, templates and special tokens are as in
the tests; what a model writes, and at times how many tokens a text has, is not. Each test that
fails for that is listed with the statement at which it has to fail: all before it is tested, and
one that fails elsewhere, or passes, is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest
import tiny_models


def _download(url: str, out: str) -> None:
    raise OSError(f"not at hand: {url}")


# upstream's utils.py imports it to download models
_wget = types.ModuleType("wget")
_wget.__dict__["download"] = _download
sys.modules["wget"] = _wget

import utils  # noqa: E402  (upstream's)

BUDGET = int(os.environ.get("LLAMA_ARG_KV_BUDGET", "0"))


@dataclass(frozen=True)
class Group:
    """Tests that can't run to their end, for one reason."""

    reason: str
    tests: tuple[str, ...]  # regular expressions of "module::test[parameters]"; these may be left
    ends: str = ""  # one of the statement that fails; without: the test is not started
    output: str = ""  # one of what the server says

    def has(self, name: str) -> bool:
        return any(re.fullmatch(rf"{test}(\[.*\])?", name, re.S) for test in self.tests)

    def explains(self, statement: str, output: str) -> bool:
        return bool(re.search(self.ends, statement)) and bool(re.search(self.output, output))


CANNOT_RUN = [
    Group(
        "expects what stories260K or another trained model writes",
        (
            "test_chat_completion::test_chat_completion_stream",
            "test_chat_completion::test_chat_completion_with_openai_library",
            r"test_chat_completion::test_completion_with_json_schema\[True-.*",
            "test_compat_oai_responses::test_responses_with_openai_library",
            "test_compat_oai_responses::test_responses_stream_with_openai_library",
            r"test_completion::test_completion(_stream)?\[Write .*",
            "test_completion::test_completion_with_openai_library",
            "test_completion::test_completion_stream_with_openai_library",
            "test_infill::test_infill_with(out)?_input_extra",
            "test_speculative::test_multi_requests_parallel",
        ),
        r"assert match_regex\(",
    ),
    Group(
        "expects the number of tokens of a text in stories260K's vocabulary",
        (
            "test_chat_completion::test_chat_completion",
            r"test_completion::test_completion(_stream)?\[I believe .*",
        ),
        r"== n_prompt$",
    ),
    Group(
        "expects text of a trained model that fits the template",
        (r"test_tool_call::test_completion_without_tool_call_slow\[.*functionary-medium-v3\.2-.*",),
        r"make_any_request\(",
        "does not match the expected",
    ),
    Group(
        "expects scores or token counts of the trained reranker",
        (
            "test_rerank::test_rerank",
            "test_rerank::test_rerank_tei_format",
            "test_rerank::test_rerank_usage",
        ),
        r'most_relevant\["index"\] == 2|== n_tokens$',
    ),
    Group(
        "downloads a model",
        (
            "test_basic::test_load_split_model",
            "test_compat_anthropic::test_anthropic_thinking_with_reasoning_model",
            "test_completion::test_completion_stream_with_openai_library_stops",
            "test_infill::test_with_qwen_model",
            "test_router::test_router_remote_preset",
            "test_tool_call::test_calc_result",
            "test_tool_call::test_completion_with_required_tool_real_model",
            "test_tool_call::test_hello_world",
            "test_tool_call::test_thoughts",
            "test_tool_call::test_weather",
        ),
        r"server\.start\(",
    ),
    Group(
        "downloads a model",
        ("test_router::test_router_download_model",),
        "download_progress|finished",
    ),
    Group(
        "downloads a LoRA adapter",
        (
            "test_lora::test_lora",
            "test_lora::test_lora_per_request",
            "test_lora::test_with_big_model",
        ),
        r"download_file\(",
    ),
    Group(
        "needs a multimodal projector and downloads an image",
        (
            "test_compat_anthropic::test_anthropic_vision_base64_with_multimodal_model",
            "test_slot_save::test_slot_save_restore_with_image",
            "test_slot_save::test_slot_save_restore_with_two_images",
            "test_slot_save::test_slot_save_restore_with_image_across_restart",
            "test_slot_save::test_slot_restore_media_file_without_mmproj",
            r"test_vision_api::test_vision_chat_completion\[.*-True-.*",
            r"test_vision_api::test_vision_completion\[.*-True-.*",
            r"test_vision_api::test_vision_embeddings\[.*-True\]",
            "test_vision_api::test_vision_embeddings_oai_content",
        ),
        r"requests\.get\(|status_code == 200",
    ),
    Group(
        "needs a multimodal projector",
        (
            "test_security::test_local_media_file",
            "test_slot_save::test_slot_save_restore_image_payload_larger_than_context",
            "test_vision_api::test_models_supports_multimodal_capability",
            "test_vision_api::test_v1_models_supports_multimodal_capability",
            "test_vision_api::test_vision_chat_completion_token_count",
        ),
        r'status_code == |"multimodal" in|len\(res\.body\["tokens"\]\) == 8',
    ),
    Group(
        "needs a multimodal projector: without, it passes for that alone",
        (
            r"test_vision_api::test_vision_chat_completion\[.*-False-None\]",
            r"test_vision_api::test_vision_completion\[.*-False-None\]",
            r"test_vision_api::test_vision_embeddings\[.*-False\]",
        ),
    ),
    Group(
        "passes or not by chance: text of a random model may or may not look like a call of a tool",
        (
            r"test_tool_call::test_completion_without_tool_call_fast\[.*-tools1-.*",
            r"test_tool_call::test_completion_without_tool_call_slow\[meta-llama-.*-tools7-.*",
        ),
    ),
    Group("asks a server of the internet", ("test_proxy::test_mcp_proxy",)),
    Group(
        "expects upstream's web page, which our server is built without",
        ("test_basic::test_no_ui", "test_security::test_access_static_assets_without_api_key"),
        "status_code == 200",
    ),
    Group(
        "expects an answer without a CORS header for pages from elsewhere; ours turns them away",
        (
            "test_security::test_cors_origins_localhost_rejects",
            "test_security::test_cors_origins_defaults_to_localhost_with_tools_enabled",
        ),
        "status_code == 200",
    ),
]

CANNOT_RUN_IN_BUDGET = [
    Group(
        "needs an embedding model, which a budget declines: an encoder keeps no history",
        (
            "test_embedding::.*",
            "test_metrics::test_metrics_embedding_prompt_is_counted",
            "test_rerank::.*",
        ),
        r"server\.start\(",
        "it is an encoder",
    ),
    Group(
        "needs a unified cache, which a budget declines",
        ("test_completion::test_completion_unified",),
        r"server\.start\(",
        r"several sequences need caches of their own \(kv_unified",
    ),
    Group(
        "needs a unified cache, which a budget declines",
        ("test_kv_keep_only_active::.*",),
        r"server\.start\(",  # what the server says goes to a file
    ),
    Group(
        "shifts a full context, which a budget doesn't: it ends there",
        ("test_ctx_shift::test_ctx_shift_enabled", "test_speculative::test_with_ctx_shift"),
        r'"predicted_n"\] == 96|"tokens_predicted"\] == 256',
    ),
    Group(
        "makes embeddings, which a budget declines",
        (
            r"test_vision_api::test_vision_embeddings\[.*-True\]",
            "test_vision_api::test_vision_embeddings_oai_content",
        ),
        r"server\.start\(",
        "embeddings are asked for",
    ),
    Group(
        "expects the batches of a prompt without checkpoints; in a budget, one more ends at each",
        (r"test_chat_completion::test_return_progress\[64-3-False\]",),
        "total_batch_count == batch_count",
    ),
]

#
# stand-ins
#

VOCABULARIES = Path("../../../models").resolve()
N_NO_TEXT = 259  # the first tokens of Llama's vocabulary: special ones and bytes


@dataclass(frozen=True)
class StandIn:
    """A tiny random model with a real vocabulary."""

    model: str
    vocabulary: str
    n_vocab: int = 0  # cut down to that
    fim: bool = False  # has tokens for filling in the middle

    @property
    def file_name(self) -> str:
        return f"{self.model}-{self.vocabulary}-{self.n_vocab}-{self.fim}.gguf"


# With about as many tokens as stories260K's has, texts are as long as the tests take them for.
SMALL = StandIn("llama", "llama-spm", 512)
LLAMA = StandIn("llama", "llama-spm")
BERT = StandIn("bert", "bert-bge")

#: What the tests download: repository and file. The file of test_router_delete_model is deleted.
STAND_INS = {
    ("ggml-org/test-model-stories260K", "stories260K-f32.gguf"): SMALL,
    ("ggml-org/test-model-stories260K-infill", "stories260K-infill-f32.gguf"): StandIn(
        "llama", "llama-spm", 512, fim=True
    ),
    ("ggml-org/stories15M_MOE", "stories15M_MOE-F16.gguf"): LLAMA,
    ("ggml-org/tinygemma3-GGUF", "tinygemma3-Q8_0.gguf"): StandIn("gemma3", "llama-spm", 512),
    ("ggml-org/test-model-router-download", "test-model-router-download-F16.gguf"): SMALL,
    ("ggml-org/models", "bert-bge-small/ggml-model-f16.gguf"): BERT,
    ("ggml-org/models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf"): BERT,
}
DRAFT = Path("tmp", "stories15M-q4_0.gguf")  # where download_file() finds it

COMMIT = "0" * 40

_scratch = tempfile.TemporaryDirectory()
MODELS, CACHE = Path(_scratch.name, "models"), Path(_scratch.name, "cache")


def _kept(tokens: list[str], n_vocab: int) -> list[int]:
    """Ids of a small vocabulary that can still spell ASCII: the first merges, and characters."""
    if not n_vocab:
        return list(range(len(tokens)))
    single = {chr(i) for i in range(0x21, 0x7F)} | {"\N{LOWER ONE EIGHTH BLOCK}"}
    text = range(N_NO_TEXT, len(tokens))
    characters = [i for i in text if tokens[i] in single]
    merges = [i for i in text if tokens[i] not in single]
    return [*range(N_NO_TEXT), *merges[: n_vocab - N_NO_TEXT - len(characters)], *characters]


def write_model(file: Path, stand_in: StandIn) -> None:
    reader = gguf.GGUFReader(VOCABULARIES / f"ggml-vocab-{stand_in.vocabulary}.gguf")
    fields = [f for f in reader.fields.values() if f.name.startswith("tokenizer.")]
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kept = _kept(tokens, stand_in.n_vocab)
    with mock.patch.object(tiny_models, "N_VOCAB", len(kept)):
        model = tiny_models.ALL[stand_in.model]()
    if stand_in.model != "bert":
        shape = model.shapes["token_embd.weight"]
        output = tiny_models._random(stand_in.model, "output.weight", shape)
        output[:N_NO_TEXT] = 0  # it writes text, and no end
        model.shapes["output.weight"], model.values["output.weight"] = shape, output

    writer = gguf.GGUFWriter(file, model.arch)
    for key, value in {**model.kv, "vocab_size": len(kept)}.items():
        tiny_models._add_kv(writer, f"{model.arch}.{key}", value)
    for field in fields:
        value, sub_type = field.contents(), None
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            sub_type = field.types[-1]
            if len(value) == len(tokens):
                value = [value[i] for i in kept]
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)
    if stand_in.fim:
        for token, part in enumerate(("pre", "suf", "mid"), start=3):
            writer.add_uint32(f"tokenizer.ggml.fim_{part}_token_id", token)
    for name, shape in model.shapes.items():
        value = model.values.get(name)
        random = value is None
        writer.add_tensor(
            name, tiny_models._random(stand_in.model, name, shape) if random else value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lay_out() -> None:
    """Put the stand-ins where --hf-repo with --offline looks for what was downloaded before.

    As copies: what a link points to is deleted with it by the router.
    """
    for (repo, name), stand_in in STAND_INS.items():
        model = MODELS / stand_in.file_name
        if not model.exists():
            MODELS.mkdir(exist_ok=True)
            write_model(model, stand_in)
        folder = CACHE / f"models--{repo.replace('/', '--')}"
        file = folder / "snapshots" / COMMIT / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model, file)
            (folder / "refs").mkdir(exist_ok=True)
            (folder / "refs" / "main").write_text(COMMIT)
    if not DRAFT.exists():
        DRAFT.parent.mkdir(exist_ok=True)
        shutil.copyfile(MODELS / LLAMA.file_name, DRAFT)


os.environ["LLAMA_CACHE"] = str(CACHE)
os.environ["MODEL_ENDPOINT"] = "http://127.0.0.1:9"  # nothing is downloaded, with a network either
utils.ServerPreset.load_all = staticmethod(lambda: None)

#
# hooks
#


def _name(item: pytest.Item) -> str:
    return f"{item.path.stem}::{item.name}"


def _groups(item: pytest.Item) -> list[Group]:
    groups = CANNOT_RUN + (CANNOT_RUN_IN_BUDGET if BUDGET else [])
    return [group for group in groups if group.has(_name(item))]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    modules = {item.path.stem for item in items}
    for group in CANNOT_RUN + CANNOT_RUN_IN_BUDGET:
        for test in group.tests:
            alone = Group(group.reason, (test,))
            if test.split("::")[0] in modules and not any(alone.has(_name(i)) for i in items):
                raise pytest.UsageError(f"server_plugin.py lists a test that is none: {test}")
    for item in items:
        for group in _groups(item):
            if not group.ends:
                item.add_marker(pytest.mark.skip(reason=group.reason))


def pytest_runtest_setup() -> None:
    lay_out()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    report = (yield).get_result()
    groups = _groups(item)
    if report.failed and call.excinfo is not None:
        frames = [entry for entry in call.excinfo.traceback if entry.path == item.path]
        statement = str(frames[-1].statement).strip() if frames else ""
        for group in groups:
            if group.explains(statement, report.capstdout):
                report.outcome, report.wasxfail = "skipped", group.reason
                return
        if "FAILURES" in os.environ:
            import json

            with open(os.environ["FAILURES"], "a") as f:
                f.write(json.dumps([item.nodeid, statement, str(call.excinfo.value)[:300]]) + "\n")
    elif report.passed and report.when == "call" and groups:
        report.outcome = "failed"
        report.longrepr = f"passed, but is listed: {groups[0].reason}"
