// The words of a chunk by the rules of a language: `SplittingRules` in
// `data_pipeline/text/splitting_rules.py`, function by function.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>

#include "expression.h"
#include "text.h"

namespace llmsys {

struct WordSpan {
  int begin;  // characters of the chunk
  int end;
};

using WordSpans = std::vector<WordSpan>;

inline Characters decode_all(string_view text) {
  Characters points;
  const char* p = text.data();
  const char* end = p + text.size();
  while (p < end) points.push_back(decode(p, end));
  return points;
}

// A chunk as bytes and as characters.
struct Chunk {
  string_view bytes;
  Characters points;
  std::vector<int> starts;  // byte of each character, and the end

  void set(string_view text) {
    bytes = text;
    points.clear();
    starts.clear();
    const char* p = text.data();
    const char* end = p + text.size();
    while (p < end) {
      starts.push_back(static_cast<int>(p - text.data()));
      points.push_back(decode(p, end));
    }
    starts.push_back(static_cast<int>(text.size()));
  }

  int size() const { return static_cast<int>(points.size()); }

  string_view get(int begin, int end) const {
    return bytes.substr(starts[begin], starts[end] - starts[begin]);
  }

  string_view get(WordSpan word) const { return get(word.begin, word.end); }
};

// The sources of a language's rules, as Python has them.
struct RuleTexts {
  string_view prefix, suffix, infix, token, url;  // expressions; without a token it is empty
  string_view opening, closing;
  // parts of an entry end with U+0001, entries with U+0000
  string_view exceptions, rejoined;
  bool are_letters_whole;
  bool is_prefix_anchored;
};

class SplittingRules {
 public:
  explicit SplittingRules(const RuleTexts& texts)
      : prefix_(decode_all(texts.prefix)),
        suffix_(decode_all(texts.suffix)),
        infix_(decode_all(texts.infix)),
        url_(decode_all(texts.url)),
        opening_(build_set(texts.opening)),
        closing_(build_set(texts.closing)),
        are_letters_whole_(texts.are_letters_whole),
        is_prefix_anchored_(texts.is_prefix_anchored) {
    if (!texts.token.empty()) token_.emplace(decode_all(texts.token));
    for_each_entry(texts.exceptions, [&](const std::vector<string>& parts) {
      string whole;
      std::vector<int> sizes;
      for (const string& part : parts) {
        whole += part;
        sizes.push_back(static_cast<int>(count_characters(part)));
      }
      names_.push_back(std::move(whole));
      exceptions_[names_.back()] = std::move(sizes);
    });
    for_each_entry(texts.rejoined, [&](const std::vector<string>& parts) {
      names_.push_back(parts[0]);
      rejoined_[names_.back()].push_back(parts);
    });
  }

  // Write the words of a chunk that is not empty and has no white space.
  void split(const Chunk& chunk, WordSpans& words) const {
    words.clear();
    if (add_exception(chunk, {0, chunk.size()}, words)) {
      restore_exceptions(chunk, words);
      return;
    }
    if (are_letters_whole_ && is_alphabetic(chunk, 0, chunk.size())) {
      words.push_back({0, chunk.size()});
      return;
    }
    if (!split_plain(chunk, words)) split_affixes(chunk, words);
    restore_exceptions(chunk, words);
  }

 private:
  static CharacterSet build_set(string_view marks) {
    CharacterRanges ranges;
    for (const uint32_t point : decode_all(marks)) ranges.emplace_back(point, point);
    return CharacterSet(std::move(ranges));
  }

  template <typename Use>
  static void for_each_entry(string_view text, Use use) {
    std::vector<string> parts;
    string part;
    for (const char byte : text) {
      if (byte == '\1') {
        parts.push_back(part);
        part.clear();
      } else if (byte == '\0') {
        use(parts);
        parts.clear();
      } else {
        part += byte;
      }
    }
  }

  static bool is_alphabetic(const Chunk& chunk, int begin, int end) {
    for (int at = begin; at < end; at++)
      if (!is_letter(chunk.points[at])) return false;
    return begin < end;
  }

  // Return whether there are letters, and combining marks at most.
  static bool is_alphabetic_with_marks(const Chunk& chunk, int begin, int end) {
    bool has_letter = false;
    for (int at = begin; at < end; at++) {
      if (is_letter(chunk.points[at])) has_letter = true;
      else if (!is_combining_mark(chunk.points[at])) return false;
    }
    return has_letter;
  }

  bool is_exception(const Chunk& chunk, int begin, int end) const {
    return exceptions_.count(chunk.get(begin, end)) > 0;
  }

  // Add the words of an exception, if these characters are one.
  bool add_exception(const Chunk& chunk, WordSpan span, WordSpans& words) const {
    const auto found = exceptions_.find(chunk.get(span));
    if (found == exceptions_.end()) return false;
    int at = span.begin;
    for (const int size : found->second) {
      words.push_back({at, at + size});
      at += size;
    }
    return true;
  }

  // Split letters with at most one mark on each side. Return false for another chunk.
  bool split_plain(const Chunk& chunk, WordSpans& words) const {
    const int size = chunk.size();
    const int begin = opening_.contains(chunk.points[0]) ? 1 : 0;
    const int end = size - (closing_.contains(chunk.points[size - 1]) ? 1 : 0);
    if (begin >= end || !are_letters_whole_) return false;
    if (!is_alphabetic_with_marks(chunk, begin, end)) return false;
    if (is_exception(chunk, begin, end) || is_exception(chunk, begin, size)) return false;
    if (is_exception(chunk, 0, end)) return false;
    if (begin) words.push_back({0, 1});
    words.push_back({begin, end});
    if (end < size) words.push_back({end, size});
    return true;
  }

  // Split affixes off both ends until an exception or the middle remains.
  void split_affixes(const Chunk& chunk, WordSpans& words) const {
    WordSpans last;
    int begin = 0;
    int end = chunk.size();
    int last_size = 0;
    while (begin < end && end - begin != last_size) {
      if (is_exception(chunk, begin, end) || is_whole(chunk, begin, end)) break;
      last_size = end - begin;
      const int before = count_opening(chunk, begin, end);
      if (before && is_exception(chunk, begin + before, end)) {
        words.push_back({begin, begin + before});
        begin += before;
        break;
      }
      const int after = count_closing(chunk, begin + before, end);
      if (after && is_exception(chunk, begin, end - after)) {
        last.push_back({end - after, end});
        end -= after;
        break;
      }
      if (before) words.push_back({begin, begin + before});
      if (after) last.push_back({end - after, end});
      begin += before;
      end -= after;
    }
    split_middle(chunk, begin, end, words);
    words.insert(words.end(), last.rbegin(), last.rend());
  }

  // Return whether the language has an expression for whole words, and it matches.
  bool is_whole(const Chunk& chunk, int begin, int end) const {
    return token_ && token_->match(chunk.points.data() + begin, end - begin, 0) >= 0;
  }

  int count_opening(const Chunk& chunk, int begin, int end) const {
    const uint32_t* text = chunk.points.data() + begin;
    int first = 0;
    int last = 0;
    if (is_prefix_anchored_) return std::max(prefix_.match(text, end - begin, 0), 0);
    return prefix_.search(text, end - begin, 0, first, last) ? last - first : 0;
  }

  int count_closing(const Chunk& chunk, int begin, int end) const {
    int first = 0;
    int last = 0;
    const uint32_t* text = chunk.points.data() + begin;
    return suffix_.search(text, end - begin, 0, first, last) ? last - first : 0;
  }

  // Add the words between the affixes.
  void split_middle(const Chunk& chunk, int begin, int end, WordSpans& words) const {
    if (begin >= end || add_exception(chunk, {begin, end}, words)) return;
    const bool is_word = are_letters_whole_ && is_alphabetic(chunk, begin, end);
    if (is_word || is_whole(chunk, begin, end) || is_address(chunk, begin, end)) {
      words.push_back({begin, end});
      return;
    }
    const uint32_t* text = chunk.points.data() + begin;
    const int size = end - begin;
    int done = 0;
    int first = 0;
    int last = 0;
    bool was_empty = false;
    for (int from = 0; infix_.search(text, size, from, first, last, was_empty); from = last) {
      was_empty = first == last;
      if (!first) continue;  // at the beginning it splits nothing
      if (first > done) words.push_back({begin + done, begin + first});
      if (!was_empty) words.push_back({begin + first, begin + last});
      done = last;
    }
    if (done < size) words.push_back({begin + done, end});
  }

  bool is_address(const Chunk& chunk, int begin, int end) const {
    return contains(chunk.get(begin, end), ".") &&
           url_.match(chunk.points.data() + begin, end - begin, 0) >= 0;
  }

  bool are_equal(const Chunk& chunk, const WordSpans& words, size_t start,
                 const std::vector<string>& parts) const {
    if (start + parts.size() > words.size()) return false;
    for (size_t part = 0; part < parts.size(); part++)
      if (chunk.get(words[start + part]) != parts[part]) return false;
    return true;
  }

  // Replace neighbouring words that are the regular words of an exception: the longest and then
  // the first ones first.
  void restore_exceptions(const Chunk& chunk, WordSpans& words) const {
    std::set<std::pair<int, int>> spans;  // negative number of words, first word
    for (size_t start = 0; start < words.size(); start++) {
      const auto found = rejoined_.find(chunk.get(words[start]));
      if (found == rejoined_.end()) continue;
      for (const std::vector<string>& parts : found->second)
        if (are_equal(chunk, words, start, parts))
          spans.emplace(-static_cast<int>(parts.size()), static_cast<int>(start));
    }
    if (spans.empty()) return;
    std::vector<bool> is_taken(words.size());
    std::set<std::pair<int, int>> chosen;
    for (const auto& [size, start] : spans) {
      const int end = start - size;
      if (!is_taken[start] && !is_taken[end - 1]) chosen.emplace(start, end);
      std::fill(is_taken.begin() + start, is_taken.begin() + end, true);
    }
    WordSpans made;
    int done = 0;
    for (const auto& [start, end] : chosen) {
      made.insert(made.end(), words.begin() + done, words.begin() + start);
      if (!add_exception(chunk, {words[start].begin, words[end - 1].end}, made))
        made.insert(made.end(), words.begin() + start, words.begin() + end);
      done = end;
    }
    made.insert(made.end(), words.begin() + done, words.end());
    words = std::move(made);
  }

  Expression prefix_, suffix_, infix_, url_;
  std::optional<Expression> token_;
  CharacterSet opening_, closing_;
  bool are_letters_whole_;
  bool is_prefix_anchored_;
  std::deque<string> names_;
  std::unordered_map<string_view, std::vector<int>> exceptions_;
  std::unordered_map<string_view, std::vector<std::vector<string>>> rejoined_;
};

}  // namespace llmsys
