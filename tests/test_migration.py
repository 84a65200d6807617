"""Programs written for llama_cpp run with only the import changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp as parent
import numpy as np
import pytest
from test_library import run_python

import beaconkv_gguf as llama_cpp  # the whole migration
from beaconkv_gguf import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

SCRIPTS = Path(__file__).parent / "migration"


def run_script(name: str, *arguments: str) -> str:
    """Output of one of llama-cpp-python's examples, its import changed."""
    source = (SCRIPTS / name).read_text()
    changed = source.replace("from llama_cpp import", "from beaconkv_gguf import")
    assert changed != source
    argv = [name, *arguments]
    result = run_python(f"import sys; sys.argv = {argv!r}\n{changed}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_inference(smollm2_path: Path) -> None:
    output = json.loads(run_script("high_level_api_inference.py", "-m", str(smollm2_path)))
    assert output["object"] == "text_completion"
    assert output["choices"][0]["text"].startswith("Question:")  # echo


def test_example_streaming(smollm2_path: Path) -> None:
    output = run_script("high_level_api_streaming.py", "-m", str(smollm2_path))
    decoder, chunks = json.JSONDecoder(), []
    while output := output.strip():
        chunk, end = decoder.raw_decode(output)
        chunks.append(chunk)
        output = output[end:]
    assert len(chunks) > 1
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_example_embedding(smollm2_path: Path) -> None:
    output = run_script("high_level_api_embedding.py", "-m", str(smollm2_path))
    assert "'object': 'list'" in output


def test_example_infill(smollm2_path: Path) -> None:
    output = run_script("high_level_api_infill.py", "-m", str(smollm2_path))
    assert "Fill-in-Middle completion" in output


def test_every_public_name_is_there() -> None:
    names = {name for name in vars(parent) if not name.startswith("_")}
    assert names <= set(vars(llama_cpp))
    ours = {"Llama", "LlamaState", "llama"}
    assert all(getattr(llama_cpp, name) is getattr(parent, name) for name in names - ours)
    assert issubclass(llama_cpp.Llama, parent.Llama)
    assert issubclass(llama_cpp.LlamaState, parent.LlamaState)


def test_star_import_and_submodules() -> None:
    result = run_python(
        "from beaconkv_gguf import *\n"
        "from llama_cpp.llama_chat_format import Jinja2ChatFormatter\n"
        "from llama_cpp.llama_speculative import LlamaPromptLookupDecoding\n"
        "print(Llama.__module__, LlamaGrammar.__module__, llama_cpp.__name__)\n"
    )
    assert result.stdout.split() == [
        "beaconkv_gguf.llama",
        "llama_cpp.llama_grammar",
        "llama_cpp.llama_cpp",
    ], result.stderr


# The rest follows llama-cpp-python's README, with and without a budget.


@pytest.fixture(scope="module", params=[None, 512], ids=["full", "budget"])
def llm(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Llama]:
    model = Llama(model_path=str(smollm2_path), n_ctx=1024, kv_budget=request.param, verbose=False)
    yield model
    model.close()


def test_completion(llm: Llama) -> None:
    output: Any = llm(
        "Q: Name the planets in the solar system? A: ",
        max_tokens=32,
        stop=["Q:", "\n"],
        echo=True,
        temperature=0.0,
    )
    assert output["choices"][0]["text"].startswith("Q: Name the planets")
    assert output["usage"]["completion_tokens"] <= 32


def test_chat(llm: Llama) -> None:
    output: Any = llm.create_chat_completion(
        messages=[
            {"role": "system", "content": "You are an assistant."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        max_tokens=24,
        temperature=0.0,
    )
    assert output["choices"][0]["message"]["content"]


def test_chat_streaming(llm: Llama) -> None:
    chunks: Any = llm.create_chat_completion(
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0.0,
        stream=True,
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(delta.get("content", "") for delta in deltas)


def test_json_schema(llm: Llama) -> None:
    output: Any = llm.create_chat_completion(
        messages=[{"role": "user", "content": "Who won the world series in 2020?"}],
        response_format={
            "type": "json_object",
            "schema": {
                "type": "object",
                "properties": {"team_name": {"type": "string", "maxLength": 20}},
                "required": ["team_name"],
            },
        },
        temperature=0.0,
        max_tokens=64,
    )
    assert json.loads(output["choices"][0]["message"]["content"])["team_name"]


def test_grammar(llm: Llama) -> None:
    output: Any = llm.create_completion(
        "The capital of france is paris, 'true' or 'false'?:\n",
        max_tokens=4,
        seed=1337,
        grammar=LlamaGrammar.from_string('root ::= "true" | "false"'),
    )
    assert output["choices"][0]["text"] in ("true", "false")


def test_logits_processor_and_bias(llm: Llama) -> None:
    token = llm.tokenize(b" Paris", add_bos=False)[0]

    def processor(input_ids: Any, logits: Any) -> Any:
        logits[token] = 1000.0
        return logits

    by_processor: Any = llm.create_completion(
        "The word is", max_tokens=3, logits_processor=LogitsProcessorList([processor])
    )
    by_bias: Any = llm.create_completion(
        "The word is", max_tokens=3, temperature=0.0, logit_bias={token: 1000.0}
    )
    assert by_processor["choices"][0]["text"] == by_bias["choices"][0]["text"] == " Paris" * 3


def test_stopping_criteria(llm: Llama) -> None:
    stop = StoppingCriteriaList([lambda input_ids, logits: len(input_ids) >= 20])
    output: Any = llm.create_completion(
        "Count: one, two,", max_tokens=100, temperature=0.0, stopping_criteria=stop
    )
    assert output["usage"]["total_tokens"] <= 21


def test_speculative_decoding(smollm2_path: Path) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = "one two three four five one two three four five one two"
    texts = []
    for draft in (None, LlamaPromptLookupDecoding(num_pred_tokens=4)):
        with Llama(
            str(smollm2_path), n_ctx=512, kv_budget=384, draft_model=draft, verbose=False
        ) as llm:
            output: Any = llm.create_completion(prompt, max_tokens=24, temperature=0.0)
            texts.append(output["choices"][0]["text"])
    assert texts[0] == texts[1]


def test_embeddings(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), embedding=True, verbose=False) as llm:
        output: Any = llm.create_embedding(["Hello, world!", "Goodbye, world!"])
        assert len(output["data"]) == 2
        vectors = np.array(output["data"][0]["embedding"])
        assert vectors.shape[-1] == llm.n_embd()


def test_logprobs(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=512, logits_all=True, kv_budget=384, verbose=False) as llm:
        output: Any = llm.create_completion("The sky is", max_tokens=4, logprobs=2)
        assert len(output["choices"][0]["logprobs"]["tokens"]) == 4


def test_tokenize_on_a_vocabulary(smollm2_path: Path) -> None:
    llm = Llama(str(smollm2_path), vocab_only=True, verbose=False)
    tokens = llm.tokenize(b"Hello World")
    assert llm.detokenize(tokens) == b"Hello World"
    llm.close()
