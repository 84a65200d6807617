#pragma once

#include "beacon-graph.h"
#include "beacon-policy.h"
#include "beacon-select.h"
#include "beaconkv.h"
#include "llama-kv-cache.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

struct llama_cparams;
class llama_io_read_i;
class llama_io_write_i;

// The bounded part of a llama_kv_cache: it owns the query rows and the beacons, and decides which cells stay.
//
// One object per cache, created by the cache's constructor when the thread has a budget pending (beacon_scope_begin).
// Every stream holds one sequence. The patched call sites in upstream's files are the only users outside native/.
class llama_kv_beacon {
  public:
    // nullptr without a pending budget, or for a cache that the budget leaves alone (SWA). Throws for one that it
    // cannot serve.
    static std::unique_ptr<llama_kv_beacon> create(bool                   v_trans,
                                                   const llama_kv_cache * other,
                                                   llama_swa_type         swa_type,
                                                   const char *           name_tag);

    // the budgeted cache inside a memory module, or nullptr
    static llama_kv_beacon * find(const llama_memory_i * mem);

    // what seq_rm on a whole memory module would answer as far as the budget is concerned; true without one
    static bool mem_can_seq_rm(const llama_memory_i * mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    // before seq_cp on a module of several caches: may it? If so the range becomes the whole, which all of them copy
    static bool mem_prepare_seq_cp(const llama_memory_i * mem,
                                   llama_seq_id           seq_id_src,
                                   llama_seq_id           seq_id_dst,
                                   llama_pos &            p0,
                                   llama_pos &            p1);

    // bytes of the module's caches, and with a budget what its sequences hold
    static void get_memory_stats(const llama_memory_i * mem, beacon_stats & stats, llama_seq_id seq_id);

    uint32_t kv_size() const { return params.budget; }

    // allocate rows and beacons beside the finished layers of the cache
    void init(llama_kv_cache & cache);

    //
    // graph_build API
    //

    // store the rotated queries q_cur [n_embd_head, n_head, n_tokens] of layer il
    void build_store_q(ggml_context *     ctx,
                       ggml_cgraph *      gf,
                       llm_graph_result * res,
                       ggml_tensor *      q_cur,
                       float              kq_scale,
                       int                il);

    void set_input_q_idxs(ggml_tensor * dst, const llama_ubatch * ubatch);

    // worst-case graphs of a compaction; throws if they don't fit or if a layer stores no queries
    void reserve(llama_context & lctx);

    //
    // memory API: the parts of llama_kv_cache's methods that concern the budget
    //

    void clear();

    // what seq_rm(seq_id, p0, p1) would answer. Changes nothing.
    bool can_seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    // before the cells are removed; false: refuse
    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    // a sequence is copied as a whole, into a stream of its own; says why not
    bool can_seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) const;

    // before the cells are copied; false: refuse
    bool seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);

    // buffers of a pending stream copy
    void copy_stream(uint32_t ssrc, uint32_t sdst);

    // positions can't be moved under a budget; says so
    bool refuse_shift(const char * func) const;

    void memory_breakdown(std::map<ggml_backend_buffer_type_t, size_t> & mb) const;

    // one sequence, before the cache writes its part; read calls the cache. Throw (beacon-state.cpp).
    void state_write(llama_io_write_i & io, llama_seq_id seq_id) const;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags);

    // throws if what was loaded into the caches of a module can't be, or is longer than the context
    static void check_loaded(const llama_memory_i * mem, llama_seq_id seq_id, uint32_t n_ctx_seq);

    // forget a sequence, whatever its cells say
    static void empty(const llama_memory_i * mem, llama_seq_id seq_id);

    // n_new tokens of the sequence come, from position pos on
    void begin_batch(llama_seq_id seq_id, uint32_t n_new, llama_pos pos);

    // room for n_new more tokens per sequence is wanted at the next update
    void request(llama_seq_id seq_id, uint32_t n_new);
    bool is_requested() const;
    void cancel();

    // compact every stream that room was requested for; false: a stream has no room, get_failure() says why
    bool compact(llama_context & lctx);

    // what decode shall return after a compaction; 0: it went well
    int get_failure() const;

    // whether a device has the fused operators for layers like this one
    static bool supports_fused(ggml_backend_dev_t dev, const beacon_layer & layer);

    //
    // public C API (beaconkv.h)
    //

    const beacon_params & get_params() const { return params; }

    uint32_t used(llama_seq_id seq_id) const;
    bool     has_seq(llama_seq_id seq_id) const;

    void      get_positions(llama_seq_id seq_id, uint32_t ikv, uint32_t head, std::vector<int32_t> & pos) const;
    bool      pin(llama_seq_id seq_id, uint32_t n);
    llama_pos boundary(llama_seq_id seq_id) const;

    // index into the budgeted layers, or -1
    int32_t find_layer(int32_t il) const;

    const std::vector<beacon_layer> & get_layers() const { return layers; }

    void                         set_trace(bool on);
    const std::vector<uint8_t> * get_trace(int32_t il, const std::string & name) const;

  private:
    explicit llama_kv_beacon(const beacon_params & params) :
        params(params),
        policy(*beacon_policy_get(params.policy)) {}

    // state of a stream = of the sequence that lives in it
    struct stream_state {
        beacon_query_rows rows;

        bool has_beacons = false;  // the centroids are initialised
        bool has_empty   = false;  // some of them were left without a query

        uint32_t  n_pin    = 0;    // first positions that stay
        llama_pos boundary = 0;    // from here on every head holds every token; 0: nothing was evicted

        bool prompt_open = true;   // no single token was decoded since the last batch

        uint32_t n_new_requested = 0;

        uint64_t n_compact       = 0;
        uint64_t n_evicted_total = 0;

        uint32_t n_round = 0;  // compactions since the sequence began, for turns

        // what is carried along with the cells before position pos_seen, and the cell that it speaks of (-1: that one was
        // evicted, which makes it void): see beacon_plan. [layer][KV head][cell]
        llama_pos            pos_seen = 0;
        std::vector<float>   carried;
        std::vector<int32_t> twin;

        // true positions of the cells that the table gives a stand-in: [layer][KV head][cell], see pos_true()
        std::vector<int32_t> pos;
    };

    const beacon_params        params;
    const beacon_policy_impl & policy;

    llama_kv_cache * kv = nullptr;

    uint32_t n_stream = 1;

    std::vector<beacon_layer> layers;
    std::vector<stream_state> streams;

    size_t pos_stride = 0;                  // int32 per stream in stream_state::pos

    bool has_chosen = false;                // which layers are fused

    std::vector<std::vector<float>> turns;  // see beacon_plan
    uint32_t                        n_turned = 0;

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;

    ggml_status status     = GGML_STATUS_SUCCESS;  // of the last compaction's graphs
    bool        has_failed = false;

    uint64_t bytes_scratch = 0;

    int64_t us_score  = 0;
    int64_t us_select = 0;
    int64_t us_move   = 0;

    bool                                                            trace_on = false;
    std::map<std::pair<int32_t, std::string>, std::vector<uint8_t>> trace;

    int32_t stream_of(llama_seq_id seq_id) const;  // -1: no such sequence

    static void reset_stream(stream_state & st);

    void get_stats(llama_seq_id seq_id, beacon_stats & stats) const;

    // what a stream has in device memory besides K and V, [.., n_stream]
    std::vector<ggml_tensor *> stream_tensors() const;

    // where the table and the heads of a stream contradict what this file promises; nullptr: nowhere
    const char * find_contradiction(uint32_t s) const;

    // debug builds (BEACONKV_CHECK): aborts then
    void check_invariants(uint32_t s) const;

    // cells of stream s in the order of their positions
    void list_cells(uint32_t s, std::vector<int32_t> & cells) const;

    int32_t pos_true(uint32_t s, const beacon_layer & layer, uint32_t head, uint32_t cell) const;

    bool compact_stream(llama_context & lctx, uint32_t s);

    // layers whose backend has the fused operators, and where they agree with the composed graph (beacon-fused.cpp).
    // BEACONKV_FUSED=0: none; require: all, or it throws
    void choose_fused(llama_context & lctx);

    // what is wrong with them in layer i, or nullptr
    const char * check_fused(llama_context & lctx, uint32_t i);

    // let the turns reach to n_pos positions
    void extend_turns(const llama_context & lctx, uint32_t n_pos);

    // centroids of a stream, of all layers
    std::vector<uint8_t> read_history(uint32_t s) const;
    void                 write_history(uint32_t s, const std::vector<uint8_t> & data) const;

    void zero_beacons(uint32_t s);

    // first centroids of a layer, from q [n_embd_head, n_head, n_rows] with the rotation undone
    void init_beacons(uint32_t s, const beacon_layer & layer, const std::vector<float> & q, uint32_t n_rows);

    // cells that this compaction compares with the others: the new ones, and a share of the old ones that takes turns
    void list_newer(beacon_plan & plan, uint64_t round) const;

    // what earlier compactions left of layer i
    void load_carried(beacon_plan & plan, uint32_t i) const;

    // add what this one found
    void update_carried(beacon_plan & plan, uint32_t i, const beacon_scores & scores) const;

    // decide what layer i keeps
    void select(beacon_plan & plan, uint32_t i, const beacon_scores & scores);

    // the rows are in place: make the cell table agree
    void commit(const beacon_plan & plan);

    template <typename T> void keep_trace(int32_t il, const char * name, const std::vector<T> & data);

    void trace_rows(const beacon_plan & plan, const char * k_name, const char * v_name, std::vector<int32_t> cells);
    void trace_before(const beacon_plan & plan);
    void trace_after(const beacon_plan & plan, uint32_t i, const beacon_scores & scores);
};
