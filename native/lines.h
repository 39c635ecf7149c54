// Lines and paragraphs of texts, as `data_pipeline/rules/datatrove_repetition.py` and
// `gopher_quality.py` count them in datatrove's dialect.
#pragma once

#include <unordered_set>
#include <vector>

#include "text.h"

namespace llmsys {

// Parts of a text, those that have occurred before, and the characters of these.
struct RepeatCounts {
  int64_t parts = 0;
  int64_t repeated = 0;
  int64_t characters = 0;
};

struct MarkCounts {
  int64_t lines = 0;
  int64_t bullets = 0;   // lines that begin with one
  int64_t ellipses = 0;  // lines that end with one
};

class LineReader {
 public:
  // Count paragraphs, between runs of two and more newlines of the text without the white space
  // around it.
  RepeatCounts count_paragraphs(string_view text) {
    begin();
    text = strip(text);
    size_t first = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t end = skip_newlines(text, at);
      if (end - at < 2) {
        at = end > at ? end : at + 1;
        continue;
      }
      add(text.substr(first, at - first));
      first = at = end;
    }
    add(text.substr(first));
    return counts_;
  }

  // Count lines between runs of newlines. Each end of the text that is a newline adds an empty
  // line.
  RepeatCounts count_lines(string_view text) {
    begin();
    for (size_t at = 0; at < text.size();) {
      size_t end = text.find('\n', at);
      if (end == string_view::npos) end = text.size();
      if (end > at) add(text.substr(at, end - at));
      at = end + 1;
    }
    const bool is_first = !text.empty() && text.front() == '\n';
    const bool is_last = !text.empty() && text.back() == '\n';
    for (int empty = is_first + is_last; empty > 0; empty--) add({});
    if (!counts_.parts) add({});
    return counts_;
  }

  // Count the lines of str.splitlines, and those with a bullet or an ellipsis next to the white
  // space around them.
  static MarkCounts count_marks(string_view text) {
    MarkCounts counts;
    const char* p = text.data();
    const char* end = p + text.size();
    while (p < end) {
      const char* line = p;
      int size = 0;
      for (; p < end && !(size = measure_break(p, end)); p++) {
      }
      counts.lines++;
      const string_view inside = strip(string_view(line, static_cast<size_t>(p - line)));
      counts.bullets += begins_with(inside, "-") || begins_with(inside, "\u2022");
      counts.ellipses += ends_with(inside, "...") || ends_with(inside, "\u2026");
      p += size;
    }
    return counts;
  }

 private:
  void begin() {
    counts_ = RepeatCounts();
    seen_.clear();
  }

  void add(string_view part) {
    counts_.parts++;
    if (seen_.insert(part).second) return;
    counts_.repeated++;
    counts_.characters += count_characters(part);
  }

  static size_t skip_newlines(string_view text, size_t at) {
    while (at < text.size() && text[at] == '\n') at++;
    return at;
  }

  static string_view strip(string_view text) {
    const char* p = text.data();
    const char* end = p + text.size();
    for (int size; p < end && (size = measure_space(p, end)); p += size) {
    }
    for (int size; p < end && (size = measure_space_before(p, end)); end -= size) {
    }
    return string_view(p, static_cast<size_t>(end - p));
  }

  static bool ends_with(string_view text, string_view with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
  }

  RepeatCounts counts_;
  std::unordered_set<string_view> seen_;
};

}  // namespace llmsys
