"""Comparison with the full cache: its numbers, its texts, its command."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from beaconkv_gguf import BeaconConfig, cli, fidelity
from beaconkv_gguf.config import POLICIES
from beaconkv_gguf.traces import Revisit, Trace, synthetic

SMALL = BeaconConfig(window=32, n_recent=16, n_probe=8, n_beacon=4, pin_share=0.0)
CONTEXT = {"n_threads": 1}


@pytest.fixture(scope="module")
def model(tiny_path: Callable[[str], Path]) -> Iterator[fidelity.Model]:
    with fidelity.Model(tiny_path("llama")) as model:
        yield model


@pytest.fixture(scope="module")
def text(model: fidelity.Model) -> fidelity.Text:
    return fidelity.Text.of(synthetic(1, 200, n_facts=3, n_steps=2), model, 900)


def compare(
    model: fidelity.Model, text: fidelity.Text, *cases: fidelity.Case, **more: object
) -> list[fidelity.Result]:
    return fidelity.compare(model, text, cases, chunk=32, **CONTEXT, **more)  # type: ignore[arg-type]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# --- numbers --------------------------------------------------------------------------------------


def test_divergence_likelihood_and_agreement_are_those_of_the_definitions() -> None:
    rng = np.random.default_rng(0)
    full, other = rng.normal(0, 3, (2, 5, 40)).astype(np.float32)
    other[2] = full[2] + 7  # the same distribution
    following = np.array([3, 1, 4, 1])  # nothing follows the last
    p, q = log_softmax(full), log_softmax(other)
    reference = fidelity._Reference(full)
    np.testing.assert_allclose(reference.nll(following), -p[range(4), following], rtol=1e-5)
    kl, nll, same = reference.compare(other, following)
    np.testing.assert_allclose(kl, (np.exp(p) * (p - q)).sum(-1), atol=1e-5)
    assert kl[2] < 1e-5
    np.testing.assert_allclose(nll, -q[range(4), following], rtol=1e-5)
    assert same.tolist() == (full.argmax(-1) == other.argmax(-1)).tolist()


def test_a_summary_counts_the_tokens_after_the_first_eviction(
    model: fidelity.Model, text: fidelity.Text
) -> None:
    (result,) = compare(model, text, fidelity.Case(256, SMALL))
    # the cells are full after 256 tokens, and the last token has no following one
    assert result.n == 900 - 256 - 1
    assert result.n_compact == -(-(900 - 256) // 32)
    assert 0 < result.kl <= result.kl_p95 <= result.kl_p99
    assert 0 < result.top1 < 1


def test_the_same_seed_gives_the_same_numbers(model: fidelity.Model, text: fidelity.Text) -> None:
    cases = [fidelity.Case(256, SMALL), fidelity.Case(200, SMALL)]
    once, again = (compare(model, text, *cases) for _ in range(2))
    assert [r.as_dict() for r in once] == [r.as_dict() for r in again]
    alone = compare(model, text, cases[1])  # and the company does not matter
    assert alone[0].as_dict() == once[1].as_dict()


def test_policies_keep_different_things(model: fidelity.Model, text: fidelity.Text) -> None:
    cases = [fidelity.Case(256, dataclasses.replace(SMALL, policy=name)) for name in POLICIES]
    results = compare(model, text, *cases, heat=True)
    assert [r.policy for r in results] == list(POLICIES)
    assert len({r.kl for r in results}) == len(POLICIES)
    streaming = results[POLICIES.index("streaming")].heat
    assert streaming is not None
    middle = streaming[-1, 1 : (900 - 256) // fidelity.HEAT_STEP]
    assert not middle.any()  # behind the sinks nothing but the newest
    assert streaming[-1, -2] == 1


def test_heat_is_the_share_of_heads_that_hold_the_positions(
    model: fidelity.Model, text: fidelity.Text
) -> None:
    (result,) = compare(model, text, fidelity.Case(256, SMALL), heat=True)
    assert result.heat is not None
    n_held = result.heat.sum(1) * fidelity.HEAT_STEP  # per head, after each chunk of 32
    np.testing.assert_allclose(n_held[:8], 32 * np.arange(1, 9), rtol=1e-6)
    np.testing.assert_allclose(n_held[8:-1], 256, rtol=1e-6)


def test_a_budget_for_a_ratio_counts_everything(model: fidelity.Model, text: fidelity.Text) -> None:
    cells = fidelity.budget_for_ratio(model, 1024, 3.0, SMALL, **CONTEXT)
    (result,) = compare(model, text, fidelity.Case(cells, SMALL))
    (larger,) = compare(model, text, fidelity.Case(cells + 8, SMALL))
    assert larger.ratio < 3.0 <= result.ratio < 3.1
    with pytest.raises(ValueError, match=r"64x of a context of 1024 tokens leaves -?\d+ cells"):
        fidelity.budget_for_ratio(model, 1024, 64.0, SMALL, **CONTEXT)


def test_a_pinned_prompt_is_held_to_the_end(model: fidelity.Model, text: fidelity.Text) -> None:
    text = dataclasses.replace(text, n_prompt=100)
    config = dataclasses.replace(SMALL, pin_share=0.5)
    free, pinned = (
        compare(model, text, fidelity.Case(256, config), heat=True, pin=pin)[0].heat
        for pin in (False, True)
    )
    assert free is not None and pinned is not None
    n_whole = text.n_prompt // fidelity.HEAT_STEP
    assert (pinned[-1, :n_whole] == 1).all()
    assert not (free[-1, :n_whole] == 1).all()


@pytest.mark.parametrize("budget", [900, 1024])
def test_a_budget_that_holds_the_whole_text_is_refused(
    budget: int, model: fidelity.Model, text: fidelity.Text
) -> None:
    with pytest.raises(ValueError, match=f"the text has 900 tokens, a budget of {budget} cells"):
        compare(model, text, fidelity.Case(budget, SMALL))


# --- texts ----------------------------------------------------------------------------------------


def test_tokens_of_a_revisit_are_those_of_its_characters(smollm2_path: Path) -> None:
    trace = synthetic(3, 300, n_facts=3, n_steps=2)
    with fidelity.Model(smollm2_path) as model:
        check_tokens(trace, fidelity.Text.of(trace, model), model)


def check_tokens(trace: Trace, text: fidelity.Text, model: fidelity.Model) -> None:
    for revisit in trace.revisits:
        marked = text.kinds[revisit.kind]
        said = b"".join(model.piece(t) for t, m in zip(text.tokens, marked) if m).decode()
        assert trace.text[revisit.start : revisit.end] in said
        first = next(i for i in range(len(marked)) if marked[i])
        source = b"".join(map(model.piece, text.tokens[int(text.source[first]) :])).decode()
        assert source.startswith(("- The", "Plan item"))
    prompt = b"".join(map(model.piece, text.tokens[: text.n_prompt])).decode()
    assert prompt.strip() == trace.text[: trace.n_prompt].strip()


def test_revisits_nearer_than_the_budget_are_left_out(model: fidelity.Model) -> None:
    body = "abc " * 200
    trace = Trace("near", body, 0, (), (), (Revisit(700, 705, "fact", 650),))
    text = fidelity.Text.of(trace, model)
    (result,) = compare(model, text, fidelity.Case(256, SMALL))
    assert result.revisits == {}
    trace = Trace("far", body, 0, (), (), (Revisit(700, 705, "fact", 20),))
    (result,) = compare(model, fidelity.Text.of(trace, model), fidelity.Case(256, SMALL))
    assert result.revisits["fact"].n == 5


def test_far_attention_is_all_at_distance_zero_and_none_past_the_start(
    model: fidelity.Model, text: fidelity.Text
) -> None:
    def share(distance: int) -> np.ndarray:
        return fidelity.far_attention(model, text.tokens[:300], distance, chunk=64, **CONTEXT)

    np.testing.assert_allclose(share(0)[4:], 1, rtol=1e-4)
    assert not share(300).any()
    near, far = share(20), share(200)
    assert (near >= far - 1e-6).all() and not far[:204].any() and (far[250:] > 0).all()


def test_far_attention_leaves_the_numbers_of_a_shorter_text_alone(
    model: fidelity.Model, text: fidelity.Text
) -> None:
    short = fidelity.far_attention(model, text.tokens[:150], 50, chunk=50, **CONTEXT)
    long = fidelity.far_attention(model, text.tokens[:300], 50, chunk=64, **CONTEXT)
    np.testing.assert_allclose(short, long[:150], atol=1e-4)


def test_tokens_with_the_farthest_attention_are_marked(
    model: fidelity.Model, text: fidelity.Text
) -> None:
    plain = fidelity.Text("plain", text.tokens[:400], {}, np.full(400, -1))
    marked = fidelity.with_far_tokens(plain, model, 256, **CONTEXT)
    far = np.flatnonzero(marked.kinds["far"])
    assert len(far) == round(0.05 * (400 - 256 - 1))
    share = fidelity.far_attention(model, plain.tokens, 256, **CONTEXT)
    assert set(far - 1) == set(256 + np.argsort(-share[256:-1])[: len(far)])


def test_a_model_writes_the_same_text_for_the_same_seed(tiny_path: Callable[[str], Path]) -> None:
    once, again, other = (
        fidelity.Text.written(tiny_path("llama"), 2100, seed, **CONTEXT) for seed in (1, 1, 2)
    )
    assert once.tokens == again.tokens != other.tokens
    assert len(once.tokens) == 2100
    with pytest.raises(ValueError, match=r"the problem alone has \d+ tokens, not 64"):
        fidelity.Text.written(tiny_path("llama"), 64, 1, **CONTEXT)


# --- the command ----------------------------------------------------------------------------------

FAST = ["--tokens", "700", "--chunk", "32", "--threads", "1", "--facts", "3", "--steps", "2"]
FAST += [f"--set={name}" for name in ("window=32", "n_recent=16", "n_probe=8", "n_beacon=4")]


def invoke(*arguments: str | Path) -> Result:
    try:
        runner = CliRunner(mix_stderr=False)  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(cli.app, ["fidelity", *map(str, arguments)], env={"COLUMNS": "120"})


def test_command_prints_a_row_for_each_budget_and_policy(
    tiny_path: Callable[[str], Path],
) -> None:
    result = invoke(
        tiny_path("llama"), *FAST, "--kv-budget=256", "--kv-budget=2x",
        "--policy=beacon,quota=0", "--policy=streaming",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "x" in line]
    assert [row[0] for row in rows[1:]] == ["beacon,quota=0", "streaming"] * 2


def test_command_prints_json_and_nothing_else(tiny_path: Callable[[str], Path]) -> None:
    result = invoke(tiny_path("llama"), *FAST, "--kv-budget=256", "--policy=recent", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["n_tokens"] == 700 and report["model"] == "llama.gguf"
    (row,) = report["results"]
    assert row["policy"] == "recent" and row["budget"] == 256
    assert row["config"]["window"] == 32
    assert row["kl"] > 0


def test_command_reads_a_file_and_reports_its_far_tokens(
    tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(synthetic(9, 300).text, encoding="utf-8")
    result = invoke(
        tiny_path("llama"), *FAST, "--text", file, "--kv-budget=256", "--policy=beacon", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["results"][0]["revisits"]["far"]["n"] > 10


def test_command_draws_a_picture(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "kl.png"
    result = invoke(tiny_path("llama"), *FAST, "--kv-budget=256", "--plot", file)
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(
    tiny_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke(tiny_path("llama"), *FAST, "--plot", tmp_path / "kl.png")
    assert result.exit_code == 1
    assert 'pip install "beaconkv_gguf[plot]"' in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "--text nowhere.txt: no such file"),
        (["--kv-budget=800"], "kv_budget=800 cells is above n_ctx=768"),
        (["--kv-budget=701"], "the text has 700 tokens, a budget of 701 cells"),
        (["--kv-budget=0.5x"], "a ratio is a number above 1"),
        (["--kv-budget=40x"], "40x of a context of 768 tokens leaves"),
        (["--tokens=257", "--kv-budget=256"], "the text has 257 tokens, a budget of 256 cells"),
        (["--policy=lru"], "policy must be one of beacon, recent"),
        (["--set=colour=1"], "setting 'colour=1': allowed are window"),
        (["--set=window=many"], "'many' is no number"),
        (["--type-k=q9"], "is no cache type"),
        (["--plot=nowhere/kl.png"], "there is no such folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_command_refuses_in_one_line(
    arguments: list[str], message: str, tiny_path: Callable[[str], Path]
) -> None:
    result = invoke(tiny_path("llama"), *FAST, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    result = invoke(tmp_path / "none.gguf")
    assert result.exit_code == 1
    assert f"Model path does not exist: {tmp_path / 'none.gguf'}" in result.stderr
