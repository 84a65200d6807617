#pragma once

#include <cstdint>
#include <vector>

struct beacon_params;

// The parts of the algorithm that need no tensor: which queries are stored, how many cells stay, which cells stay.
// Each has its twin in beaconkv_gguf/reference.py.

// Rows of the query store of one sequence: [0, n) a sample since the last compaction, [n, 2n) the recent ones, 2n scrap.
class beacon_query_rows {
  public:
    void init(uint32_t n_rows, uint32_t window);

    void reset();        // forget everything
    void reset_track();  // forget the sample, keep the recent rows

    // the token at position pos was decoded
    void push(int32_t pos);

    // row that holds position pos, or the scrap row
    uint32_t row_of(int32_t pos) const;

    // positions >= pos were removed
    void drop_from(int32_t pos);

    // rows in use in the order of their positions, and these positions
    void list(bool recent, std::vector<int32_t> & rows, std::vector<int32_t> & pos) const;

    // all of it as numbers, and back: false if they are not what save returns for as many rows
    std::vector<int32_t> save() const;
    bool                 load(const std::vector<int32_t> & data);

  private:
    uint32_t n          = 0;
    int32_t  stride_min = 2;
    int32_t  stride     = 2;

    std::vector<int32_t> track;   // [n] position or -1
    std::vector<int32_t> recent;  // [n] position or -1
};

// Cells that stay when a batch of n_new tokens makes the sequence n_after long. It depends on n_after alone that
// beacon_n_held(n_after) are held afterwards, so the size of the batches leaves no trace.
uint32_t beacon_n_held(const beacon_params & params, uint32_t n_after);

// Largest batch per sequence that always finds room; 0 if the budget is too small for one token.
uint32_t beacon_n_batch_max(const beacon_params & params);

// One KV head: which of n cells (in the order of positions) stay, ascending. The n_prefix first and the n_recent last
// do, and of the others those with the highest score [n]; of equals the newer one.
void beacon_select(const float *          score,
                   uint32_t               n,
                   uint32_t               n_prefix,
                   uint32_t               n_recent,
                   uint32_t               n_keep,
                   std::vector<int32_t> & keep);

// Cosine k-means with a farthest-point start of n points x [n][d]: m means, counts and mean norms (zero: unused).
// Run once per sequence; later queries are folded in on the device.
void beacon_kmeans(const float * x, uint32_t n, uint32_t d, uint32_t m, float * mean, float * count, float * norm);
