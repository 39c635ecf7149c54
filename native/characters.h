// Sets of characters, and what a version of Unicode says of characters.
//
// Invariants:
// - The tables are those of UNICODE_VERSION. A text with a character that is not assigned there,
//   or that Python knows otherwise, is left to Python: see `is_known`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "unicode_tables.h"

namespace llmsys {

using CharacterRange = std::pair<uint32_t, uint32_t>;  // first and last
using CharacterRanges = std::vector<CharacterRange>;

constexpr uint32_t kLastCharacter = 0x10FFFF;

// Sort ranges, and join those that touch.
inline void normalize(CharacterRanges& ranges) {
  std::sort(ranges.begin(), ranges.end());
  size_t size = 0;
  for (const CharacterRange& range : ranges) {
    if (size && range.first <= ranges[size - 1].second + 1)
      ranges[size - 1].second = std::max(ranges[size - 1].second, range.second);
    else
      ranges[size++] = range;
  }
  ranges.resize(size);
}

// Return every character that is in none of the sorted ranges.
inline CharacterRanges complement(const CharacterRanges& ranges) {
  CharacterRanges others;
  uint32_t next = 0;
  for (const CharacterRange& range : ranges) {
    if (range.first > next) others.emplace_back(next, range.first - 1);
    next = range.second + 1;
  }
  if (next <= kLastCharacter) others.emplace_back(next, kLastCharacter);
  return others;
}

template <typename Table>
CharacterRanges list_ranges(const Table& table) {
  CharacterRanges ranges;
  for (const auto& range : table) ranges.emplace_back(range[0], range[1]);
  return ranges;
}

// A set of characters: bits for ASCII, and for the first plane where it has many ranges.
class CharacterSet {
 public:
  CharacterSet() = default;

  explicit CharacterSet(CharacterRanges ranges) : ranges_(std::move(ranges)) {
    normalize(ranges_);
    // A set of a few characters would take 8 KB, and a language has hundreds of them.
    const uint32_t limit = ranges_.size() > kFewRanges ? kPlane : kAscii;
    bits_.assign(limit / 64, 0);
    for (const CharacterRange& range : ranges_)
      for (uint32_t point = range.first; point <= range.second && point < limit; point++)
        bits_[point >> 6] |= uint64_t{1} << (point & 63);
  }

  template <typename Table>
  static CharacterSet from_table(const Table& table) {
    return CharacterSet(list_ranges(table));
  }

  bool contains(uint32_t point) const {
    if (point >> 6 < bits_.size()) return bits_[point >> 6] >> (point & 63) & 1;
    const auto above = std::upper_bound(ranges_.begin(), ranges_.end(),
                                        CharacterRange(point, kLastCharacter));
    return above != ranges_.begin() && point <= std::prev(above)->second;
  }

  const CharacterRanges& ranges() const { return ranges_; }

 private:
  static constexpr uint32_t kAscii = 128;
  static constexpr uint32_t kPlane = 0x10000;
  static constexpr size_t kFewRanges = 16;

  CharacterRanges ranges_;
  std::vector<uint64_t> bits_;
};

// str.isalpha
inline bool is_letter(uint32_t point) {
  static const CharacterSet letters = CharacterSet::from_table(LETTERS);
  return letters.contains(point);
}

// \w of `re`: str.isalnum, or the underscore
inline const CharacterSet& get_word_characters() {
  static const CharacterSet characters = CharacterSet::from_table(WORD_CHARACTERS);
  return characters;
}

// \d of `re`: str.isdecimal
inline const CharacterSet& get_digits() {
  static const CharacterSet digits = CharacterSet::from_table(DIGITS);
  return digits;
}

// \s of `re`: str.isspace
inline const CharacterSet& get_spaces() {
  static const CharacterSet spaces = CharacterSet::from_table(SPACES);
  return spaces;
}

// M in the category: vowel signs, accents and the like
inline bool is_combining_mark(uint32_t point) {
  static const CharacterSet marks = CharacterSet::from_table(COMBINING_MARKS);
  return marks.contains(point);
}

// P in the category
inline bool is_punctuation(uint32_t point) {
  static const CharacterSet marks = CharacterSet::from_table(PUNCTUATION_MARKS);
  return marks.contains(point);
}

inline const CharacterSet& get_assigned_characters() {
  static const CharacterSet assigned = CharacterSet::from_table(ASSIGNED);
  return assigned;
}

}  // namespace llmsys
