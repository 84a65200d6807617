#include "llama-kv-beacon.h"

#include "beacon-api.h"
#include "beacon-run.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

//
// creation
//

std::unique_ptr<llama_kv_beacon> llama_kv_beacon::create(bool                   v_trans,
                                                         const llama_kv_cache * other,
                                                         llama_swa_type         swa_type,
                                                         const char *           name_tag) {
    const beacon_params * pending = beacon_pending_params();

    if (!pending || swa_type != LLAMA_SWA_TYPE_NONE) {
        return nullptr;
    }
    if (name_tag[0] != '\0') {  // an indexer's
        throw std::runtime_error(
            beacon_fail("this model can't live in a KV budget: its memory has caches that mirror each other's cells"));
    }
    if (other) {
        throw std::runtime_error(beacon_fail("a KV budget can't be set for a cache that shares another one's cells"));
    }
    if (v_trans) {
        throw std::runtime_error(beacon_fail("a KV budget needs flash attention, which is off"));
    }

    return std::unique_ptr<llama_kv_beacon>(new llama_kv_beacon(*pending));
}

// the cache in a memory module that attends to everything
static llama_kv_cache * find_cache(const llama_memory_i * mem) {
    if (const auto * m = dynamic_cast<const llama_kv_cache *>(mem)) {
        return const_cast<llama_kv_cache *>(m);
    }
    if (const auto * m = dynamic_cast<const llama_kv_cache_iswa *>(mem)) {
        return m->get_base();
    }
    if (const auto * m = dynamic_cast<const llama_memory_hybrid *>(mem)) {
        return m->get_mem_attn();
    }
    if (const auto * m = dynamic_cast<const llama_memory_hybrid_iswa *>(mem)) {
        return m->get_mem_attn()->get_base();
    }
    return nullptr;
}

llama_kv_beacon * llama_kv_beacon::find(const llama_memory_i * mem) {
    const llama_kv_cache * cache = find_cache(mem);

    return cache ? cache->beacon.get() : nullptr;
}

void llama_kv_beacon::init(llama_kv_cache & cache) {
    kv       = &cache;
    n_stream = cache.n_stream;

    if (cache.layers.empty()) {
        throw std::runtime_error(
            beacon_fail("a KV budget has nothing to bound: no layer of this model attends to everything"));
    }

    const auto & hparams = cache.hparams;

    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs;

    for (const auto & kv_layer : cache.layers) {
        const uint32_t il = kv_layer.il;

        beacon_layer layer;
        layer.il            = il;
        layer.n_head        = hparams.n_head(il);
        layer.n_head_kv     = hparams.n_head_kv(il);
        layer.n_embd_head_k = hparams.n_embd_head_k(il);
        layer.n_embd_head_v = hparams.n_embd_head_v(il);
        layer.pos_offs      = pos_stride;
        layer.k             = kv_layer.k;
        layer.v             = kv_layer.v;

        pos_stride += (size_t) layer.n_head_kv * params.budget;

        auto & ctx = ctxs[ggml_backend_buffer_get_type(kv_layer.k->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ 5 * (1 + n_stream) * cache.layers.size() * ggml_tensor_overhead(), nullptr, true }));
        }

        const auto make = [&](ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, const char * name) {
            ggml_tensor * t = ggml_new_tensor_4d(ctx.get(), type, ne0, ne1, ne2, ne3);
            ggml_format_name(t, "cache_beacon_%s_l%d", name, il);
            return t;
        };

        const int64_t h = layer.n_head_kv;
        const int64_t d = layer.n_embd_head_k;

        layer.q                   = make(GGML_TYPE_F16, d * layer.n_head, 2 * params.n_probe + 1, n_stream, 1, "q");
        const bool    has_moments = policy.parts & BEACON_PART_EXPECTED;
        const int64_t m           = has_moments ? layer.n_head / layer.n_head_kv : params.n_beacon;

        layer.mean  = make(GGML_TYPE_F32, d, m, h, n_stream, "mean");
        layer.count = make(GGML_TYPE_F32, 1, m, h, n_stream, "count");
        layer.norm  = make(GGML_TYPE_F32, 1, m, h, n_stream, "norm");
        if (has_moments) {
            layer.moment = make(GGML_TYPE_F32, d, d, layer.n_head, n_stream, "moment");
        }

        layers.push_back(layer);
    }

    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_t buf;
        if (hparams.no_alloc) {
            buf = ggml_backend_buft_alloc_buffer(buft, 0);
            for (auto * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
                t->buffer = buf;
            }
        } else {
            buf = ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
        }
        if (!buf) {
            throw std::runtime_error(beacon_fail("failed to allocate the query rows and beacons of the KV budget"));
        }
        ggml_backend_buffer_clear(buf, 0);

        LLAMA_LOG_INFO("%s: %10s beacon buffer size = %8.2f MiB\n", __func__, ggml_backend_buffer_name(buf),
                       ggml_backend_buffer_get_size(buf) / 1024.0 / 1024.0);

        ctxs_bufs.emplace_back(std::move(ctx), buf);
    }

    streams.resize(n_stream);
    for (auto & st : streams) {
        st.rows.init(params.n_probe, params.window);
    }

    LLAMA_LOG_INFO("%s: KV budget = %u cells per sequence, %u layers, window %u, %u sinks, %u recent, %u beacons\n",
                   __func__, params.budget, (uint32_t) layers.size(), params.window, params.n_sink, params.n_recent,
                   params.n_beacon);
}

//
// decode graph
//

// where the queries of each token of the ubatch go
class llm_graph_input_beacon_q : public llm_graph_input_i {
  public:
    explicit llm_graph_input_beacon_q(llama_kv_beacon * beacon) : beacon(beacon) {}

    void set_input(const llama_ubatch * ubatch) override {
        if (idxs->buffer) {
            beacon->set_input_q_idxs(idxs, ubatch);
        }
    }

    bool can_reuse(const llm_graph_params & params) override { return idxs->ne[0] == params.ubatch.n_tokens; }

    llama_kv_beacon * beacon;

    ggml_tensor * idxs = nullptr;  // I64 [n_tokens] global over all streams
};

int32_t llama_kv_beacon::find_layer(int32_t il) const {
    const auto it = std::find_if(layers.begin(), layers.end(), [&](const beacon_layer & l) { return l.il == il; });

    return it == layers.end() ? -1 : it - layers.begin();
}

void llama_kv_beacon::build_store_q(ggml_context *     ctx,
                                    ggml_cgraph *      gf,
                                    llm_graph_result * res,
                                    ggml_tensor *      q_cur,
                                    float              kq_scale,
                                    int                il) {
    const int32_t i = find_layer(il);
    if (i < 0) {
        return;  // a layer that attends to another one's cells: that one's queries speak for it
    }

    auto & layer = layers[i];

    GGML_ASSERT(q_cur->ne[0] == layer.n_embd_head_k && q_cur->ne[1] == layer.n_head);

    llm_graph_input_beacon_q * inp = nullptr;
    for (auto & other : res->inputs) {
        inp = dynamic_cast<llm_graph_input_beacon_q *>(other.get());
        if (inp) {
            break;
        }
    }
    if (!inp) {
        auto input = std::make_unique<llm_graph_input_beacon_q>(this);

        input->idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, q_cur->ne[2]);
        ggml_set_input(input->idxs);
        ggml_set_name(input->idxs, "beacon_inp_q_idxs");

        inp = input.get();
        res->add_input(std::move(input));
    }

    const int64_t n_embd = q_cur->ne[0] * q_cur->ne[1];

    ggml_tensor * rows = ggml_reshape_2d(ctx, layer.q, n_embd, layer.q->ne[1] * layer.q->ne[2]);
    ggml_tensor * q    = ggml_is_contiguous(q_cur) ? ggml_reshape_2d(ctx, q_cur, n_embd, q_cur->ne[2]) :
                                                     ggml_cont_2d(ctx, q_cur, n_embd, q_cur->ne[2]);

    ggml_build_forward_expand(gf, ggml_set_rows(ctx, rows, q, inp->idxs));

    layer.stored   = true;
    layer.kq_scale = kq_scale;
}

void llama_kv_beacon::set_input_q_idxs(ggml_tensor * dst, const llama_ubatch * ubatch) {
    const uint32_t n_rows = 2 * params.n_probe + 1;  // per stream

    for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
        streams[kv->seq_to_stream[ubatch->seq_id[i][0]]].rows.push(ubatch->pos[i]);
    }

    // a row that is taken twice in one ubatch belongs to the later token, the earlier one is scrapped
    std::vector<int64_t> idxs(ubatch->n_tokens);
    std::vector<bool>    taken(n_stream * n_rows, false);
    for (int64_t i = ubatch->n_tokens - 1; i >= 0; --i) {
        const uint32_t s = kv->seq_to_stream[ubatch->seq_id[i][0]];

        idxs[i] = s * n_rows + streams[s].rows.row_of(ubatch->pos[i]);
        if (taken[idxs[i]]) {
            idxs[i] = s * n_rows + n_rows - 1;
        }
        taken[idxs[i]] = true;
    }
    ggml_backend_tensor_set(dst, idxs.data(), 0, ggml_nbytes(dst));
}

//
// sequences
//

int32_t llama_kv_beacon::stream_of(llama_seq_id seq_id) const {
    return has_seq(seq_id) ? (int32_t) kv->seq_to_stream[seq_id] : -1;
}

bool llama_kv_beacon::has_seq(llama_seq_id seq_id) const {
    return seq_id >= 0 && seq_id < (llama_seq_id) n_stream;
}

void llama_kv_beacon::reset_stream(stream_state & st) {
    st.rows.reset();
    st.has_beacons = false;
    st.has_empty   = false;
    st.n_pin       = 0;
    st.boundary    = 0;
    st.prompt_open = true;
    st.n_round     = 0;
    st.pos_seen    = 0;
    st.pos         = {};
    st.carried     = {};
    st.twin        = {};
}

void llama_kv_beacon::clear() {
    for (auto & st : streams) {
        reset_stream(st);
    }
}

bool llama_kv_beacon::can_seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    if (seq_id < 0) {
        for (uint32_t s = 0; s < n_stream; ++s) {
            if (!can_seq_rm(s, p0, p1)) {
                return false;
            }
        }
        return true;
    }
    if (!has_seq(seq_id)) {
        return true;  // nothing there
    }

    const auto &    st      = streams[stream_of(seq_id)];
    const llama_pos pos_max = kv->v_cells[stream_of(seq_id)].seq_pos_max(seq_id);

    p0 = std::max(p0, 0);
    p1 = p1 < 0 ? std::numeric_limits<llama_pos>::max() : p1;

    if (p0 >= p1 || p0 > pos_max) {
        return true;  // nothing to remove
    }

    // every head holds these tokens, or everything that was compacted goes
    return p0 >= st.boundary || (p0 <= (llama_pos) std::max(params.n_sink, st.n_pin) && p1 > pos_max);
}

bool llama_kv_beacon::mem_can_seq_rm(const llama_memory_i * mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    const auto * beacon = find(mem);
    if (!beacon) {
        return true;
    }
    if (!beacon->can_seq_rm(seq_id, p0, p1)) {
        return false;
    }

    const auto * hybrid      = dynamic_cast<const llama_memory_hybrid *>(mem);
    const auto * hybrid_iswa = dynamic_cast<const llama_memory_hybrid_iswa *>(mem);

    const auto * iswa = hybrid_iswa ? hybrid_iswa->get_mem_attn() : dynamic_cast<const llama_kv_cache_iswa *>(mem);
    const auto * swa  = iswa ? iswa->get_swa() : nullptr;
    const auto * recr = hybrid_iswa ? hybrid_iswa->get_mem_recr() : hybrid ? hybrid->get_mem_recr() : nullptr;

    if (recr && seq_id < 0) {
        return false;  // it takes one sequence at a time
    }
    if (p0 <= 0) {
        return true;
    }

    for (uint32_t s = 0; s < beacon->n_stream; ++s) {
        if (seq_id >= 0 && seq_id != (llama_seq_id) s) {
            continue;
        }
        // the sliding window half has to hold the window before p0 still
        if (swa && p0 <= swa->seq_pos_max(s) &&
            swa->seq_pos_min(s) > std::max<llama_pos>(0, p0 - (llama_pos) swa->n_swa + 1)) {
            return false;
        }
        // a recurrent state can't go back, unless it keeps snapshots: then it answers for itself
        if (recr && recr->n_rs_seq == 0 && p0 <= recr->seq_pos_max(s)) {
            return false;
        }
    }
    return true;
}

bool llama_kv_beacon::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (!can_seq_rm(seq_id, p0, p1)) {
        LLAMA_LOG_DEBUG("%s: seq %d: [%d, %d) reaches into evicted tokens, boundary = %d\n", __func__, seq_id, p0, p1,
                        seq_id < 0 ? 0 : boundary(seq_id));
        return false;
    }

    p0 = std::max(p0, 0);
    p1 = p1 < 0 ? std::numeric_limits<llama_pos>::max() : p1;

    for (uint32_t s = 0; s < n_stream; ++s) {
        auto & st = streams[s];
        if ((seq_id >= 0 && seq_id != (llama_seq_id) s) || p0 >= p1) {
            continue;
        }
        const llama_pos pos_max = kv->v_cells[s].seq_pos_max(s);
        if (p0 > pos_max) {
            continue;  // nothing goes
        }
        if (p1 <= pos_max) {
            continue;  // the end stays: the queries are history, and the tokens before it are all held or all gone
        }
        if (p0 <= kv->v_cells[s].seq_pos_min(s)) {
            reset_stream(st);  // all goes
            continue;
        }

        const uint32_t n_pin = std::min<uint32_t>(st.n_pin, p0);
        if (p0 < st.boundary) {
            reset_stream(st);
        }
        st.n_pin    = n_pin;
        st.pos_seen = std::min(st.pos_seen, p0);
        st.rows.drop_from(p0);
    }
    return true;
}

bool llama_kv_beacon::can_seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) const {
    if (seq_id_src == seq_id_dst) {
        return false;  // nothing to do
    }
    if (!has_seq(seq_id_src) || !has_seq(seq_id_dst)) {
        beacon_fail("seq_cp(%d, %d): sequences under a KV budget are 0 to %u", seq_id_src, seq_id_dst, n_stream - 1);
        return false;
    }

    const llama_pos pos_max = kv->v_cells[stream_of(seq_id_src)].seq_pos_max(seq_id_src);
    if (p0 > 0 || (p1 >= 0 && p1 <= pos_max)) {
        beacon_fail("seq_cp(%d, %d, %d, %d): under a KV budget a sequence is copied as a whole, [0, %d)", seq_id_src,
                    seq_id_dst, p0, p1, pos_max + 1);
        return false;
    }

    return true;
}

bool llama_kv_beacon::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    if (!can_seq_cp(seq_id_src, seq_id_dst, p0, p1)) {
        return false;
    }
    streams[stream_of(seq_id_dst)] = streams[stream_of(seq_id_src)];
    return true;
}

bool llama_kv_beacon::mem_prepare_seq_cp(const llama_memory_i * mem,
                                         llama_seq_id           seq_id_src,
                                         llama_seq_id           seq_id_dst,
                                         llama_pos &            p0,
                                         llama_pos &            p1) {
    auto * beacon = find(mem);
    if (!beacon) {
        return true;
    }
    if (!beacon->can_seq_cp(seq_id_src, seq_id_dst, p0, p1)) {
        return false;
    }
    p0 = -1;
    p1 = -1;
    return true;
}

void llama_kv_beacon::copy_stream(uint32_t ssrc, uint32_t sdst) {
    for (ggml_tensor * t : stream_tensors()) {
        const size_t size = ggml_nbytes(t) / n_stream;

        std::vector<uint8_t> data(size);
        ggml_backend_tensor_get(t, data.data(), ssrc * size, size);
        ggml_backend_tensor_set(t, data.data(), sdst * size, size);
    }
    check_invariants(sdst);
}

std::vector<ggml_tensor *> llama_kv_beacon::stream_tensors() const {
    std::vector<ggml_tensor *> tensors;
    for (const auto & layer : layers) {
        tensors.push_back(layer.q);
        for (ggml_tensor * t : layer.history()) {
            tensors.push_back(t);
        }
    }
    return tensors;
}

bool llama_kv_beacon::refuse_shift(const char * func) const {
    beacon_fail("%s: positions can't be moved under a KV budget (llama_memory_can_shift is false)", func);
    return true;
}

void llama_kv_beacon::memory_breakdown(std::map<ggml_backend_buffer_type_t, size_t> & mb) const {
    for (const auto & [ctx, buf] : ctxs_bufs) {
        auto * buft = ggml_backend_buffer_get_type(buf.get());
        mb[buft] += kv->hparams.no_alloc ? ggml_backend_alloc_ctx_tensors_from_buft_size(ctx.get(), buft) :
                                           ggml_backend_buffer_get_size(buf.get());
    }
}

const char * llama_kv_beacon::find_contradiction(uint32_t s) const {
    const auto & st    = streams[s];
    const auto & table = kv->v_cells[s];

    if (table.get_used() > params.budget) {
        return "more cells than the budget";
    }
    const bool      has_images = kv->hparams.n_pos_per_embd() > 1;  // their patches share a position
    const llama_pos pos_max    = table.seq_pos_max(s);

    for (const bool is_recent : { false, true }) {
        std::vector<int32_t> rows;
        std::vector<int32_t> pos;
        st.rows.list(is_recent, rows, pos);
        if (!pos.empty() && pos.back() > pos_max) {
            return "a query of a token that is not there";
        }
    }

    std::vector<int32_t> cells;
    list_cells(s, cells);

    if (!cells.empty() && table.pos_get(cells[0]) < 0) {
        return "a negative position";
    }
    const int32_t n_front = std::max(params.n_sink, st.n_pin);
    for (const auto & layer : layers) {
        for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
            int32_t last = -1;
            for (const int32_t cell : cells) {
                const int32_t pos       = pos_true(s, layer, head, cell);
                const int32_t pos_table = table.pos_get(cell);

                if (!table.seq_has(cell, s)) {
                    return "a cell of another sequence";
                }
                if (pos < 0 || pos > pos_max) {
                    return "a position outside of the sequence";
                }
                if (has_images) {
                    continue;
                }
                if (pos <= last) {
                    return "a head holds a position twice, or out of order";
                }
                if (st.boundary > 0 && pos_table < n_front && pos_table != pos) {
                    return "a sink or a pinned token has moved";
                }
                if (st.boundary > 0 && (pos_table >= st.boundary) != (pos >= st.boundary)) {
                    return "the boundary is wrong";
                }
                last = pos;
            }
        }
    }
    return nullptr;
}

void llama_kv_beacon::check_invariants([[maybe_unused]] uint32_t s) const {
#ifdef BEACONKV_CHECK
    if (const char * what = find_contradiction(s)) {
        GGML_ABORT("sequence %u: %s", s, what);
    }
#endif
}

//
// compaction
//

void llama_kv_beacon::begin_batch(llama_seq_id seq_id, uint32_t n_new, llama_pos pos) {
    auto & st = streams[stream_of(seq_id)];

    // a prompt has ended when a single token follows a batch: pin it if it is small
    if (n_new == 1 && st.prompt_open && st.boundary == 0 && used(seq_id) <= params.budget * params.pin_share) {
        st.n_pin = std::max<uint32_t>(st.n_pin, pos);
    }
    st.prompt_open = n_new > 1;
}

void llama_kv_beacon::request(llama_seq_id seq_id, uint32_t n_new) {
    streams[stream_of(seq_id)].n_new_requested = n_new;
}

bool llama_kv_beacon::is_requested() const {
    return std::any_of(streams.begin(), streams.end(), [](const stream_state & st) { return st.n_new_requested > 0; });
}

void llama_kv_beacon::cancel() {
    for (auto & st : streams) {
        st.n_new_requested = 0;
    }
}

bool llama_kv_beacon::compact(llama_context & lctx) {
    llama_synchronize(&lctx);

    status = GGML_STATUS_SUCCESS;

    // the first failure is the one that get_failure() tells
    bool res = true;
    for (uint32_t s = 0; res && s < n_stream; ++s) {
        if (streams[s].n_new_requested > 0) {
            res = compact_stream(lctx, s);
        }
    }
    cancel();

    has_failed = !res;
    return res;
}

int llama_kv_beacon::get_failure() const {
    if (!has_failed) {
        return 0;
    }
    switch (status) {
        case GGML_STATUS_ABORTED:
            return 2;
        case GGML_STATUS_ALLOC_FAILED:
            return -2;
        case GGML_STATUS_FAILED:
            return -3;
        case GGML_STATUS_SUCCESS:
            break;
    }
    return 1;  // the batch is too large
}

void llama_kv_beacon::list_cells(uint32_t s, std::vector<int32_t> & cells) const {
    const auto & table = kv->v_cells[s];

    cells.clear();
    for (uint32_t i = 0; i < table.used_max_p1(); ++i) {
        if (!table.is_empty(i)) {
            cells.push_back(i);
        }
    }
    std::stable_sort(cells.begin(), cells.end(),
                     [&](int32_t a, int32_t b) { return table.pos_get(a) < table.pos_get(b); });
}

int32_t llama_kv_beacon::pos_true(uint32_t s, const beacon_layer & layer, uint32_t head, uint32_t cell) const {
    const auto & st = streams[s];

    const llama_pos pos = kv->v_cells[s].pos_get(cell);

    // cells that were filled since the last compaction say themselves where they are
    return pos >= st.boundary ? pos : st.pos[layer.pos_offs + (size_t) head * params.budget + cell];
}

bool llama_kv_beacon::compact_stream(llama_context & lctx, uint32_t s) {
    auto & st    = streams[s];
    auto & cells = kv->v_cells[s];

    const llama_seq_id seq_id = s;

    check_invariants(s);

    beacon_plan plan;
    plan.params = &params;
    plan.kv     = kv;
    plan.layers = &layers;
    plan.parts  = policy.parts;
    plan.stream = s;
    plan.turns  = &turns;

    list_cells(s, plan.cells);
    for (const int32_t cell : plan.cells) {
        plan.table_pos.push_back(cells.pos_get(cell));
    }

    const uint32_t n     = plan.n();
    const uint32_t n_new = st.n_new_requested;

    plan.now      = cells.seq_pos_max(seq_id) + 1;
    plan.boundary = st.boundary;
    plan.n_prefix =
        std::lower_bound(plan.table_pos.begin(), plan.table_pos.end(), (int32_t) std::max(params.n_sink, st.n_pin)) -
        plan.table_pos.begin();

    // with images there are more cells than positions
    const int64_t n_after  = std::max<int64_t>(plan.now, n) + n_new;
    const int64_t n_target = (int64_t) beacon_n_held(params, n_after) - n_new;
    plan.n_keep            = std::max<int64_t>(n_target, plan.n_prefix + params.n_recent);

    if (plan.n_keep + n_new > params.budget || plan.n_keep >= n) {
        beacon_fail("a batch brings %u tokens of sequence %d; a KV budget of %u cells takes at most %u at once", n_new,
                    seq_id, params.budget, beacon_n_batch_max(params));
        return false;
    }

    st.rows.list(false, plan.track_rows, plan.track_pos);
    st.rows.list(true, plan.recent_rows, plan.recent_pos);

    if (!st.has_beacons && (plan.track_rows.empty() || plan.parts & BEACON_PART_EXPECTED)) {
        zero_beacons(s);  // another sequence's may be there
    }

    plan.keep.resize(layers.size());
    plan.carried.resize(layers.size());
    plan.pos.resize(layers.size());
    for (uint32_t i = 0; i < layers.size(); ++i) {
        for (uint32_t head = 0; head < layers[i].n_head_kv; ++head) {
            for (const int32_t cell : plan.cells) {
                plan.pos[i].push_back(pos_true(s, layers[i], head, cell));
            }
        }
    }
    plan.twin.resize(layers.size());
    list_newer(plan, st.n_round);
    if (trace_on) {
        trace.clear();
    }

    for (const auto & pos : plan.pos) {
        extend_turns(lctx, *std::max_element(pos.begin(), pos.end()) + 1);
    }

    const int64_t t0 = ggml_time_us();

    // a score graph that stops half-way has folded the sample into some of the centroids
    const bool had_empty = st.has_empty;
    const auto history   = read_history(s);
    const auto undo      = [&]() {
        write_history(s, history);
        st.has_empty = had_empty;
        return false;
    };

    int64_t t_select = 0;

    std::vector<beacon_scores> scores;

    const uint32_t n_per_graph = beacon_layers_per_graph(plan, lctx.get_gf_res_reserve()->get_max_nodes());

    for (plan.i0 = 0; plan.i0 < layers.size(); plan.i0 = plan.i1) {
        plan.i1 = std::min<uint32_t>(plan.i0 + n_per_graph, layers.size());

        // the first centroids come from the host
        const bool is_first = plan.parts & BEACON_PART_BEACONS && !st.has_beacons && !plan.track_rows.empty();
        if (is_first) {
            plan.init_only = true;

            beacon_graph_run run(lctx);
            status = run.compute(beacon_build_graph_score(plan, run.res, &lctx, trace_on, scores), "score");
            if (status != GGML_STATUS_SUCCESS) {
                return undo();
            }
            for (uint32_t i = plan.i0; i < plan.i1; ++i) {
                init_beacons(s, layers[i], beacon_read_f32(scores[i].q_pre), plan.track_rows.size());
            }
        }
        plan.init_only  = false;
        plan.track      = !is_first;
        plan.mask_empty = st.has_empty || (plan.track_rows.empty() && !st.has_beacons);

        if (trace_on) {
            trace_before(plan);
        }

        beacon_graph_run run(lctx);

        auto * gf = beacon_build_graph_score(plan, run.res, &lctx, trace_on, scores);
        status    = ggml_graph_n_nodes(gf) > 0 ? run.compute(gf, "score") : GGML_STATUS_SUCCESS;
        if (status != GGML_STATUS_SUCCESS) {
            return undo();
        }

        const int64_t t1 = ggml_time_us();
        for (uint32_t i = plan.i0; i < plan.i1; ++i) {
            select(plan, i, scores[i]);
        }
        t_select += ggml_time_us() - t1;
    }
    // the sample is part of the centroids now
    st.has_beacons = st.has_beacons || !plan.track_rows.empty();
    st.rows.reset_track();

    const int64_t t2 = ggml_time_us();

    // a move that stops half-way would lose rows: it runs to its end
    const auto abort_callback      = lctx.abort_callback;
    const auto abort_callback_data = lctx.abort_callback_data;
    lctx.set_abort_callback(nullptr, nullptr);

    bool is_intact = true;  // no row has moved
    for (plan.i0 = 0; status == GGML_STATUS_SUCCESS && plan.i0 < layers.size(); plan.i0 = plan.i1) {
        plan.i1 = std::min<uint32_t>(plan.i0 + n_per_graph, layers.size());

        beacon_graph_run run(lctx);

        auto * gf = beacon_build_graph_move(plan, run.res);
        if (ggml_graph_n_nodes(gf) > 0) {
            status    = run.compute(gf, "move");
            is_intact = is_intact && status == GGML_STATUS_ALLOC_FAILED;
        }
        for (uint32_t i = plan.i0; status == GGML_STATUS_SUCCESS && i < plan.i1; ++i) {
            if (!beacon_moves_in_graph(plan, i)) {
                beacon_move_host(plan, i);
                is_intact = false;
            }
        }
    }
    lctx.set_abort_callback(abort_callback, abort_callback_data);
    if (status != GGML_STATUS_SUCCESS) {
        if (!is_intact) {
            // some layers have moved and others not: better an empty sequence than a wrong one
            cells.reset();
            kv->v_heads[s] = 0;
            reset_stream(st);
            beacon_fail("rows could not be moved (%s): sequence %d is lost", ggml_status_to_string(status), seq_id);
        }
        return false;
    }

    commit(plan);

    const int64_t t3 = ggml_time_us();
    us_score += t2 - t0 - t_select;
    us_select += t_select;
    us_move += t3 - t2;

    LLAMA_LOG_DEBUG("%s: seq %d: %u -> %u cells at position %d, boundary %d\n", __func__, seq_id, n, plan.n_keep,
                    plan.now, st.boundary);

    return true;
}

std::vector<uint8_t> llama_kv_beacon::read_history(uint32_t s) const {
    std::vector<uint8_t> data;
    for (const auto & layer : layers) {
        for (const ggml_tensor * t : layer.history()) {
            data.resize(data.size() + t->nb[3]);
            ggml_backend_tensor_get(t, data.data() + data.size() - t->nb[3], s * t->nb[3], t->nb[3]);
        }
    }
    return data;
}

void llama_kv_beacon::write_history(uint32_t s, const std::vector<uint8_t> & data) const {
    const uint8_t * src = data.data();
    for (const auto & layer : layers) {
        for (ggml_tensor * t : layer.history()) {
            ggml_backend_tensor_set(t, src, s * t->nb[3], t->nb[3]);
            src += t->nb[3];
        }
    }
}

void llama_kv_beacon::zero_beacons(uint32_t s) {
    for (const auto & layer : layers) {
        for (ggml_tensor * t : layer.history()) {
            ggml_backend_tensor_memset(t, 0, s * t->nb[3], t->nb[3]);
        }
    }
}

void llama_kv_beacon::init_beacons(uint32_t                   s,
                                   const beacon_layer &       layer,
                                   const std::vector<float> & q,
                                   uint32_t                   n_rows) {
    const uint32_t d       = layer.n_embd_head_k;
    const uint32_t m       = params.n_beacon;
    const uint32_t n_group = layer.n_head / layer.n_head_kv;

    std::vector<float> x((size_t) n_rows * n_group * d);
    std::vector<float> mean((size_t) m * d);
    std::vector<float> count(m);
    std::vector<float> norm(m);

    for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
        for (uint32_t r = 0; r < n_rows; ++r) {
            const float * src = &q[((size_t) r * layer.n_head + head * n_group) * d];
            std::copy(src, src + n_group * d, &x[(size_t) r * n_group * d]);
        }
        beacon_kmeans(x.data(), n_rows * n_group, d, m, mean.data(), count.data(), norm.data());
        streams[s].has_empty |= *std::min_element(count.begin(), count.end()) == 0.0f;

        const auto set = [&](ggml_tensor * t, const std::vector<float> & data) {
            ggml_backend_tensor_set(t, data.data(), s * t->nb[3] + head * t->nb[2], data.size() * sizeof(float));
        };
        set(layer.mean, mean);
        set(layer.count, count);
        set(layer.norm, norm);
    }
}

void llama_kv_beacon::select(beacon_plan & plan, uint32_t i, const beacon_scores & scores) {
    const auto &   layer = layers[i];
    const uint32_t n     = plan.n();

    const auto beacon     = beacon_read_f32(scores.beacon);
    const auto recent     = beacon_read_f32(scores.recent);
    const auto redundancy = beacon_read_f32(scores.redundancy);
    const auto expected   = beacon_read_f32(scores.expected);

    load_carried(plan, i);
    if (trace_on) {
        keep_trace(layer.il, "carried_before", plan.carried[i]);
    }
    update_carried(plan, i, scores);

    std::vector<float> importance((size_t) layer.n_head_kv * n);
    std::vector<float> score((size_t) layer.n_head_kv * n);

    auto & keep = plan.keep[i];
    keep.resize(layer.n_head_kv);
    for (uint32_t h = 0; h < layer.n_head_kv; ++h) {
        const size_t offs = (size_t) h * n;
        const auto   at   = [&](const std::vector<float> & x) {
            return x.empty() ? nullptr : &x[offs];
        };

        beacon_head head;
        head.n          = n;
        head.n_prefix   = plan.n_prefix;
        head.n_mid      = plan.n_keep - plan.n_prefix - params.n_recent;
        head.n_recent   = params.n_recent;
        head.beacon     = at(beacon);
        head.recent     = at(recent);
        head.carried    = at(plan.carried[i]);
        head.redundancy = at(redundancy);
        head.expected   = at(expected);
        head.importance = &importance[offs];

        policy.score(params, head, &score[offs]);
        std::replace_if(&score[offs], &score[offs] + n, [](float x) { return std::isnan(x); }, -INFINITY);
        beacon_select(&score[offs], n, plan.n_prefix, params.n_recent, plan.n_keep, keep[h]);
    }

    if (trace_on) {
        keep_trace(layer.il, "importance", importance);
        if (policy.parts & BEACON_PART_REDUNDANCY) {
            keep_trace(layer.il, "similar", redundancy);
        }
        if (policy.parts & BEACON_PART_EXPECTED) {
            keep_trace(layer.il, "expected", expected);
        }
        keep_trace(layer.il, "score", score);
        trace_after(plan, i, scores);
    }
}

void llama_kv_beacon::list_newer(beacon_plan & plan, uint64_t round) const {
    const uint32_t n     = plan.n();
    const uint32_t n_new = std::min(n, params.window);  // since the last compaction
    const uint32_t n_old = n - n_new;

    const uint32_t share_old  = std::max<uint32_t>(1, params.window / 4);
    const uint32_t stride_old = std::max<uint32_t>(1, (n_old + share_old - 1) / share_old);
    for (uint32_t j = round % stride_old; j < n_old; j += stride_old) {
        plan.newer.push_back(j);
    }
    for (uint32_t j = n_old; j < n; ++j) {
        plan.newer.push_back(j);
    }
}

void llama_kv_beacon::load_carried(beacon_plan & plan, uint32_t i) const {
    const auto &   st    = streams[plan.stream];
    const auto &   layer = layers[i];
    const uint32_t n     = plan.n();

    plan.carried[i].assign((size_t) layer.n_head_kv * n, 0.0f);
    plan.twin[i].assign((size_t) layer.n_head_kv * n, -1);

    // tokens that the last compaction saw
    const uint32_t n_seen =
        std::lower_bound(plan.table_pos.begin(), plan.table_pos.end(), st.pos_seen) - plan.table_pos.begin();

    std::vector<int32_t> index(params.budget, -1);  // of these, by cell
    for (uint32_t j = 0; j < n_seen; ++j) {
        index[plan.cells[j]] = j;
    }
    for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
        const size_t offs = layer.pos_offs + (size_t) head * params.budget;
        for (uint32_t j = 0; j < n_seen; ++j) {
            const int32_t cell = st.twin[offs + plan.cells[j]];
            if (cell >= 0 && index[cell] >= 0) {
                plan.carried[i][(size_t) head * n + j] = st.carried[offs + plan.cells[j]];
                plan.twin[i][(size_t) head * n + j]    = index[cell];
            }
        }
    }
}

void llama_kv_beacon::update_carried(beacon_plan & plan, uint32_t i, const beacon_scores & scores) const {
    auto & carried = plan.carried[i];
    auto & twin    = plan.twin[i];

    if (policy.parts & BEACON_PART_RESTATED) {
        const auto likeness = beacon_read_f32(scores.restated);

        std::vector<int32_t> newer(likeness.size());
        ggml_backend_tensor_get(scores.twin, newer.data(), 0, ggml_nbytes(scores.twin));
        for (size_t j = 0; j < likeness.size(); ++j) {
            const bool is_found = newer[j] >= 0 && newer[j] < (int32_t) plan.newer.size() &&
                                  plan.newer[newer[j]] > (int32_t) (j % plan.n());  // else: no newer cell
            if (is_found && likeness[j] > carried[j]) {
                carried[j] = std::min(likeness[j], 1.0f);
                twin[j]    = plan.newer[newer[j]];
            }
        }
    }
    if (policy.parts & BEACON_PART_SUM) {
        const auto attention = beacon_read_f32(scores.recent);
        for (size_t j = 0; j < attention.size(); ++j) {
            carried[j] += std::isnan(attention[j]) ? 0.0f : attention[j];
        }
        for (size_t j = 0; j < twin.size(); ++j) {
            twin[j] = j % plan.n();
        }
    }
}

void llama_kv_beacon::commit(const beacon_plan & plan) {
    auto & st    = streams[plan.stream];
    auto & cells = kv->v_cells[plan.stream];

    const uint32_t n      = plan.n();
    const uint32_t i_last = n - params.n_recent;  // first recent cell before
    const uint32_t n_mid  = plan.n_keep - plan.n_prefix - params.n_recent;

    if (trace_on) {
        trace_rows(plan, "k_after", "v_after", {});
    }

    std::vector<int32_t> pos(pos_stride);
    std::vector<float>   carried(pos_stride);
    std::vector<int32_t> twin(pos_stride);
    for (uint32_t i = 0; i < layers.size(); ++i) {
        for (uint32_t head = 0; head < layers[i].n_head_kv; ++head) {
            const auto & keep = plan.keep[i][head];
            const size_t dst  = layers[i].pos_offs + (size_t) head * params.budget;
            const size_t src  = (size_t) head * n;

            std::vector<int32_t> cell(n, -1);  // where the cells are now
            for (uint32_t j = 0; j < plan.n_keep; ++j) {
                cell[keep[j]] = j;
            }
            for (uint32_t j = 0; j < plan.n_keep; ++j) {
                const int32_t t = plan.twin[i][src + keep[j]];

                pos[dst + j]     = pos_true(plan.stream, layers[i], head, plan.cells[keep[j]]);
                carried[dst + j] = plan.carried[i][src + keep[j]];
                twin[dst + j]    = t < 0 ? -1 : cell[t];
            }
        }
    }

    // what a kept cell says of its position: the truth in front and in the recent window, a stand-in between
    std::vector<std::pair<llama_pos, llama_kv_cell_ext>> table(plan.n_keep);
    for (uint32_t j = 0; j < plan.n_keep; ++j) {
        const bool     is_mid = j >= plan.n_prefix && j < plan.n_prefix + n_mid;
        const uint32_t src    = j < plan.n_prefix ? j :
                                is_mid            ? i_last - n_mid + (j - plan.n_prefix) :
                                                    j + n - plan.n_keep;

        table[j] = { plan.table_pos[src], cells.ext_get(plan.cells[src]) };
        if (is_mid) {
            table[j].first = std::max<llama_pos>(std::max(params.n_sink, st.n_pin),
                                                 plan.table_pos[i_last] - (int32_t) (n_mid - (j - plan.n_prefix)));
        }
    }

    cells.reset();
    for (uint32_t j = 0; j < plan.n_keep; ++j) {
        cells.pos_set(j, table[j].first);
        cells.ext_set(j, table[j].second);
        cells.seq_add(j, plan.stream);
    }
    kv->v_heads[plan.stream] = plan.n_keep;

    st.pos      = std::move(pos);
    st.carried  = std::move(carried);
    st.twin     = std::move(twin);
    st.pos_seen = plan.now;
    st.boundary = std::max(st.boundary, table[plan.n_keep - params.n_recent].first);
    st.n_round++;
    st.n_compact++;
    st.n_evicted_total += n - plan.n_keep;

    check_invariants(plan.stream);
}

void llama_kv_beacon::reserve(llama_context & lctx) {
    for (const auto & layer : layers) {
        if (!layer.stored) {
            throw std::runtime_error(
                beacon_fail("layer %d of this model attends in a way that a KV budget does not cover", layer.il));
        }
    }
    if (!lctx.get_cparams().flash_attn) {
        throw std::runtime_error(
            beacon_fail("a KV budget needs flash attention, which the backend of this model's layers lacks"));
    }
    if (lctx.get_model().hparams.no_alloc) {
        return;
    }
    extend_turns(lctx, lctx.n_ctx_seq());
    choose_fused(lctx);

    // a full cache and full query rows
    beacon_plan plan;
    plan.params     = &params;
    plan.kv         = kv;
    plan.layers     = &layers;
    plan.parts      = policy.parts;
    plan.stream     = 0;
    plan.turns      = &turns;
    plan.now        = params.budget;
    plan.boundary   = 0;
    plan.n_prefix   = 0;
    plan.n_keep     = params.budget;
    plan.track      = true;
    plan.mask_empty = true;

    plan.cells.resize(params.budget);
    std::iota(plan.cells.begin(), plan.cells.end(), 0);
    plan.table_pos = plan.cells;

    plan.track_rows.resize(params.n_probe);
    plan.track_pos   = plan.track_rows;
    plan.recent_rows = plan.track_rows;
    plan.recent_pos  = plan.track_rows;

    list_newer(plan, 0);

    plan.keep.resize(layers.size());
    plan.pos.resize(layers.size());
    for (uint32_t i = 0; i < layers.size(); ++i) {
        plan.keep[i].assign(layers[i].n_head_kv, plan.cells);
        plan.pos[i].resize((size_t) layers[i].n_head_kv * params.budget);
    }

    const uint32_t n_per_graph = beacon_layers_per_graph(plan, lctx.get_gf_res_reserve()->get_max_nodes());

    for (plan.i0 = 0; plan.i0 < layers.size(); plan.i0 = plan.i1) {
        plan.i1 = std::min<uint32_t>(plan.i0 + n_per_graph, layers.size());

        for (const bool is_score : { true, false }) {
            const auto build = [&](beacon_graph_run & run) {
                std::vector<beacon_scores> scores;
                return is_score ? beacon_build_graph_score(plan, run.res, &lctx, false, scores) :
                                  beacon_build_graph_move(plan, run.res);
            };
            {
                beacon_graph_run    run(lctx);
                std::vector<size_t> sizes(ggml_backend_sched_get_n_backends(lctx.get_sched()));
                ggml_backend_sched_reserve_size(lctx.get_sched(), build(run), sizes.data());
                bytes_scratch = std::max<uint64_t>(bytes_scratch, std::accumulate(sizes.begin(), sizes.end(), 0ull));
            }
            beacon_graph_run run(lctx);
            auto *           gf = build(run);
            if (ggml_graph_n_nodes(gf) > 0 && !ggml_backend_sched_reserve(lctx.get_sched(), gf)) {
                throw std::runtime_error(
                    beacon_fail("not enough memory for the %s graph of a compaction", is_score ? "score" : "move"));
            }
        }
    }
}

//
// public C API
//

uint32_t llama_kv_beacon::used(llama_seq_id seq_id) const {
    return kv->v_cells[stream_of(seq_id)].get_used();
}

llama_pos llama_kv_beacon::boundary(llama_seq_id seq_id) const {
    return streams[stream_of(seq_id)].boundary;
}

bool llama_kv_beacon::pin(llama_seq_id seq_id, uint32_t n) {
    auto & st = streams[stream_of(seq_id)];

    const auto &   cells = kv->v_cells[stream_of(seq_id)];
    const uint32_t n_max = std::max<uint32_t>(params.n_sink, params.budget * params.pin_share);
    const uint32_t n_seq = cells.seq_pos_max(seq_id) + 1;
    const uint32_t n_now = std::max(params.n_sink, st.n_pin);

    // images take more cells than positions
    uint32_t n_cells = 0;
    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        n_cells += cells.pos_in(i, 0, n);
    }

    if (std::max(n, n_cells) > n_max) {
        beacon_fail("can't pin %u tokens: pin_share %g of a budget of %u cells leaves room for %u", n, params.pin_share,
                    params.budget, n_max);
        return false;
    }
    if (n > n_seq) {
        beacon_fail("can't pin %u tokens: the sequence has %u", n, n_seq);
        return false;
    }
    if (st.boundary > 0 && n > n_now) {
        beacon_fail("can't pin %u tokens: after an eviction only the first %u are held by every head", n, n_now);
        return false;
    }
    st.n_pin = n;
    return true;
}

void llama_kv_beacon::get_positions(llama_seq_id seq_id, uint32_t i, uint32_t head, std::vector<int32_t> & pos) const {
    std::vector<int32_t> cells;
    list_cells(stream_of(seq_id), cells);

    pos.clear();
    for (const int32_t cell : cells) {
        pos.push_back(pos_true(stream_of(seq_id), layers[i], head, cell));
    }
}

void llama_kv_beacon::get_memory_stats(const llama_memory_i * mem, beacon_stats & stats, llama_seq_id seq_id) {
    const auto * cache = find_cache(mem);

    size_t bytes_all = 0;
    if (mem) {
        for (const auto & [buft, size] : mem->memory_breakdown()) {
            bytes_all += size;
        }
        if (!find(mem) && seq_id >= 0) {  // all that was seen is held
            stats.n_logical = mem->seq_pos_max(seq_id) + 1;
            stats.n_held    = stats.n_logical;
        }
    }
    if (cache) {
        for (const auto & layer : cache->layers) {
            stats.bytes_k += ggml_nbytes(layer.k);
            stats.bytes_v += layer.v ? ggml_nbytes(layer.v) : 0;
        }
        stats.n_layer    = cache->layers.size();
        stats.bytes_full = (stats.bytes_k + stats.bytes_v) / cache->get_size() * stats.n_ctx_seq;

        for (const auto & [buft, size] : cache->memory_breakdown()) {
            stats.bytes_allocated += size;
        }
        if (cache->beacon) {
            cache->beacon->get_stats(seq_id, stats);
        }
    }
    stats.bytes_other = bytes_all - stats.bytes_allocated;
}

void llama_kv_beacon::get_stats(llama_seq_id seq_id, beacon_stats & stats) const {
    for (uint32_t s = 0; s < n_stream; ++s) {
        const auto & st = streams[s];

        stats.bytes_host += st.pos.size() * sizeof(int32_t) + (st.carried.size() + st.twin.size()) * sizeof(float);
        if (seq_id >= 0 && seq_id != (llama_seq_id) s) {
            continue;
        }
        const uint64_t n_logical = kv->v_cells[s].seq_pos_max(s) + 1;
        const uint64_t n_held    = kv->v_cells[s].get_used();

        stats.n_logical += n_logical;
        stats.n_held += n_held;
        stats.n_evicted += n_logical - std::min(n_logical, n_held);
        stats.n_pinned += st.n_pin;
        stats.n_compact += st.n_compact;
        stats.n_evicted_total += st.n_evicted_total;
    }

    for (const auto & layer : layers) {
        stats.bytes_ring += ggml_nbytes(layer.q);
        for (const ggml_tensor * tensor : layer.history()) {
            stats.bytes_beacon += ggml_nbytes(tensor);
        }
    }
    stats.n_fused = std::count_if(layers.begin(), layers.end(), [](const beacon_layer & layer) { return layer.fused; });
    stats.budget  = params.budget;
    stats.bytes_scratch = bytes_scratch;
    stats.us_score      = us_score;
    stats.us_select     = us_select;
    stats.us_move       = us_move;
    stats.us_compact    = us_score + us_select + us_move;
}

//
// trace
//

void llama_kv_beacon::set_trace(bool on) {
    trace_on = on;
    trace.clear();
}

const std::vector<uint8_t> * llama_kv_beacon::get_trace(int32_t il, const std::string & name) const {
    const auto it = trace.find({ il, name });

    return it == trace.end() ? nullptr : &it->second;
}

template <typename T> void llama_kv_beacon::keep_trace(int32_t il, const char * name, const std::vector<T> & data) {
    const auto * bytes = (const uint8_t *) data.data();

    trace[{ il, name }] = std::vector<uint8_t>(bytes, bytes + data.size() * sizeof(T));
}

// beacons of one stream, [n_head_kv][n_beacon][ne0]
static std::vector<float> read_beacons(const ggml_tensor * t, uint32_t s) {
    std::vector<float> data(t->nb[3] / sizeof(float));
    ggml_backend_tensor_get(t, data.data(), s * t->nb[3], t->nb[3]);
    return data;
}

static std::vector<uint8_t> read_rows(const ggml_tensor * t, uint32_t s, const std::vector<int32_t> & cells) {
    std::vector<uint8_t> data(cells.size() * t->nb[1]);
    for (size_t i = 0; i < cells.size(); ++i) {
        ggml_backend_tensor_get(t, &data[i * t->nb[1]], s * t->nb[2] + cells[i] * t->nb[1], t->nb[1]);
    }
    return data;
}

static std::vector<float> read_queries(const ggml_tensor * t, uint32_t s, const std::vector<int32_t> & rows) {
    const auto data = read_rows(t, s, rows);

    std::vector<float> res(rows.size() * t->ne[0]);
    ggml_fp16_to_fp32_row((const ggml_fp16_t *) data.data(), res.data(), res.size());
    return res;
}

void llama_kv_beacon::trace_rows(const beacon_plan &  plan,
                                 const char *         k_name,
                                 const char *         v_name,
                                 std::vector<int32_t> cells) {
    if (cells.empty()) {
        cells.resize(plan.n_keep);
        std::iota(cells.begin(), cells.end(), 0);
    }
    for (const auto & layer : layers) {
        keep_trace(layer.il, k_name, read_rows(layer.k, plan.stream, cells));
        keep_trace(layer.il, v_name, read_rows(layer.v, plan.stream, cells));
    }
}

void llama_kv_beacon::trace_before(const beacon_plan & plan) {
    const uint32_t s = plan.stream;

    if (plan.i0 == 0) {
        trace_rows(plan, "k", "v", plan.cells);
    }
    for (uint32_t i = plan.i0; i < plan.i1; ++i) {
        const auto & layer = layers[i];

        const int32_t n_beacon = plan.parts & BEACON_PART_BEACONS ? params.n_beacon : 0;
        const int32_t n_recent =
            plan.parts & BEACON_PART_RECENT ? plan.recent_rows.size() * (layer.n_head / layer.n_head_kv) : 0;

        keep_trace(layer.il, "meta",
                   std::vector<int32_t>{ (int32_t) plan.n(), (int32_t) plan.track_rows.size(),
                                         (int32_t) plan.recent_rows.size(), (int32_t) plan.n_keep,
                                         (int32_t) plan.n_prefix, plan.boundary, plan.now, (int32_t) layer.n_head,
                                         (int32_t) layer.mean->ne[1], n_beacon + n_recent });

        keep_trace(layer.il, "pos", plan.pos[i]);
        keep_trace(layer.il, "table_pos", plan.table_pos);
        keep_trace(layer.il, "q_track", read_queries(layer.q, s, plan.track_rows));
        keep_trace(layer.il, "q_track_pos", plan.track_pos);
        keep_trace(layer.il, "q_recent", read_queries(layer.q, s, plan.recent_rows));
        keep_trace(layer.il, "q_recent_pos", plan.recent_pos);

        // of the first centroids the host made both
        const bool is_first = !streams[s].has_beacons;
        for (const auto & [name, t] : {
                 std::pair<std::string, ggml_tensor *>{ "centroids", layer.mean  },
                 { "counts",    layer.count },
                 { "norms",     layer.norm  }
        }) {
            auto data = read_beacons(t, s);
            if (is_first) {
                std::fill(data.begin(), data.end(), 0.0f);
            }
            keep_trace(layer.il, (name + "_before").c_str(), data);
        }
    }
}

void llama_kv_beacon::trace_after(const beacon_plan & plan, uint32_t i, const beacon_scores & scores) {
    const auto & layer = layers[i];

    keep_trace(layer.il, "q_pre", beacon_read_f32(scores.q_pre));
    keep_trace(layer.il, "probes", beacon_read_f32(scores.probes));
    keep_trace(layer.il, "k_f32", beacon_read_f32(scores.k));
    keep_trace(layer.il, "v_f32", beacon_read_f32(scores.v));
    keep_trace(layer.il, "k_pre", beacon_read_f32(scores.k_pre));
    keep_trace(layer.il, "centroids", read_beacons(layer.mean, plan.stream));
    keep_trace(layer.il, "counts", read_beacons(layer.count, plan.stream));
    keep_trace(layer.il, "norms", read_beacons(layer.norm, plan.stream));
    keep_trace(layer.il, "newer", plan.newer);
    keep_trace(layer.il, "carried", plan.carried[i]);
    keep_trace(layer.il, "twin", plan.twin[i]);

    std::vector<int32_t> keep;
    for (const auto & head : plan.keep[i]) {
        keep.insert(keep.end(), head.begin(), head.end());
    }
    keep_trace(layer.il, "keep", keep);
}
