// Sums of py3langid's naive Bayes model, as `data_pipeline/language/naive_bayes.py` computes them.
//
// What it takes is waiting for memory: 39 MB of moves and 29 MB of weights. So a text is read in
// several places at once, weights stay 16-bit numbers, and frequent n-grams are next to each other.
//
// Invariants:
// - Sums are added in the order of the features, each product rounded to float32: they are numpy's.
// - A wrong number in a table, such as of a damaged file, reads no memory outside of the tables.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace llmsys {

constexpr int kLanes = 8;            // places of a text that are read at once
constexpr int64_t kShortestLane = 16;  // bytes
constexpr int kAhead = 12;           // rows that are fetched before they are added
constexpr int kVector = 8;           // labels that are added at once
constexpr int kLineBytes = 64;       // of a cache

using Halves = int16_t __attribute__((vector_size(2 * kVector)));
using Integers = int32_t __attribute__((vector_size(4 * kVector)));
using Floats = float __attribute__((vector_size(4 * kVector)));

// A state of the automaton: where its row of moves begins, and the n-gram that ends in it
// (`features` if none does).
struct LanguageState {
  uint32_t row;
  uint32_t feature;
};

// Tables as `naive_bayes.py` maps them. `place` says which row of the weights has a feature.
struct LanguageTables {
  const uint32_t* moves;
  const LanguageState* states;
  const uint16_t* halves;
  const float* means;
  const int32_t* places;
  const float* count_weights;
  int64_t num_moves;
  int64_t num_states;
  int64_t num_features;
  int64_t num_labels;
  int64_t row_halves;  // a multiple of kVector
  int64_t context_bytes;
  int64_t num_counts;
};

// Return 1 if the processor and the operating system have vectors of 32 bytes.
inline bool has_wide_vectors() {
#ifdef __x86_64__
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX)) return false;
  unsigned kept, high;  // registers that the operating system keeps
  asm("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  if ((kept & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return b & bit_AVX2;
#else
  return false;
#endif
}

class LanguageScorer {
 public:
  explicit LanguageScorer(const LanguageTables& tables)
      : tables_(tables),
        seen_((static_cast<size_t>(tables.num_features) + 64) / 64),
        counts_(static_cast<size_t>(tables.num_features) + 1),
        sums_(static_cast<size_t>(tables.row_halves)) {}

  // Write the sum of each label, and return the number of distinct features.
  int64_t score(const uint8_t* text, int64_t size, float* sums) {
    count_features(text, size);
    has_wide_vectors_ ? add_rows_wide() : add_rows();
    memcpy(sums, sums_.data(), static_cast<size_t>(tables_.num_labels) * sizeof *sums);
    return static_cast<int64_t>(features_.size());
  }

 private:
  uint32_t move(uint32_t row, uint8_t byte) const {
    const int64_t place = static_cast<int64_t>(row) + byte;
    const uint32_t state = tables_.moves[place < tables_.num_moves ? place : 0];
    return state < tables_.num_states ? state : 0;
  }

  // Write the feature that ends at each byte. A state depends on the last bytes alone.
  void find_features(const uint8_t* text, int64_t size) {
    if (static_cast<int64_t>(ends_.size()) < size) ends_.resize(static_cast<size_t>(size));
    const LanguageState* const states = tables_.states;
    uint32_t* const ends = ends_.data();
    uint32_t rows[kLanes];
    const int64_t lane = size / kLanes;
    const bool is_short = lane < std::max(kShortestLane, tables_.context_bytes);
    if (!is_short) {
      for (int number = 0; number < kLanes; number++) {
        rows[number] = states[0].row;
        const int64_t begin = number * lane;
        for (int64_t at = number ? begin - tables_.context_bytes : 0; at < begin; at++)
          rows[number] = states[move(rows[number], text[at])].row;
      }
      for (int64_t step = 0; step < lane; step++) {
        for (int number = 0; number < kLanes; number++) {
          const int64_t at = number * lane + step;
          const LanguageState state = states[move(rows[number], text[at])];
          rows[number] = state.row;
          ends[at] = state.feature;
        }
      }
    }
    uint32_t row = is_short ? states[0].row : rows[kLanes - 1];
    for (int64_t at = is_short ? 0 : kLanes * lane; at < size; at++) {
      const LanguageState state = states[move(row, text[at])];
      row = state.row;
      ends[at] = state.feature;
    }
  }

  // List the distinct features in their order, each with the weight of its count.
  void count_features(const uint8_t* text, int64_t size) {
    find_features(text, size);
    for (int64_t at = 0; at < size; at++) {
      const uint32_t feature = ends_[static_cast<size_t>(at)];
      seen_[feature / 64] |= uint64_t{1} << feature % 64;
      counts_[feature]++;
    }
    const auto none = static_cast<size_t>(tables_.num_features);
    seen_[none / 64] &= ~(uint64_t{1} << none % 64);
    counts_[none] = 0;
    features_.clear();
    weights_.clear();
    for (size_t word = 0; word < seen_.size(); word++) {
      for (uint64_t left = seen_[word]; left; left &= left - 1) {
        const auto feature = static_cast<int32_t>(64 * word) + __builtin_ctzll(left);
        uint32_t& count = counts_[static_cast<size_t>(feature)];
        features_.push_back(feature);
        weights_.push_back(tables_.count_weights[std::min<int64_t>(count, tables_.num_counts - 1)]);
        count = 0;
      }
      seen_[word] = 0;
    }
  }

  const uint16_t* get_row(size_t number) const {
    return tables_.halves + tables_.places[features_[number]] * tables_.row_halves;
  }

  // Inlined into functions for different processors.
  [[gnu::always_inline]] void add_all_rows() {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    const size_t count = features_.size();
    const auto row_bytes = static_cast<size_t>(tables_.row_halves) * sizeof(uint16_t);
    for (size_t number = 0; number < count; number++) {
      if (number + kAhead < count) {
        const auto* next = reinterpret_cast<const char*>(get_row(number + kAhead));
        for (size_t line = 0; line < row_bytes; line += kLineBytes) __builtin_prefetch(next + line);
      }
      const uint16_t* row = get_row(number);
      const Floats weight = Floats{} + weights_[number];
      const Floats mean = Floats{} + tables_.means[features_[number]];
      for (size_t label = 0; label < sums_.size(); label += kVector) {
        Halves halves;
        memcpy(&halves, row + label, sizeof halves);
        // normal 16-bit numbers as float32: the exponent is biased by 15 there and by 127 here
        const Integers bits = __builtin_convertvector(halves, Integers);
        const Integers wide = ((bits << 13) & static_cast<int32_t>(0x8FFFE000)) + (112 << 23);
        Floats weights;
        memcpy(&weights, &wide, sizeof weights);
        Floats sum;  // by memcpy: vectors of this size need not be aligned in memory
        memcpy(&sum, &sums_[label], sizeof sum);
        sum = sum + weight * (weights - mean);
        memcpy(&sums_[label], &sum, sizeof sum);
      }
    }
  }

  void add_rows() { add_all_rows(); }
#ifdef __x86_64__
  [[gnu::target("avx2")]] void add_rows_wide() { add_all_rows(); }
#else
  void add_rows_wide() { add_all_rows(); }
#endif

  const bool has_wide_vectors_ = has_wide_vectors();
  const LanguageTables& tables_;
  std::vector<uint64_t> seen_;     // a bit for each feature
  std::vector<uint32_t> counts_;   // of each feature
  std::vector<uint32_t> ends_;     // feature at each byte
  std::vector<int32_t> features_;  // distinct ones of a text
  std::vector<float> weights_;
  std::vector<float> sums_;  // of a row
};

}  // namespace llmsys
