"""Decodes a model with a plain llama_cpp and prints what it computed, as JSON.

    python logits_run.py LIBRARY_DIR MODEL N_TOKENS

A process of its own, since a process can hold one libllama only. Knows nothing of beaconkv_gguf.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import sys

N_PROMPT = 192  # random tokens in chunks; greedy ones follow, one by one


def main(library_dir: str, model_path: str, n_tokens: int) -> None:
    os.environ["LLAMA_CPP_LIB_PATH"] = library_dir
    import llama_cpp
    import numpy as np

    lines: list[str] = []

    @llama_cpp.llama_log_callback
    def log(_level: int, text: bytes, _user_data: object) -> None:
        lines.append(text.decode("utf-8", "replace"))

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        model_path.encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, 64, 64
    params.n_threads = params.n_threads_batch = 1
    ctx = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(64, 0, 1)

    digest = hashlib.sha256()
    rng = np.random.default_rng(0)
    greedy, pos, following = [], 0, 0
    while pos < n_tokens:
        size = 48 if pos < N_PROMPT else 1
        for i in range(size):
            batch.token[i] = (
                int(rng.integers(5, min(n_vocab, 20000))) if pos < N_PROMPT else following
            )
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = pos + i, 1, 0
            batch.logits[i] = True
        batch.n_tokens = size
        assert llama_cpp.llama_decode(ctx, batch) == 0
        pos += size
        for i in range(size):
            row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, i), (n_vocab,))
            digest.update(row.tobytes())
        following = int(row.argmax())
        greedy.append(following)

    text = "".join(lines)
    sizes = re.findall(r"(\w+ buffer size|graph[^:]*: nodes) *(=.*)", text)
    print(json.dumps({"logits": digest.hexdigest(), "greedy": greedy, "sizes": sizes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
