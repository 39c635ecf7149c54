// Repeated n-grams of words, as `data_pipeline/rules/datatrove_repetition.py` counts them.
//
// Invariants:
// - Equal 64-bit hashes are taken for equal n-grams, within a document.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace llmsys {

// A hash table from 64-bit keys to numbers, cleared in no time.
class KeyTable {
 public:
  // Forget all keys, and make room for `count` of them.
  void begin(int64_t count) {
    bits_ = 10;
    while ((int64_t{1} << bits_) < 2 * count) bits_++;
    if (keys_.size() < size_t{1} << bits_) {
      keys_.assign(size_t{1} << bits_, 0);
      stamps_.assign(size_t{1} << bits_, 0);
      values_.assign(size_t{1} << bits_, 0);
      now_ = 0;
    }
    if (++now_ == 0) {
      std::fill(stamps_.begin(), stamps_.end(), 0);
      now_ = 1;
    }
  }

  // Return the value of a key, which is `fresh` if the key is new.
  int32_t& find_or_add(uint64_t key, int32_t fresh, bool& is_new) {
    const size_t mask = (size_t{1} << bits_) - 1;
    size_t slot = (key ^ key >> 29) * 0xBF58476D1CE4E5B9 >> (64 - bits_);
    for (; stamps_[slot] == now_; slot = (slot + 1) & mask)
      if (keys_[slot] == key) return is_new = false, values_[slot];
    is_new = true;
    stamps_[slot] = now_;
    keys_[slot] = key;
    values_[slot] = fresh;
    return values_[slot];
  }

 private:
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> stamps_;
  std::vector<int32_t> values_;
  uint32_t now_ = 0;
  int bits_ = 10;
};

// Documents as ids of words, and the length of each word of the vocabulary.
class NgramCounter {
 public:
  NgramCounter(const int32_t* ids, const int64_t* offsets, int64_t documents,
               const int32_t* lengths)
      : ids_(ids), offsets_(offsets), documents_(documents), lengths_(lengths) {}

  // Write how often the most frequent n-gram occurs, the first of several, and its characters.
  void count_top(int64_t* counts, int64_t* characters) {
    for (int64_t document = 0; document < documents_; document++) {
      open(document);
      hashes_.resize(static_cast<size_t>(size_));
      for (int64_t at = 0; at < size_; at++) hashes_[at] = mix(words_[at]);
      mixed_ = hashes_;
      for (int n = kFirstTop; n <= kLastTop; n++) {
        int64_t first = 0;
        int64_t most = 0;
        find_top(n, first, most);
        const int64_t place = (n - kFirstTop) * documents_ + document;
        counts[place] = most;
        // Without any n-gram the characters of the few words are kept with a count of 0.
        characters[place] = ends_[std::min(first + n, size_)] - ends_[first];
      }
    }
  }

  // Write the characters in repeated n-grams. The scan goes from left to right: a repeated n-gram
  // is counted and skipped. Words are joined, so that `ab c` equals `a bc`.
  void count_repeated(const uint64_t* powers, const uint64_t* hashes, int64_t* characters) {
    for (int64_t document = 0; document < documents_; document++) {
      open(document);
      hashes_.assign(static_cast<size_t>(size_), 0);
      for (int n = 1; n <= kLastRepeated; n++) {
        const int64_t num_ngrams = size_ - n + 1;
        for (int64_t at = 0; at < num_ngrams; at++) {
          const int32_t last = words_[at + n - 1];
          hashes_[at] = hashes_[at] * powers[last] + hashes[last];
        }
        if (n >= kFirstRepeated)
          characters[(n - kFirstRepeated) * documents_ + document] = sum_repeated(n, num_ngrams);
      }
    }
  }

 private:
  static constexpr int kFirstTop = 2;
  static constexpr int kLastTop = 4;
  static constexpr int kFirstRepeated = 5;
  static constexpr int kLastRepeated = 10;
  static constexpr uint64_t kStep = 0x94D049BB133111EB;

  static uint64_t mix(int32_t word) {
    const uint64_t spread = (static_cast<uint64_t>(word) + 1) * 0xBF58476D1CE4E5B9;
    return (spread ^ spread >> 31) * kStep;
  }

  void open(int64_t document) {
    words_ = ids_ + offsets_[document];
    size_ = offsets_[document + 1] - offsets_[document];
    ends_.resize(static_cast<size_t>(size_ + 1));
    ends_[0] = 0;
    for (int64_t at = 0; at < size_; at++) ends_[at + 1] = ends_[at] + lengths_[words_[at]];
  }

  void find_top(int n, int64_t& first, int64_t& most) {
    const int64_t num_ngrams = size_ - n + 1;
    if (num_ngrams <= 0) return;
    table_.begin(num_ngrams);
    firsts_.clear();
    counts_.clear();
    for (int64_t at = 0; at < num_ngrams; at++) {
      hashes_[at] = hashes_[at] * kStep + mixed_[at + n - 1];
      bool is_new;
      const auto number = static_cast<int32_t>(firsts_.size());
      const int32_t group = table_.find_or_add(hashes_[at], number, is_new);
      if (is_new) {
        firsts_.push_back(at);
        counts_.push_back(0);
      }
      counts_[group]++;
    }
    for (size_t group = 0; group < firsts_.size(); group++) {
      if (counts_[group] <= most) continue;
      most = counts_[group];
      first = firsts_[group];
    }
  }

  int64_t sum_repeated(int n, int64_t num_ngrams) {
    if (num_ngrams <= 0) return 0;
    table_.begin(num_ngrams);
    int64_t sum = 0;
    for (int64_t at = 0; at < num_ngrams;) {
      bool is_new;
      table_.find_or_add(hashes_[at], 0, is_new);
      if (!is_new) sum += ends_[at + n] - ends_[at];
      at += is_new ? 1 : n;
    }
    return sum;
  }

  const int32_t* ids_;
  const int64_t* offsets_;
  int64_t documents_;
  const int32_t* lengths_;

  const int32_t* words_ = nullptr;
  int64_t size_ = 0;
  std::vector<int64_t> ends_;  // characters before each word of the document
  std::vector<uint64_t> hashes_, mixed_;
  std::vector<int64_t> firsts_, counts_;
  KeyTable table_;
};

}  // namespace llmsys
