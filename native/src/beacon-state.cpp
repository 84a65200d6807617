#include "beacon-api.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-beacon.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>

// A state saved under a KV budget:
//
//   envelope: magic, version, sequences, fingerprint, size and checksum of what follows
//   for each sequence: the memory module's own blob; in it, in front of the bounded cache's part, a section with what
//   the budget knows about it (llama_kv_beacon::state_write)
//
// All of it is read and checked before anything is replaced. A blob of a context without a budget has no envelope.

static constexpr uint32_t STATE_MAGIC     = 0x564b4342;  // "BCKV"; a number of streams or cells in a stock blob
static constexpr uint32_t STATE_VERSION   = 1;
static constexpr uint32_t SECTION_MAGIC   = 0x534b4342;  // "BCKS"
static constexpr uint64_t STATE_SIZE_MAX  = 1ull << 46;  // no cache is that large
static constexpr uint32_t FINGERPRINT_MAX = 1u << 16;

namespace {

// a bijective step for each word: no flipped bit goes unnoticed
uint64_t checksum(const void * data, size_t size, uint64_t seed = 0xcbf29ce484222325ull) {
    uint64_t hash = seed ^ size;

    const auto * src = (const uint8_t *) data;
    while (size > 0) {
        uint64_t     word = 0;
        const size_t n    = std::min(size, sizeof(word));
        memcpy(&word, src, n);
        hash = (hash ^ word) * 0x100000001b3ull;
        hash ^= hash >> 29;
        src += n;
        size -= n;
    }
    return hash;
}

// Collects a blob in memory. With a target the tensors go there and the bytes stay here: the target keeps their data
// on the device. For one who counts, tensors are not read.
class memory_write : public llama_io_write_i {
  public:
    explicit memory_write(llama_io_write_i * target = nullptr, bool counting = false) :
        target(target),
        counting(counting) {}

    void write(const void * src, size_t size) override {
        const auto * bytes = (const uint8_t *) src;
        data.insert(data.end(), bytes, bytes + size);
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (target) {
            target->write_tensor(tensor, offset, size);
            return;
        }
        if (counting) {
            n_counted += size;
            return;
        }
        data.resize(data.size() + size);
        ggml_backend_tensor_get(tensor, data.data() + data.size() - size, offset, size);
    }

    size_t n_bytes() override { return data.size() + n_counted; }

    std::vector<uint8_t> data;

  private:
    llama_io_write_i * target;
    bool               counting;
    size_t             n_counted = 0;
};

class memory_read : public llama_io_read_i {
  public:
    explicit memory_read(const std::vector<uint8_t> & data, llama_io_read_i * source = nullptr) :
        data(data),
        source(source) {}

    void read(void * dst, size_t size) override { memcpy(dst, take(size), size); }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (source) {
            source->read_tensor(tensor, offset, size);
            return;
        }
        ggml_backend_tensor_set(tensor, take(size), offset, size);
    }

    size_t n_bytes() override { return n_read; }

  private:
    const uint8_t * take(size_t size) {
        if (size > data.size() - n_read) {
            throw std::runtime_error("unexpectedly reached end of state");
        }
        n_read += size;
        return data.data() + n_read - size;
    }

    const std::vector<uint8_t> & data;
    llama_io_read_i *            source;
    size_t                       n_read = 0;
};

// puts a number that was read back in front
class replay_read : public llama_io_read_i {
  public:
    replay_read(llama_io_read_i & source, uint32_t first) : source(source) { memcpy(head, &first, sizeof(head)); }

    void read(void * dst, size_t size) override {
        const size_t n = std::min(size, sizeof(head) - n_replayed);
        memcpy(dst, head + n_replayed, n);
        n_replayed += n;
        if (size > n) {
            source.read((uint8_t *) dst + n, size - n);
        }
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        source.read_tensor(tensor, offset, size);
    }

    void discard() override { source.discard(); }

    size_t n_bytes() override { return source.n_bytes(); }

  private:
    llama_io_read_i & source;
    uint8_t           head[sizeof(uint32_t)];
    size_t            n_replayed = 0;
};

template <typename T> void put(llama_io_write_i & io, const T & value) {
    io.write(&value, sizeof(value));
}

template <typename T> T get(llama_io_read_i & io) {
    T value;
    io.read(&value, sizeof(value));
    return value;
}

template <typename T> void put_vector(llama_io_write_i & io, const std::vector<T> & data) {
    put<uint64_t>(io, data.size());
    if (!data.empty()) {
        io.write(data.data(), data.size() * sizeof(T));
    }
}

template <typename T> std::vector<T> get_vector(llama_io_read_i & io, size_t n_max) {
    const auto n = get<uint64_t>(io);
    if (n > n_max) {
        throw std::runtime_error("a list in the saved state is too long");
    }
    std::vector<T> data(n);
    if (n > 0) {
        io.read(data.data(), n * sizeof(T));
    }
    return data;
}

using fingerprint = std::vector<std::pair<std::string, std::string>>;

// what has to be the same where a state is saved and where it is loaded, by name
fingerprint make_fingerprint(const llama_context & lctx, const llama_kv_beacon & beacon) {
    const auto & model   = lctx.get_model();
    const auto & cparams = lctx.get_cparams();
    const auto & params  = beacon.get_params();
    const auto & layer   = beacon.get_layers()[0];

    // fine-tuned models differ in nothing but their weights
    const ggml_tensor * norm = model.output_norm;

    std::vector<uint8_t> data(norm ? std::min<size_t>(ggml_nbytes(norm), 4096) : 0);
    if (norm) {
        ggml_backend_tensor_get(norm, data.data(), 0, data.size());
    }
    uint64_t weights = checksum(data.data(), data.size());
    for (const auto & [name, tensor] : model.tensors_by_name) {
        weights += checksum(name.data(), name.size(), tensor->type) * ggml_nelements(tensor);
    }

    const float rope[] = { cparams.rope_freq_base,   cparams.rope_freq_scale, cparams.yarn_ext_factor,
                           cparams.yarn_attn_factor, cparams.yarn_beta_fast,  cparams.yarn_beta_slow };

    return {
        { "model", model.desc() + " " + model.name },
        { "weights", format("%016llx", (unsigned long long) weights) },
        { "type_k", ggml_type_name(layer.k->type) },
        { "type_v", ggml_type_name(layer.v->type) },
        { "RoPE", format("%016llx", (unsigned long long) checksum(rope, sizeof(rope), cparams.n_ctx_orig_yarn)) },
        { "sequences", format("%u", cparams.n_seq_max) },
        { "kv_budget", format("%u", params.budget) },
        { "policy", beacon_policy_name(params.policy) },
        { "window", format("%u", params.window) },
        { "n_sink", format("%u", params.n_sink) },
        { "n_recent", format("%u", params.n_recent) },
        { "n_beacon", format("%u", params.n_beacon) },
        { "n_probe", format("%u", params.n_probe) },
        { "beacon_share", format("%.9g", params.beacon_share) },
        { "restated", format("%.9g", params.restated) },
        { "quota", format("%.9g", params.quota) },
        { "pin_share", format("%.9g", params.pin_share) },
    };
}

std::vector<char> encode(const fingerprint & fields) {
    std::vector<char> data;
    for (const auto & [name, value] : fields) {
        for (const auto * text : { &name, &value }) {
            data.insert(data.end(), text->c_str(), text->c_str() + text->size() + 1);
        }
    }
    return data;
}

fingerprint decode(const std::vector<char> & data) {
    std::vector<std::string> texts;
    for (auto it = data.begin(); it != data.end();) {
        const auto end = std::find(it, data.end(), '\0');
        texts.emplace_back(it, end);
        it = end == data.end() ? end : end + 1;
    }
    fingerprint fields;
    for (size_t i = 0; i + 1 < texts.size(); i += 2) {
        fields.emplace_back(texts[i], texts[i + 1]);
    }
    return fields;
}

void check_fingerprint(const fingerprint & here, const fingerprint & saved) {
    for (const auto & [name, value] : here) {
        const auto it = std::find_if(saved.begin(), saved.end(), [&](const auto & f) { return f.first == name; });
        if (it == saved.end()) {
            throw std::runtime_error(beacon_fail("the saved state does not tell its %s", name.c_str()));
        }
        if (it->second != value) {
            throw std::runtime_error(beacon_fail("the state was saved with %s = %s, this context has %s", name.c_str(),
                                                 it->second.c_str(), value.c_str()));
        }
    }
}

// sequences that seq_id stands for
std::pair<llama_seq_id, llama_seq_id> seq_range(const llama_context & lctx, llama_seq_id seq_id) {
    return seq_id < 0 ? std::make_pair(0, (llama_seq_id) lctx.n_seq_max()) : std::make_pair(seq_id, seq_id + 1);
}

void write_sequences(llama_context & lctx, llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    const auto [begin, end] = seq_range(lctx, seq_id);
    for (llama_seq_id s = begin; s < end; ++s) {
        lctx.get_memory()->state_write(io, s, flags);
    }
}

void read_sequences(llama_context & lctx, llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    const auto [begin, end] = seq_range(lctx, seq_id);
    for (llama_seq_id s = begin; s < end; ++s) {
        lctx.get_memory()->seq_rm(s, -1, -1);  // an empty sequence replaces nothing
        lctx.get_memory()->state_read(io, s, flags);
    }
}

}  // namespace

void beacon_state_write(llama_context & lctx, llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    auto * mem    = lctx.get_memory();
    auto * beacon = llama_kv_beacon::find(mem);
    if (!beacon) {
        mem->state_write(io, seq_id, flags);
        return;
    }
    // a partial state leaves out what can be cut back to where it was saved: a compacted cache can't
    flags &= ~LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    if (seq_id >= 0 && !beacon->has_seq(seq_id)) {
        throw std::runtime_error(beacon_fail("sequence %d is not in [0, %u)", seq_id, lctx.n_seq_max()));
    }
    lctx.synchronize();
    lctx.memory_update(false);  // copies of sequences that wait

    memory_write payload(flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE ? &io : nullptr, io.is_counting());
    write_sequences(lctx, payload, seq_id, flags);

    const auto fields = encode(make_fingerprint(lctx, *beacon));

    put(io, STATE_MAGIC);
    put(io, STATE_VERSION);
    put<int32_t>(io, seq_id < 0 ? -1 : 0);
    put_vector(io, fields);
    put<uint64_t>(io, payload.n_bytes());
    put(io, checksum(payload.data.data(), payload.data.size(), checksum(fields.data(), fields.size())));
    io.write(payload.data.data(), payload.n_bytes());
}

void beacon_state_read(llama_context & lctx, llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    auto *   mem    = lctx.get_memory();
    auto *   beacon = llama_kv_beacon::find(mem);
    uint32_t magic  = 0;
    try {
        magic = get<uint32_t>(io);
    } catch (const std::exception &) {
        if (!beacon) {
            mem->state_read(io, seq_id, flags);  // a draft context writes nothing
            return;
        }
        throw;
    }
    replay_read stock(io, magic);
    if (!beacon) {
        if (magic == STATE_MAGIC) {
            throw std::runtime_error(
                beacon_fail("the state was saved under a KV budget, which this context does not have"));
        }
        mem->state_read(stock, seq_id, flags);
        return;
    }
    if (seq_id >= 0 && !beacon->has_seq(seq_id)) {
        throw std::runtime_error(beacon_fail("sequence %d is not in [0, %u)", seq_id, lctx.n_seq_max()));
    }

    flags &= ~LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

    const bool is_on_device = flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;

    std::vector<uint8_t> payload;
    if (magic == STATE_MAGIC) {
        if (const auto version = get<uint32_t>(io); version != STATE_VERSION) {
            throw std::runtime_error(
                beacon_fail("the saved state has version %u, this program reads %u", version, STATE_VERSION));
        }
        const auto scope = get<int32_t>(io);  // -1: a whole context, 0: one sequence
        if (scope != -1 && scope != 0) {
            throw std::runtime_error(beacon_fail("the saved state is damaged: it is of %d", scope));
        }
        if (scope != (seq_id < 0 ? -1 : 0)) {
            throw std::runtime_error(beacon_fail("the state was saved of %s, it can't be loaded as one of %s",
                                                 scope < 0 ? "a whole context" : "one sequence",
                                                 scope < 0 ? "one sequence" : "a whole context"));
        }
        const auto fields = get_vector<char>(io, FINGERPRINT_MAX);
        const auto size   = get<uint64_t>(io);
        const auto sum    = get<uint64_t>(io);
        if (size > STATE_SIZE_MAX) {
            throw std::runtime_error(
                beacon_fail("the saved state is damaged: it claims %llu bytes", (unsigned long long) size));
        }
        // in blocks: a damaged size must find the end of the blob, not of the memory
        for (const size_t block = 1 << 24; payload.size() < size;) {
            const size_t n = std::min<uint64_t>(block, size - payload.size());
            payload.resize(payload.size() + n);
            io.read(payload.data() + payload.size() - n, n);
        }
        if (sum != checksum(payload.data(), payload.size(), checksum(fields.data(), fields.size()))) {
            throw std::runtime_error(beacon_fail("the saved state is damaged: its checksum is wrong"));
        }
        check_fingerprint(make_fingerprint(lctx, *beacon), decode(fields));
    }

    lctx.synchronize();
    lctx.memory_update(false);

    // what a failure gives back
    memory_write backup;
    write_sequences(lctx, backup, seq_id, 0);

    try {
        if (magic == STATE_MAGIC) {
            memory_read blob(payload, is_on_device ? &io : nullptr);
            read_sequences(lctx, blob, seq_id, flags);
        } else {
            mem->state_read(stock, seq_id, flags);
        }
        llama_kv_beacon::check_loaded(mem, seq_id, lctx.n_ctx_seq());
    } catch (const std::exception & err) {
        io.discard();
        const auto [begin, end] = seq_range(lctx, seq_id);
        for (llama_seq_id s = begin; s < end; ++s) {
            llama_kv_beacon::empty(mem, s);  // seq_rm does not find cells with wrong numbers
        }
        memory_read blob(backup.data);
        read_sequences(lctx, blob, seq_id, 0);
        throw std::runtime_error(beacon_fail("%s; nothing was changed", err.what()));
    }
}

//
// the bounded cache's part
//

void llama_kv_beacon::state_write(llama_io_write_i & io, llama_seq_id seq_id) const {
    const uint32_t s     = stream_of(seq_id);
    const auto &   st    = streams[s];
    const auto &   cells = kv->v_cells[s];

    std::vector<uint32_t> used;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i)) {
            used.push_back(i);
        }
    }

    put(io, SECTION_MAGIC);
    put(io, s);
    put(io, kv->v_heads[s]);
    put_vector(io, used);

    put_vector(io, st.rows.save());
    put<uint8_t>(io, st.has_beacons);
    put<uint8_t>(io, st.has_empty);
    put<uint8_t>(io, st.prompt_open);
    put(io, st.n_pin);
    put(io, st.boundary);
    put(io, st.n_compact);
    put(io, st.n_evicted_total);
    put(io, st.n_round);
    put(io, st.pos_seen);
    put_vector(io, st.carried);
    put_vector(io, st.twin);
    put_vector(io, st.pos);

    for (const ggml_tensor * t : stream_tensors()) {
        const size_t size = ggml_nbytes(t) / n_stream;
        io.write_tensor(const_cast<ggml_tensor *>(t), s * size, size);
    }
}

void llama_kv_beacon::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    const auto first = get<uint32_t>(io);
    if (first != SECTION_MAGIC) {
        // nothing was compacted where it was saved
        replay_read stock(io, first);
        kv->state_read_sinfo(stock, seq_id, flags, nullptr, nullptr);
        return;
    }
    const uint32_t s = stream_of(seq_id);

    stream_state st;
    st.rows.init(params.n_probe, params.window);

    const auto src  = get<uint32_t>(io);
    const auto head = get<uint32_t>(io);
    const auto used = get_vector<uint32_t>(io, params.budget);

    const bool has_rows = st.rows.load(get_vector<int32_t>(io, 4 * params.n_probe));
    st.has_beacons      = get<uint8_t>(io);
    st.has_empty        = get<uint8_t>(io);
    st.prompt_open      = get<uint8_t>(io);
    st.n_pin            = get<uint32_t>(io);
    st.boundary         = get<llama_pos>(io);
    st.n_compact        = get<uint64_t>(io);
    st.n_evicted_total  = get<uint64_t>(io);
    st.n_round          = get<uint32_t>(io);
    st.pos_seen         = get<llama_pos>(io);
    st.carried          = get_vector<float>(io, pos_stride);
    st.twin             = get_vector<int32_t>(io, pos_stride);
    st.pos              = get_vector<int32_t>(io, pos_stride);

    const size_t n_known = st.pos.size();  // of all that was compacted, or of nothing

    const bool is_sane =
        has_rows && src < n_stream && head <= kv->v_cells[s].size() &&
        std::adjacent_find(used.begin(), used.end(), std::greater_equal<uint32_t>()) == used.end() &&
        st.carried.size() == n_known && st.twin.size() == n_known &&
        (n_known == pos_stride || (n_known == 0 && st.boundary == 0 && st.pos_seen == 0)) && st.boundary >= 0 &&
        st.pos_seen >= 0 && st.n_pin <= std::max<uint32_t>(params.n_sink, params.budget * params.pin_share) &&
        std::all_of(st.twin.begin(), st.twin.end(), [&](int32_t t) { return t >= -1 && t < (int32_t) params.budget; });
    if (!is_sane) {
        throw std::runtime_error("the saved state is damaged: its parts contradict each other");
    }

    for (ggml_tensor * t : stream_tensors()) {
        const size_t size = ggml_nbytes(t) / n_stream;
        io.read_tensor(t, s * size, size);
    }

    // the cells go where they were
    llama_kv_cache::slot_info_vec_t sinfos(n_stream);
    if (!used.empty()) {
        sinfos[src].resize(1);
        sinfos[src].idxs[0] = used;
    }
    kv->state_read_sinfo(io, seq_id, flags, nullptr, &sinfos);
    kv->v_heads[s] = head;

    if (st.boundary > kv->v_cells[s].seq_pos_max(seq_id) + 1) {
        throw std::runtime_error("the saved state is damaged: its boundary is beyond its end");
    }

    streams[s] = std::move(st);
    if (const char * what = find_contradiction(s)) {
        throw std::runtime_error(format("the saved state is damaged: %s", what));
    }
}

// the caches with a table of cells in a memory module
static std::vector<llama_kv_cache *> list_caches(const llama_memory_i * mem) {
    const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(mem);
    const auto * iswa   = dynamic_cast<const llama_kv_cache_iswa *>(mem);
    if (const auto * m = dynamic_cast<const llama_memory_hybrid_iswa *>(mem)) {
        iswa = m->get_mem_attn();
    }
    if (iswa) {
        return { iswa->get_base(), iswa->get_swa() };
    }
    auto * cache = hybrid ? hybrid->get_mem_attn() : dynamic_cast<const llama_kv_cache *>(mem);
    return { const_cast<llama_kv_cache *>(cache) };
}

void llama_kv_beacon::check_loaded(const llama_memory_i * mem, llama_seq_id seq_id, uint32_t n_ctx_seq) {
    for (const auto * cache : list_caches(mem)) {
        for (uint32_t s = 0; s < cache->n_stream; ++s) {
            if (seq_id >= 0 && seq_id != (llama_seq_id) s) {
                continue;
            }
            const auto & cells = cache->v_cells[s];
            for (uint32_t i = 0; i < cells.size(); ++i) {
                if (!cells.is_empty(i) && (cells.pos_get(i) < 0 || !cells.seq_has(i, s))) {
                    throw std::runtime_error("the saved state is damaged: a cell has no position or no sequence");
                }
            }
            if (const llama_pos pos_max = cells.seq_pos_max(s); pos_max >= (llama_pos) n_ctx_seq) {
                throw std::runtime_error(
                    format("the saved sequence has %d tokens, this context takes %u", pos_max + 1, n_ctx_seq));
            }
        }
    }
}

void llama_kv_beacon::empty(const llama_memory_i * mem, llama_seq_id seq_id) {
    for (auto * cache : list_caches(mem)) {
        cache->v_cells[seq_id].reset();
        cache->v_heads[seq_id] = 0;
    }
    reset_stream(find(mem)->streams[seq_id]);
}
