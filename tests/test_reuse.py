"""What a `Llama` remembers: prompts that are not read again, saved states, caches of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from beaconkv_gguf import (
    BeaconConfig,
    BeaconError,
    Llama,
    LlamaDiskCache,
    LlamaRAMCache,
    LlamaState,
    _native,
)
from beaconkv_gguf.states import _FIELDS, Snapshots, common_prefix
from native import child_environment, random_tokens

BUDGET = 384  # a prompt of up to 96 tokens is pinned
SETTINGS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def model_path(tiny_path: Callable[[str], Path]) -> Path:
    return tiny_path("llama")


def load(path: Path, **kwargs: Any) -> Llama:
    return Llama(path, **{**SETTINGS, "kv_budget": BUDGET, **kwargs})


@pytest.fixture
def llm(model_path: Path) -> Iterator[Llama]:
    with load(model_path) as llm:
        yield llm


def write(llm: Llama, prompt: list[int], n: int) -> list[int]:
    """`n` greedy tokens after a prompt, the end of the text or not."""
    written = llm.generate(prompt, temp=0.0)
    return [next(written) for _ in range(n)]


def cold(path: Path, *steps: list[int], n: int) -> list[int]:
    """`n` greedy tokens of a new `Llama` that reads the last prompt after the ones before."""
    with load(path) as llm:
        for prompt in steps:
            write(llm, prompt, 1)
        return write(llm, steps[-1], n)


# --- prefix reuse ---------------------------------------------------------------------------------


def test_a_continued_conversation_reads_what_is_new(llm: Llama, model_path: Path) -> None:
    text = random_tokens(200)
    text += write(llm, text, 400)
    assert llm.kv_stats().n_compact > 0
    n_seen = llm.n_tokens
    text += random_tokens(30, seed=1)
    write(llm, text, 20)
    assert llm.kv_stats().n_reused == n_seen


def test_stripped_thinking_goes_back_to_the_end_of_a_pinned_prompt(
    llm: Llama, model_path: Path
) -> None:
    prompt = random_tokens(90)
    write(llm, prompt, 500)  # thinking
    assert llm.kv_stats().n_pinned == 90 and llm.kv_stats().n_compact > 0
    following = prompt + random_tokens(60, seed=1)
    assert write(llm, following, 150) == cold(model_path, following, n=150)
    assert llm.kv_stats().n_reused == 90


def test_what_diverges_after_the_pinned_end_goes_back_to_it(llm: Llama, model_path: Path) -> None:
    prompt = random_tokens(90)
    thinking = write(llm, prompt, 500)
    following = prompt + thinking[:40] + random_tokens(60, seed=1)  # from 130 on it is another text
    assert write(llm, following, 150) == cold(model_path, following, n=150)
    assert llm.kv_stats().n_reused == 90


def test_stripped_thinking_goes_back_to_the_end_of_a_long_prompt(
    llm: Llama, model_path: Path
) -> None:
    prompt = random_tokens(500)
    write(llm, prompt, 300)
    assert llm.kv_stats().n_pinned == 0
    assert llm.kv_stats().bytes_snapshots > 0
    following = prompt + random_tokens(60, seed=1)
    assert write(llm, following, 150) == cold(model_path, prompt, following, n=150)
    assert llm.kv_stats().n_reused == 500


def test_a_tag_at_the_end_of_the_prompt_is_given_up(llm: Llama, model_path: Path) -> None:
    prompt = random_tokens(500)
    opened = [*prompt, 7, 8, 9]  # which open the thinking
    write(llm, opened, 300)
    following = prompt + random_tokens(60, seed=1)
    assert write(llm, following, 150) == cold(model_path, opened, following, n=150)
    assert llm.kv_stats().n_reused == 500


def test_another_answer_to_the_same_prompt_reads_one_token(llm: Llama, model_path: Path) -> None:
    prompt = random_tokens(500)
    first = write(llm, prompt, 300)
    assert write(llm, prompt, 300) == first
    assert llm.kv_stats().n_reused == 499


def test_two_conversations_in_turn_each_find_their_prompt(llm: Llama) -> None:
    a, b = random_tokens(500), random_tokens(400, seed=1)
    first = write(llm, a, 200)
    write(llm, b, 200)
    assert write(llm, a, 200) == first
    assert llm.kv_stats().n_reused == 499
    write(llm, b, 1)
    assert llm.kv_stats().n_reused == 399


def test_without_snapshots_the_prompt_is_read_again(model_path: Path) -> None:
    prompt = random_tokens(500)
    following = prompt + random_tokens(60, seed=1)
    with load(model_path, snapshot_bytes=0) as llm:
        write(llm, prompt, 300)
        assert llm.kv_stats().bytes_snapshots == 0
        assert write(llm, following, 150) == cold(model_path, following, n=150)
        assert llm.kv_stats().n_reused == 0


def test_snapshots_stay_within_their_limit(model_path: Path) -> None:
    with load(model_path, snapshot_bytes=1 << 30) as llm:
        write(llm, random_tokens(500), 1)
        one = llm.kv_stats().bytes_snapshots
    with load(model_path, snapshot_bytes=int(2.5 * one)) as llm:
        for seed in range(4):
            write(llm, random_tokens(500, seed), 200)
            assert llm.kv_stats().bytes_snapshots <= 2.5 * one
        write(llm, random_tokens(500, 2), 200)
        assert llm.kv_stats().n_reused == 499  # one of the two that are left
        write(llm, random_tokens(500, 0), 1)
        assert llm.kv_stats().n_reused == 0
    with load(model_path, snapshot_bytes=one // 2) as llm:
        write(llm, random_tokens(500), 1)
        assert llm.kv_stats().bytes_snapshots == 0
    with pytest.raises(ValueError, match="snapshot_bytes must not be negative: -1"):
        load(model_path, snapshot_bytes=-1)


def test_without_a_budget_no_snapshot_is_taken(model_path: Path) -> None:
    with load(model_path, kv_budget=None) as llm:
        write(llm, random_tokens(500), 10)
        assert llm.kv_stats().bytes_snapshots == 0
        write(llm, random_tokens(500)[:300], 10)
        assert llm.kv_stats().n_reused == 299


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "granite_hybrid"])
def test_models_with_a_second_memory_give_the_cold_answer(
    name: str, tiny_path: Callable[[str], Path]
) -> None:
    path = tiny_path(name)
    prompt = random_tokens(500)
    following = prompt + random_tokens(60, seed=1)
    with load(path) as llm:
        first = write(llm, prompt, 300)
        assert write(llm, following, 150) == cold(path, prompt, following, n=150)
        assert llm.kv_stats().n_reused == 500
        # its last token alone instead of in a batch: the same but for rounding
        assert write(llm, prompt, 10) == first[:10]


@pytest.mark.parametrize("name", ["gemma3", "granite_hybrid"])
def test_what_can_go_back_in_place_is_not_given_up_for_a_snapshot(
    name: str, tiny_path: Callable[[str], Path]
) -> None:
    prompt = random_tokens(500)
    with load(tiny_path(name)) as llm:
        write(llm, [*prompt, 7, 8, 9, 10], 3)
        can_go_back = _native.can_seq_rm(llm.ctx, 0, 500, -1)
        write(llm, [*prompt, 7, 8, 5, 6], 3)  # two tokens more are the same
        assert llm.kv_stats().n_reused == (502 if can_go_back else 0)
        assert can_go_back == (name == "gemma3")


STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("n_words", [20, 120])  # pinned, and too long for it
def test_a_template_that_strips_thinking_reads_the_prompt_once(
    n_words: int, smollm2_path: Path
) -> None:
    formatter = Jinja2ChatFormatter(STRIPPING, eos_token="<|im_end|>", bos_token="")
    problem = " ".join(f"item {i} costs {i * 7 % 50}." for i in range(n_words))
    messages = [{"role": "user", "content": problem}]

    def ask(llm: Llama) -> tuple[str, int]:
        reply = llm.create_chat_completion(
            messages, max_tokens=60, temperature=0.0, logit_bias={llm.token_eos(): -100.0}
        )
        return reply["choices"][0]["message"]["reasoning_content"], llm.n_tokens

    settings = {
        "chat_handler": formatter.to_chat_handler(),
        "beacon": BeaconConfig(window=64, n_probe=8),
        "n_ctx": 4096,
        "n_threads": 2,
    }
    with load(smollm2_path, **settings, kv_budget=768) as llm:
        llm.create_chat_completion(messages, max_tokens=900, temperature=0.0)
        n_prompt = llm._n_prompt_and_written[0]
        llm.eval(random_tokens(700))  # more thinking than fits
        assert (llm.kv_stats().n_pinned > 0) == (n_prompt <= 192)
        assert llm.kv_stats().n_compact > 0
        messages.append({"role": "assistant", "content": "<think>\nhm\n</think>About 40."})
        messages.append({"role": "user", "content": "And item 3 alone?"})
        warm, _ = ask(llm)
        n_reused = llm.kv_stats().n_reused
        assert n_prompt - 6 <= n_reused < n_prompt  # all but the tag that the template opened
    with load(smollm2_path, **settings, kv_budget=768) as llm:
        assert ask(llm)[0] == warm


# --- states ---------------------------------------------------------------------------------------


def full(llm: Llama, n: int = 700) -> Llama:
    llm.eval(random_tokens(n))
    assert llm.kv_budget is None or llm.kv_stats().n_compact > 0
    return llm


def future(llm: Llama, n: int = 120) -> list[int]:
    """Greedy tokens from here on, sampled before anything is evaluated."""
    tokens = []
    for _ in range(n):
        tokens.append(llm.sample(temp=0.0))
        llm.eval(tokens[-1:])
    return tokens


@pytest.mark.parametrize("kv_budget", [BUDGET, None])
def test_restored_then_sampled_equals_never_saved(kv_budget: int | None, model_path: Path) -> None:
    with load(model_path, kv_budget=kv_budget) as llm:
        state = full(llm).save_state()
        expected = future(llm)
        stats = llm.kv_stats()
        llm.reset()
        llm.eval(random_tokens(300, seed=5))
        llm.load_state(state)
        assert future(llm) == expected
        assert llm.kv_stats().n_compact == stats.n_compact
    with load(model_path, kv_budget=kv_budget) as other:
        other.load_state(pickle.loads(pickle.dumps(state)))
        assert other.n_tokens == 700
        assert future(other) == expected


def test_what_is_restored_is_what_the_next_call_reuses(model_path: Path, tmp_path: Path) -> None:
    with load(model_path) as llm:
        full(llm).save_state_file(tmp_path / "state")
    with load(model_path) as llm:
        llm.load_state_file(tmp_path / "state")
        write(llm, random_tokens(700) + random_tokens(20, seed=1), 5)
        assert llm.kv_stats().n_reused == 700


def test_sampling_from_nothing_is_an_error(llm: Llama) -> None:
    with pytest.raises(RuntimeError, match="no token was evaluated"):
        llm.sample()


def test_a_state_goes_through_a_file(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.state"
    with load(model_path) as llm:
        full(llm).save_state_file(path)
        expected = future(llm)
    assert [p.name for p in tmp_path.iterdir()] == ["chat.state"]
    with load(model_path) as llm:
        llm.load_state_file(path)
        assert future(llm) == expected


def test_a_state_of_llama_cpp_s_own_class_loads(model_path: Path) -> None:
    states = []
    for flash_attn in (True, False):
        with load(model_path, kv_budget=None, flash_attn=flash_attn) as stock:
            stock.eval(random_tokens(200))
            fields = vars(stock.save_state())
        del fields["checksum"], fields["model"]
        states.append(LlamaState.__base__(**fields))
    with load(model_path) as llm:
        llm.load_state(states[0])
        assert llm.n_tokens == 200 and llm.kv_stats().n_held == 200
        llm.eval(random_tokens(400, seed=1))
        assert llm.kv_stats().n_compact > 0
        with pytest.raises(BeaconError, match=r"V transposition.*nothing was changed"):
            llm.load_state(states[1])
        assert llm.n_tokens == 600 and llm.kv_stats().n_logical == 600


def test_scores_are_those_of_the_saved_text(model_path: Path) -> None:
    with load(model_path, logits_all=True) as llm:
        llm.eval(random_tokens(50))
        scores = llm.scores.copy()
        state = llm.save_state()
        llm.eval(random_tokens(100, seed=1))
        llm.load_state(state)
        np.testing.assert_array_equal(llm.scores[:50], scores[:50])
        assert not llm.scores[50:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_budget": 512}, "kv_budget = 384, this context has 512"),
        ({"kv_budget": None}, "saved under a KV budget"),
        ({"type_k": "q8_0"}, "type_k = f16, this context has q8_0"),
        ({"beacon": BeaconConfig(policy="recent")}, "policy = beacon, this context has recent"),
        ({"rope_freq_base": 5e5}, "RoPE = "),
    ],
)
def test_states_of_others_are_refused_by_name(
    change: dict[str, Any], message: str, llm: Llama, model_path: Path
) -> None:
    state = full(llm).save_state()
    with load(model_path, **change) as other:
        other.eval(random_tokens(200, seed=3))
        expected = future(other, 10)
        other.n_tokens = 200
        with pytest.raises(BeaconError, match=message):
            other.load_state(state)
        if other.kv_budget:
            other.n_tokens -= 1
            other.eval(random_tokens(200, seed=3)[-1:])
            assert future(other, 10) == expected


def test_a_state_of_another_model_is_refused_by_name(
    llm: Llama, tiny_path: Callable[[str], Path]
) -> None:
    state = full(llm).save_state()
    with load(tiny_path("qwen2")) as other:
        with pytest.raises(BeaconError, match=r"model = llama.gguf .*, this is qwen2.gguf"):
            other.load_state(state)
        state.model = ""  # as llama_cpp's own class has none
        state.checksum = state._compute_checksum()
        with pytest.raises(BeaconError, match="wrong model arch"):
            other.load_state(state)
    with load(tiny_path("llama_yarn")) as other, pytest.raises(BeaconError, match="saved with"):
        other.load_state(state)


def test_a_state_of_other_weights_is_refused(llm: Llama, model_path: Path, tmp_path: Path) -> None:
    state = full(llm).save_state()
    tuned = bytearray(model_path.read_bytes())
    for i in range(len(tuned) // 2, len(tuned), 997):  # small changes of many weights
        tuned[i] ^= 1
    path = tmp_path / "tuned.gguf"
    path.write_bytes(tuned)
    with (
        load(path) as other,
        pytest.raises(BeaconError, match=r"model = llama.gguf \w+, this is tuned.gguf"),
    ):
        other.load_state(state)


def test_a_state_with_too_few_tokens_changes_nothing(llm: Llama) -> None:
    state = full(llm).save_state()
    state.input_ids = state.input_ids[:100]
    state.checksum = state._compute_checksum()
    with pytest.raises(ValueError, match="the state names 100"):
        llm.load_state(state)
    assert llm.n_tokens == 700


def test_other_files_are_no_states(llm: Llama, tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "arrays.npz", **{name: np.zeros(3) for name in _FIELDS})
    for name in ("array.npy", "arrays.npz"):
        with pytest.raises(ValueError, match="not a complete saved state"):
            llm.load_state_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        llm.load_state_file(tmp_path / "none")


@pytest.mark.skipif(os.name == "nt", reason="modes of files are POSIX's")
def test_a_file_keeps_its_mode_and_its_links(llm: Llama, tmp_path: Path) -> None:
    llm.eval(random_tokens(10))
    path, link = tmp_path / "state", tmp_path / "link"
    path.touch(0o640)
    path.chmod(0o640)
    link.symlink_to(path)
    llm.save_state_file(link)
    assert link.is_symlink() and path.stat().st_size > 0
    assert path.stat().st_mode & 0o777 == 0o640


def test_with_logits_all_no_snapshot_mixes_the_scores(model_path: Path) -> None:
    a, b = random_tokens(500), random_tokens(500, seed=1)
    with load(model_path, logits_all=True) as llm:
        write(llm, a, 3)
        expected = llm.scores[:499].copy()
        write(llm, b, 3)
        write(llm, a, 3)
        np.testing.assert_array_equal(llm.scores[:499], expected)


def test_damaged_states_change_nothing(llm: Llama, tmp_path: Path) -> None:
    path = tmp_path / "state"
    full(llm).save_state_file(path)
    llm.eval(random_tokens(30, seed=2))
    before = llm.save_state()
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(content), 30).tolist():
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            llm.load_state_file(path)
        except ValueError:
            continue
        # zip files have a few bytes that nobody reads; what is loaded is whole
        assert llm.n_tokens == 700
        llm.load_state(before)
    for cut in [0, 1, 100, *rng.integers(0, len(content), 10).tolist(), len(content) - 1]:
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="not a complete saved state"):
            llm.load_state_file(path)
    state = LlamaState(**{k: v for k, v in vars(before).items() if k != "checksum"})
    state.llama_state = state.llama_state[:1000] + b"\1" + state.llama_state[1001:]
    with pytest.raises(ValueError, match="its checksum is wrong"):
        llm.load_state(state)
    assert llm.save_state().llama_state == before.llama_state


def test_a_state_that_is_longer_than_the_context_is_refused(llm: Llama, model_path: Path) -> None:
    state = full(llm).save_state()
    with load(model_path, n_ctx=512) as other:
        with pytest.raises(ValueError, match="700 tokens; n_ctx is 512"):
            other.load_state(state)
        assert other.n_tokens == 0


_FULL_DISK = """
import resource, signal, sys
import beaconkv_gguf
sys.path[:0] = [sys.argv[3]]
from test_reuse import full, future, load
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with load(sys.argv[1]) as llm:
    full(llm).save_state_file(sys.argv[2])
    llm.eval([5] * 10)
    before = open(sys.argv[2], "rb").read()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
    try:
        llm.save_state_file(sys.argv[2])
    except OSError as error:
        print(error)
    assert open(sys.argv[2], "rb").read() == before
    assert len(future(llm, 10)) == 10
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of files")
def test_a_full_disk_leaves_the_old_file_and_the_context(model_path: Path, tmp_path: Path) -> None:
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(model_path), str(tmp_path / "state"), folder],
        cwd=Path(__file__).parent,  # not where the sources of the package are
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


# --- caches of states -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_caches_bring_back_what_was_evicted(kind: str, llm: Llama, tmp_path: Path) -> None:
    llm.set_cache(LlamaRAMCache() if kind == "ram" else LlamaDiskCache(str(tmp_path)))

    def complete(prompt: list[int]) -> str:
        reply = llm.create_completion(prompt, max_tokens=20, temperature=0.0)
        return reply["choices"][0]["text"]

    a, b = random_tokens(600), random_tokens(600, seed=1)
    answer = complete(a)
    complete(b)
    longer = a + llm.tokenize(answer.encode(), add_bos=False) + random_tokens(5, seed=2)
    complete(longer)
    assert llm.kv_stats().n_reused >= 600


def test_snapshots_find_the_longest_prefix() -> None:
    a = np.array([1, 2, 3, 4], np.int32)
    assert common_prefix(a, np.array([1, 2, 9, 4], np.int32)) == 2
    assert common_prefix(a, a[:3]) == 3
    assert common_prefix(a, a) == 4
    assert common_prefix(a, a[:0]) == 0
    assert Snapshots(0, 100).best(a) == (0, None)
