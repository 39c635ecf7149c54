// Flags of elements by the words in their attributes: data_pipeline/extract/boilerplate.py.
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "names.h"

namespace llmsys {

// Return whether `key`, white space and `value` follow each other somewhere.
inline bool has_style(string_view text, string_view key, string_view value) {
  for (size_t at = text.find(key); at != string_view::npos; at = text.find(key, at + 1)) {
    const char* p = text.data() + at + key.size();
    const char* end = text.data() + text.size();
    while (p < end) {
      const int size = measure_space(p, end);
      if (!size) break;
      p += size;
    }
    if (begins_with(string_view(p, end - p), value)) return true;
  }
  return false;
}

inline bool is_hidden(string_view attributes) {
  const bool names_hidden = contains(attributes, "hidden");
  if (!names_hidden && !contains(attributes, "none")) return false;
  if (names_hidden) {
    if (contains(attributes, "aria-hidden=\"true\"")) return true;
    const char* begin = attributes.data();
    for (size_t at = attributes.find("hidden="); at != string_view::npos;
         at = attributes.find("hidden=", at + 1))
      if (at > 0 && measure_space_before(begin, begin + at)) return true;
    if (has_style(attributes, "visibility:", "hidden")) return true;
  }
  return has_style(attributes, "display:", "none");
}

// Words in lower case, in one buffer with single spaces between them.
class WordList {
 public:
  void clear() {
    joined_.clear();
    places_.clear();
  }
  void add(const char* word, size_t size) {
    if (!joined_.empty()) joined_ += ' ';
    places_.push_back({joined_.size(), size});
    for (size_t i = 0; i < size; i++) joined_ += static_cast<char>(word[i] | 32);
  }
  size_t size() const { return places_.size(); }
  // Return a word; empty after the last.
  string_view get(size_t number) const {
    if (number >= places_.size()) return {};
    return string_view(joined_).substr(places_[number].first, places_[number].second);
  }

 private:
  string joined_;
  std::vector<std::pair<size_t, size_t>> places_;
};

// `post-body` and `postBody` have two words. Pieces of mixed case shorter than three letters are
// mostly generated names.
inline void split_names(string_view names, WordList& words) {
  const char* end = names.data() + names.size();
  for (const char* p = names.data(); p < end;) {
    if (!is_ascii_letter(*p)) {
      p++;
      continue;
    }
    const char* word = p;
    bool has_lower = false;
    bool has_upper = false;
    for (; p < end && is_ascii_letter(*p); p++) (*p & 32 ? has_lower : has_upper) = true;
    if (!has_lower || !has_upper) {
      words.add(word, p - word);
      continue;
    }
    for (const char* piece = word; piece < p;) {  // [A-Z]?[a-z]{3,}
      const char* lower = piece + !(*piece & 32);
      const char* stop = lower;
      while (stop < p && (*stop & 32)) stop++;
      if (stop - lower >= 3) words.add(piece, stop - piece);
      piece = stop > lower ? stop : piece + 1;
    }
  }
}

inline bool is_one_of(string_view word, std::initializer_list<string_view> words) {
  for (const string_view each : words)
    if (word == each) return true;
  return false;
}

// Return whether some words name the element that holds the content: the expression `_BODY`.
inline bool name_body(const WordList& words) {
  static const std::initializer_list<string_view> kWholes = {"article", "entry", "post",
                                                             "story",   "news",  "page"};
  static const std::initializer_list<string_view> kParts = {"body", "content", "text", "copy"};
  static const std::initializer_list<string_view> kPartsOfBody = {"text", "copy", "content"};
  for (size_t i = 0; i < words.size(); i++) {
    const string_view word = words.get(i);
    const string_view next = words.get(i + 1);
    if (is_one_of(word, kWholes) && is_one_of(next, kParts)) return true;
    if (word == "body" && is_one_of(next, kPartsOfBody)) return true;
    if (word == "markdown" && next == "body") return true;
    if (word == "rst" && next == "content") return true;
    if (word == "main" && next == "content") return true;
    if (word == "mw" && next == "parser" && words.get(i + 2) == "output") return true;
    if (word == "maincontent") return true;
    for (const string_view whole : kWholes)
      if (begins_with(word, whole) && is_one_of(word.substr(whole.size()), kParts)) return true;
    if (begins_with(word, "body") && is_one_of(word.substr(4), kPartsOfBody)) return true;
  }
  return false;
}

// Append the values of id, class, role and itemprop, with spaces between them.
inline void append_names(string_view attributes, string& names) {
  const char* end = attributes.data() + attributes.size();
  bool is_first = true;
  for (const char* p = attributes.data(); p < end;) {
    const int space = measure_space(p, end);
    if (!space) {
      p++;
      continue;
    }
    p += space;
    const string_view rest(p, end - p);
    for (const string_view key : {"id=\"", "class=\"", "role=\"", "itemprop=\""}) {
      if (!begins_with(rest, key)) continue;
      const size_t quote = rest.find('"', key.size());
      if (quote == string_view::npos) break;
      if (!is_first) names += ' ';
      names.append(rest.substr(key.size(), quote - key.size()));
      is_first = false;
      p += quote + 1;
      break;
    }
  }
}

// Remove a word from left to right, as str.replace: pieces that come together stay.
inline void remove_all(string& text, string_view word) {
  size_t at = text.find(word);
  if (at == string::npos) return;
  string kept;
  size_t from = 0;
  for (; at != string::npos; at = text.find(word, from)) {
    kept.append(text, from, at - from);
    from = at + word.size();
  }
  kept.append(text, from);
  text.swap(kept);
}

// Return the flags of an element, combined by or.
inline int classify_attributes(string_view attributes) {
  if (attributes.empty()) return 0;
  static const NameTable kFlags(NAME_FLAGS);
  static thread_local string names;
  static thread_local WordList words;
  int flags = is_hidden(attributes) ? FLAG_HIDDEN : 0;
  names.clear();
  append_names(attributes, names);
  if (names.empty()) return flags;
  remove_all(names, "elementor-widget");
  words.clear();
  split_names(names, words);
  for (size_t i = 0; i < words.size(); i++) flags |= kFlags.find(words.get(i), 0);
  return name_body(words) ? flags | FLAG_BODY : flags;
}

}  // namespace llmsys
