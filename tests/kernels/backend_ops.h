// Cases of our operators for llama.cpp's tests/test-backend-ops.cpp, which compares a device with the CPU.
// tests/gpu.py compiles a copy of that file that includes this one behind `struct test_case`.

#pragma once

#include "beacon-ops.h"

static ggml_tensor * beacon_plane(ggml_context * ctx, ggml_tensor * t, int stream) {
    return ggml_view_3d(ctx, t, t->ne[0], t->ne[1], t->ne[2], t->nb[1], t->nb[2], stream * t->nb[3]);
}

struct test_beacon : public test_case {
    static constexpr int N_POS = 5000;                                  // that the turns are for

    std::vector<std::pair<ggml_tensor *, std::vector<int32_t>>> given;  // tensors that are not random

    double max_nmse_err() override { return 1e-6; }

    // an I32 tensor, or an F32 one of whole numbers
    ggml_tensor * make(ggml_context *               ctx,
                       ggml_type                    type,
                       int64_t                      ne0,
                       int64_t                      ne1,
                       int64_t                      ne2,
                       const std::vector<int32_t> & values) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
        GGML_ASSERT((int64_t) values.size() == ggml_nelements(t));
        given.emplace_back(t, values);
        return t;
    }

    ggml_tensor * make_turns(ggml_context * ctx, int64_t n_rot) {
        return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_rot, 256 + 1 + N_POS / 256);
    }

    static std::vector<int32_t> ascending(int64_t n, int32_t first, int32_t step) {
        std::vector<int32_t> x(n);
        for (int64_t i = 0; i < n; ++i) {
            x[i] = first + i * step;
        }
        return x;
    }

    // compares what an operator has changed, once it is in the graph
    void read_back(ggml_context * ctx, ggml_tensor * op, const std::vector<ggml_tensor *> & changed) {
        if (!gf) {
            return;  // nothing is computed
        }
        ggml_build_forward_expand(gf, op);
        for (ggml_tensor * t : changed) {
            ggml_build_forward_expand(gf, ggml_cpy(ctx, t, ggml_dup_tensor(ctx, t)));
        }
    }

    void initialize_tensors(ggml_context * ctx) override {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            if (t->op == GGML_OP_NONE) {
                init_tensor_uniform(t);
            }
        }
        for (const auto & [t, values] : given) {
            const std::vector<float> numbers(values.begin(), values.end());
            const void *             data = values.data();
            ggml_backend_tensor_set(t, t->type == GGML_TYPE_F32 ? numbers.data() : data, 0, ggml_nbytes(t));
        }
    }
};

struct test_beacon_track : public test_beacon {
    const int64_t d, h, group, n, m;
    const int     pairs;  // GGML_BEACON_PAIRS_*

    test_beacon_track(int64_t d, int64_t h, int64_t group, int64_t n, int64_t m, int pairs) :
        d(d),
        h(h),
        group(group),
        n(n),
        m(m),
        pairs(pairs) {}

    std::string vars() override { return VARS_TO_STR6(d, h, group, n, m, pairs); }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        given.clear();
        std::vector<int32_t> counts(h * m);
        for (int64_t i = 0; i < h * m; ++i) {
            counts[i] = i % 4;
        }
        std::vector<int32_t> rows = ascending(n, n + 2, -1);
        for (const int32_t pos : ascending(n, N_POS - 1 - 7 * n, 7)) {
            rows.push_back(pos);
        }
        const ggml_beacon_rope rope = { (int32_t) d, pairs, 0.9f };

        ggml_tensor * mean  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, d, m, h, 2);
        ggml_tensor * count = make(ctx, GGML_TYPE_F32, 1, m, h, counts);
        ggml_tensor * norm  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, m, h);
        ggml_tensor * q     = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, d * h * group, n + 3);
        ggml_tensor * index = make(ctx, GGML_TYPE_I32, n, 2, 1, rows);
        ggml_tensor * turns = pairs == GGML_BEACON_PAIRS_NONE ? nullptr : make_turns(ctx, d);
        ggml_tensor * out   = ggml_beacon_track(ctx, beacon_plane(ctx, mean, 1), count, norm, q, index, turns, &rope);
        read_back(ctx, out, { mean, count, norm });
        return out;
    }
};

struct test_beacon_score : public test_beacon {
    const ggml_type type_k, type_v;
    const int64_t   d, e, h, n, m, recent, w;
    const int       pairs;
    const float     softcap;

    test_beacon_score(ggml_type type_k,
                      ggml_type type_v,
                      int64_t   d,
                      int64_t   e,
                      int64_t   h,
                      int64_t   n,
                      int64_t   m,
                      int64_t   recent,
                      int64_t   w,
                      int       pairs   = GGML_BEACON_PAIRS_NEOX,
                      float     softcap = 0.0f) :
        type_k(type_k),
        type_v(type_v),
        d(d),
        e(e),
        h(h),
        n(n),
        m(m),
        recent(recent),
        w(w),
        pairs(pairs),
        softcap(softcap) {}

    std::string vars() override { return VARS_TO_STR11(type_k, type_v, d, e, h, n, m, recent, w, pairs, softcap); }

    // The last row says which witness: rounding may choose another one that is as near.
    double err(const float * a, const float * b, size_t size) override {
        const size_t row = h * n;
        if (size != 4 * row) {
            return nmse(a, b, size);  // a sentinel
        }
        double worst = 0.0;
        for (size_t i = 0; i < 3 * row; i += row) {
            const bool is_empty = std::all_of(b + i, b + i + row, [](float x) { return x == 0.0f; });
            const bool is_equal = std::equal(a + i, a + i + row, b + i);
            worst               = std::max(worst, is_equal ? 0.0 : is_empty ? 1.0 : nmse(b + i, a + i, row));
        }
        return worst;
    }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        given.clear();
        ggml_beacon_score_params params = {};

        params.n_beacon   = m;
        params.n_sink     = 4;
        params.boundary   = n;
        params.n_hadamard = ggml_is_quantized(type_k) ? d & -d : 0;
        params.scale      = 1.0f / std::sqrt((float) d);
        params.softcap    = softcap;
        params.rope       = { (int32_t) d, pairs, 0.9f };

        std::vector<int32_t> meta = ascending(n, 0, 2);  // positions of the cells, the later half above the boundary
        for (int64_t i = 0; i < m + recent; ++i) {
            meta.push_back(i < m ? 1 << 30 : n + i);
        }
        for (int64_t i = 0; i < w; ++i) {
            meta.push_back(n - w + i);
        }
        std::vector<int32_t> pos;
        for (int64_t g = 0; g < h; ++g) {
            const auto part = ascending(n, g, N_POS / (n + h));
            pos.insert(pos.end(), part.begin(), part.end());
        }
        std::vector<int32_t> counts(h * m);
        for (int64_t i = 0; i < h * m; ++i) {
            counts[i] = i % 3;
        }
        ggml_tensor * k = ggml_new_tensor_4d(ctx, type_k, d, h, n + 7, 2);
        ggml_tensor * v = ggml_new_tensor_4d(ctx, type_v, e, h, n + 7, 2);

        const int64_t p         = m + recent;
        ggml_tensor * probes    = p ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, p, h) : nullptr;
        ggml_tensor * witnesses = w ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d + e, w, h) : nullptr;
        ggml_tensor * cells     = make(ctx, GGML_TYPE_I32, n, 1, 1, ascending(n, 7, 1));
        ggml_tensor * about     = make(ctx, GGML_TYPE_I32, n + p + w, 1, 1, meta);
        ggml_tensor * true_pos  = make(ctx, GGML_TYPE_I32, n, h, 1, pos);
        ggml_tensor * turns     = pairs == GGML_BEACON_PAIRS_NONE ? nullptr : make_turns(ctx, d);
        ggml_tensor * count     = m ? make(ctx, GGML_TYPE_F32, 1, m, h, counts) : nullptr;
        return ggml_beacon_score(ctx, beacon_plane(ctx, k, 1), beacon_plane(ctx, v, 1), probes, witnesses, cells, about,
                                 true_pos, turns, count, &params);
    }
};

struct test_beacon_move : public test_beacon {
    const ggml_type type_k, type_v;
    const int64_t   d, h, n, n_keep, first, n_layer;

    test_beacon_move(ggml_type type_k,
                     ggml_type type_v,
                     int64_t   d,
                     int64_t   h,
                     int64_t   n,
                     int64_t   n_keep,
                     int64_t   first,
                     int64_t   n_layer) :
        type_k(type_k),
        type_v(type_v),
        d(d),
        h(h),
        n(n),
        n_keep(n_keep),
        first(first),
        n_layer(n_layer) {}

    std::string vars() override { return VARS_TO_STR8(type_k, type_v, d, h, n, n_keep, first, n_layer); }

    double max_nmse_err() override { return 0.0; }  // bytes as they are

    ggml_tensor * build_graph(ggml_context * ctx) override {
        given.clear();
        std::vector<ggml_tensor *> caches, planes;
        for (int64_t i = 0; i < 2 * n_layer; ++i) {
            caches.push_back(ggml_new_tensor_4d(ctx, i % 2 ? type_v : type_k, d, h, n, 2));
            planes.push_back(beacon_plane(ctx, caches.back(), 1));
        }
        std::vector<int32_t> index;
        for (int64_t i = 0; i < n_layer * h * n_keep; ++i) {
            const int64_t kept = i % n_keep;
            const int64_t step = (n - first) / n_keep;
            const int64_t more =
                (n - first) % n_keep;  // all rows of a head come from that much further, or the last few
            const int64_t late = std::max<int64_t>(0, kept - (n_keep - 1 - more));
            index.push_back(first + kept * step + (i / n_keep % 2 ? late : more));
        }
        ggml_tensor * rows = make(ctx, GGML_TYPE_I32, n_keep, h, n_layer, index);
        ggml_tensor * out  = ggml_beacon_move(ctx, planes.data(), planes.size(), rows, first);
        read_back(ctx, out, caches);
        return out;
    }
};

static void add_beacon_cases(std::vector<std::unique_ptr<test_case>> & cases) {
    const std::vector<ggml_type> types = { GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                           GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                                           GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL };

    for (const int pairs : { GGML_BEACON_PAIRS_NONE, GGML_BEACON_PAIRS_NORMAL, GGML_BEACON_PAIRS_NEOX }) {
        cases.emplace_back(new test_beacon_track(64, 3, 3, 16, 16, pairs));
        cases.emplace_back(new test_beacon_track(128, 8, 4, 67, 8, pairs));
        cases.emplace_back(new test_beacon_track(576, 1, 7, 1, 70, pairs));

        cases.emplace_back(
            new test_beacon_score(GGML_TYPE_F16, GGML_TYPE_F16, 96, 96, 2, 257, 8, 16, 40, pairs, 20.0f));
    }
    for (size_t i = 0; i < types.size(); ++i) {
        const ggml_type k = types[i];
        const ggml_type v = types[(i + 1) % types.size()];

        cases.emplace_back(new test_beacon_score(k, k, 64, 64, 3, 31, 8, 48, 12));
        cases.emplace_back(new test_beacon_score(k, v, 128, 128, 8, 1000, 8, 64, 160));
        cases.emplace_back(new test_beacon_score(k, v, 576, 512, 1, 257, 16, 0, 31));
        for (const int64_t n : { 31, 257 }) {
            cases.emplace_back(new test_beacon_move(k, v, 64, 3, n, n, 0, 1));
            cases.emplace_back(new test_beacon_move(k, v, 128, 2, n, n - n / 8, 0, 4));
            cases.emplace_back(new test_beacon_move(k, v, 576, 1, n, n / 2, n / 4, 2));
        }
    }
    cases.emplace_back(new test_beacon_score(GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 2, 65, 0, 16, 12));
    cases.emplace_back(new test_beacon_score(GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 2, 65, 8, 16, 0));
}
