// Superscripts and subscripts that are mathematics: data_pipeline/extract/superscripts.py has the
// rules.
#pragma once

#include <cstdint>

#include "tables.h"
#include "text.h"

namespace llmsys {

// Letters that are bases: Latin, Greek, Cyrillic, and the micro sign.
inline bool is_base_letter(uint32_t point) {
  return (point < 128 && is_ascii_letter(static_cast<char>(point))) ||
         (point >= 0x391 && point <= 0x3A9) || (point >= 0x3B1 && point <= 0x3C9) ||
         (point >= 0x410 && point <= 0x44F) || point == 0x401 || point == 0x451 || point == 0xB5;
}

inline bool is_base_capital(uint32_t point) {
  return (point >= 'A' && point <= 'Z') || (point >= 0x391 && point <= 0x3A9) ||
         (point >= 0x410 && point <= 0x42F) || point == 0x401;
}

inline bool is_latin(uint32_t point) { return is_base_letter(point) && point < 128; }

inline bool is_greek(uint32_t point) {
  return is_base_letter(point) && point >= 0x391 && point <= 0x3C9;
}

inline bool is_digit_point(uint32_t point) { return point >= '0' && point <= '9'; }

// Plus, hyphen, minus, en dash.
inline bool is_sign(uint32_t point) {
  return point == '+' || point == '-' || point == 0x2212 || point == 0x2013;
}

inline bool is_one_of(uint32_t point, string_view characters) {
  return point < 128 && point && characters.find(static_cast<char>(point)) != string_view::npos;
}

constexpr uint32_t kInfinity = 0x221E;

// The code points of a short text.
class ShortText {
 public:
  static constexpr int kCapacity = 64;

  explicit ShortText(string_view text) {
    const char* end = text.data() + text.size();
    for (const char* p = text.data(); p < end && size_ < kCapacity;) points_[size_++] = decode(p, end);
  }

  int size() const { return size_; }
  uint32_t operator[](int at) const { return points_[at]; }

  template <typename Predicate>
  int count(Predicate is_counted) const {
    int count = 0;
    for (int at = 0; at < size_; at++) count += is_counted(points_[at]);
    return count;
  }

  // Return whether three letters follow each other from a place on.
  bool has_word(int from) const {
    int letters = 0;
    for (int at = from; at < size_; at++) {
      letters = is_base_letter(points_[at]) ? letters + 1 : 0;
      if (letters == 3) return true;
    }
    return false;
  }

  // Return how many digits begin at a place.
  int count_digits(int from) const {
    int at = from;
    while (at < size_ && is_digit_point(points_[at])) at++;
    return at - from;
  }

 private:
  uint32_t points_[kCapacity];
  int size_ = 0;
};

// What a superscript follows.
struct Base {
  bool is_base = false;
  int digits = 0;
  bool is_year = false;
  int letters = 0;
  bool is_capital = false;  // the first letter
  bool is_name = false;     // two letters, of which the first is a capital
  bool is_long = false;     // one of LONG_BASES

  explicit Base(string_view window) {
    const ShortText text(window);
    const int size = text.size();
    if (!size) return;
    while (digits < size && is_digit_point(text[size - 1 - digits])) digits++;
    if (digits) {
      const uint32_t first = text[size - digits];
      is_base = true;
      is_year = digits == 4 && (first == '1' || first == '2');
      return;
    }
    while (letters < size && is_base_letter(text[size - 1 - letters])) letters++;
    if (letters) {
      is_base = true;
      is_capital = is_base_capital(text[size - letters]);
      is_name = letters == 2 && is_capital && !is_base_capital(text[size - 1]);
      for (const char* name : LONG_BASES) is_long |= is_word(text, name);
      return;
    }
    is_base = has_bracket(text);
  }

 private:
  // Whether the letters at the end are a name in ASCII.
  bool is_word(const ShortText& text, string_view name) const {
    if (static_cast<int>(name.size()) != letters) return false;
    for (int at = 0; at < letters; at++)
      if (text[text.size() - letters + at] != static_cast<uint8_t>(name[at])) return false;
    return true;
  }

  // Whether the text ends with a bracket without words, or with `_{…}` or `^{…}`.
  static bool has_bracket(const ShortText& text) {
    const uint32_t last = text[text.size() - 1];
    const uint32_t wanted = last == ')' ? '(' : last == ']' ? '[' : last == '}' ? '{' : 0;
    if (!wanted) return false;
    int opening = text.size() - 1;
    while (opening >= 0 && text[opening] != wanted) opening--;
    if (opening < 0) return false;
    const bool is_script = last == '}' && opening > 0 && is_one_of(text[opening - 1], "^_");
    return is_script || !text.has_word(opening);
  }
};

inline bool is_number(const ShortText& script) {
  const int digits = script.count_digits(0);
  if (digits == script.size()) return digits >= 1 && digits <= 4;
  if (digits < 1 || digits > 3 || !is_one_of(script[digits], "./")) return false;
  const int more = script.count_digits(digits + 1);
  return more >= 1 && more <= 3 && digits + 1 + more == script.size();
}

inline bool is_exponent(const ShortText& script, const Base& base) {
  if (!base.is_base) return false;
  const int size = script.size();
  const int digits = script.count_digits(0);
  if (is_number(script)) {
    if (base.digits) return !base.is_year;
    const bool is_bracket = !base.letters;
    const bool is_short = is_bracket || (base.letters <= 2 && !base.is_name);
    return !(size == 1 && script[0] == '1') && (is_short || base.is_long);
  }
  const int after_sign = script.count_digits(1);
  if (is_sign(script[0]) && after_sign >= 1 && after_sign <= 4 && after_sign + 1 == size) return true;
  if (digits <= 3 && digits + 1 == size && is_sign(script[digits])) return base.letters <= 3;
  const bool is_atom = base.letters <= 1;
  if (size == 1 && (is_latin(script[0]) || is_greek(script[0]))) {
    const bool ends_word = base.digits || (base.letters == 1 && base.is_capital);
    const bool is_ending = script[0] == 'o' || (base.digits && is_greek(script[0])) ||
                           (ends_word && is_one_of(script[0], ABBREVIATING));
    return is_atom && !is_ending;
  }
  const int allowed = script.count([](uint32_t point) {
    return is_base_letter(point) || is_digit_point(point) || is_sign(point) ||
           is_one_of(point, "=/*().^_{} ") || point == kInfinity;
  });
  if (!is_atom || allowed != size) return false;
  const int opened = script.count([](uint32_t point) { return point == '('; });
  const int closed = script.count([](uint32_t point) { return point == ')'; });
  if (opened != closed || script.has_word(0)) return false;
  if (opened == 1 && script[0] == '(' && script[size - 1] == ')') return base.letters == 1;
  if (script.count(is_latin) && script.count(is_greek)) return true;
  return script.count([](uint32_t point) {
    return is_digit_point(point) || is_sign(point) || is_one_of(point, "=/^_");
  }) > 0;
}

inline bool is_subscript(const ShortText& script, const Base& base) {
  const int named = script.count([](uint32_t point) {
    return is_base_letter(point) || is_digit_point(point) || point == kInfinity;
  });
  const int others = script.count([](uint32_t point) {
    return is_sign(point) || is_one_of(point, "=/*(),.^_{}");
  });
  return base.is_base && named > 0 && named + others == script.size();
}

// Divide a number from the fraction after it: `1^1/` before a subscript becomes `1 1/`. Return
// false where there is no such fraction.
inline bool divide_fraction(string& run, size_t window, size_t start) {
  size_t at = start;
  if (at > window && run[at - 1] == '/') at -= 1;
  else if (at >= window + 3 && run.compare(at - 3, 3, "\xE2\x81\x84") == 0) at -= 3;
  else return false;
  const size_t end = at;
  size_t first;
  if (at > window && run[at - 1] == '}') {
    first = at - 1;
    while (first > window && is_digit(run[first - 1])) first--;
    if (first == at - 1 || first == window || run[first - 1] != '{') return false;
    first--;
  } else {
    if (at == window || !is_digit(run[at - 1])) return false;
    first = at - 1;
  }
  if (first < window + 2 || run[first - 1] != '^' || !is_digit(run[first - 2])) return false;
  run[first - 1] = ' ';
  if (run[first] == '{') {
    run.erase(end - 1, 1);
    run.erase(first, 1);
  }
  return true;
}

// Mark the end of a run, from a byte on, as a superscript or subscript if it is mathematics. Return
// whether the run changed before this byte, so that other places in it do not hold.
inline bool write_superscript(string& run, int64_t start, bool is_superscript) {
  const size_t begin = static_cast<size_t>(start);
  // a character has at most four bytes
  if (!begin || begin >= run.size() || run.size() - begin > 4 * SUPERSCRIPT_WINDOW) return false;
  const string content = run.substr(begin);
  if (count_characters(content) > SUPERSCRIPT_WINDOW) return false;
  const char* p = content.data();
  const char* end = p + content.size();
  while (p < end && measure_space(p, end)) p += measure_space(p, end);
  const char* last = end;
  while (last > p && measure_space_before(p, last)) last -= measure_space_before(p, last);
  const string_view script_text(p, last - p);
  const ShortText script(script_text);
  const int64_t limit = is_superscript ? LONGEST_SUPERSCRIPT : LONGEST_SUBSCRIPT;
  if (!script.size() || script.size() > limit) return false;
  size_t window = begin;
  for (int64_t characters = 0; window > 0 && characters < SUPERSCRIPT_WINDOW; characters++) {
    window--;
    while (window > 0 && is_continuation(run[window])) window--;
  }
  if (!is_superscript && script.count_digits(0) == script.size() &&
      divide_fraction(run, window, begin))
    return true;
  const Base base(string_view(run).substr(window, begin - window));
  if (!(is_superscript ? is_exponent(script, base) : is_subscript(script, base))) return false;
  run.resize(begin);
  run += is_superscript ? '^' : '_';
  if (script.size() > 1) run += '{';
  for (int at = 0; at < script.size(); at++) {
    // the minus of typographers
    if (script[at] == 0x2212 || script[at] == 0x2013) run += '-';
    else append_code_point(script[at], run);
  }
  if (script.size() > 1) run += '}';
  run.append(last, end - last);
  return false;
}

}  // namespace llmsys
