// Phrases about a page, and the number of the post that it names: `is_phrase` of main_content.py,
// `_POST_OF_PAGE` of content_score.py.
//
// \b and \d ask Unicode about characters outside of ASCII, by the version of the running Python. A
// page where such a character decides is left to Python: `is_undecided` becomes true.
#pragma once

#include "names.h"

namespace llmsys {

inline bool is_ascii_word(char byte) {
  return is_ascii_letter(byte) || (byte >= '0' && byte <= '9') || byte == '_';
}
inline bool is_ascii(char byte) { return static_cast<uint8_t>(byte) < 0x80; }

// Return the character in lower case, where that is a character of some first word.
inline uint32_t lower_character(uint32_t point) {
  if (point < 128) return point >= 'A' && point <= 'Z' ? point + 32 : point;
  for (const auto& pair : LOWER_CASE)
    if (pair[0] == point) return pair[1];
  return point;
}

// Return the character that equals it under re.IGNORECASE, where that occurs in some pattern.
inline uint32_t fold_character(uint32_t point) {
  if (point < 128) return point >= 'A' && point <= 'Z' ? point + 32 : point;
  for (const auto& pair : EQUAL_CASE)
    if (pair[0] == point) return pair[1];
  return point;
}

// Return whether a text begins with a pattern, in any case, and with a word's end where asked.
inline bool match_alternative(const PhraseEnd& pattern, const char* p, const char* end,
                              bool& is_undecided) {
  const char* expected = pattern.text;
  const char* expected_end = expected + strlen(expected);
  while (expected < expected_end) {
    if (p >= end || fold_character(decode(p, end)) != decode(expected, expected_end)) return false;
  }
  if (!pattern.ends_word || p >= end) return true;
  if (is_ascii(*p)) return !is_ascii_word(*p);
  is_undecided = true;
  return true;
}

inline bool is_phrase(string_view text, int64_t length, bool& is_undecided) {
  static const NameTable kFirstWords(PHRASE_WORDS);
  if (length > 160) return false;
  const char* p = text.data();
  const char* end = p + text.size();
  while (p < end) {  // text.lstrip(_AROUND)
    const char* next = p;
    const uint32_t point = decode(next, end);
    bool is_around = false;
    for (const uint32_t around : PHRASE_AROUND) is_around |= around == point;
    if (!is_around) break;
    p = next;
  }
  const char* space = static_cast<const char*>(memchr(p, ' ', end - p));
  const char* word_end = space ? space : end;
  static thread_local string word;
  word.clear();
  for (const char* q = p; q < word_end && word.size() <= LONGEST_PHRASE_WORD;)
    append_code_point(lower_character(decode(q, word_end)), word);
  const int number = kFirstWords.find(word, -1);
  if (number < 0) {
    for (const char* glued : PHRASES_GLUED)
      if (begins_with(string_view(p, end - p), glued)) return true;
    return false;
  }
  const PhraseRange range = PHRASE_RANGES[number];
  if (range.first == range.last) return true;  // anything may follow
  const char* rest = space ? space + 1 : end;
  for (int i = range.first; i < range.last; i++)
    if (match_alternative(PHRASE_ENDS[i], rest, end, is_undecided)) return true;
  return false;
}

// Return the digits of \sclass="[^"]*\bpostid-(\d+)\b, empty without a match.
inline string_view find_post_number(string_view attributes, bool& is_undecided) {
  const char* begin = attributes.data();
  for (size_t at = attributes.find("class=\""); at != string_view::npos;
       at = attributes.find("class=\"", at + 1)) {
    if (at == 0 || !measure_space_before(begin, begin + at)) continue;
    const size_t from = at + 7;
    const string_view value = attributes.substr(from, attributes.find('"', from) - from);
    // [^"]* takes as much as it can: the last one in the value is tried first.
    for (size_t place = value.rfind("postid-"); place != string_view::npos;
         place = place ? value.rfind("postid-", place - 1) : string_view::npos) {
      if (place > 0 && !is_ascii(value[place - 1])) is_undecided = true;
      if (place > 0 && is_ascii_word(value[place - 1])) continue;
      const size_t first = place + 7;
      size_t last = first;
      while (last < value.size() && value[last] >= '0' && value[last] <= '9') last++;
      if (last < value.size() && !is_ascii(value[last])) is_undecided = true;
      if (last == first || (last < value.size() && is_ascii_word(value[last]))) continue;
      return value.substr(first, last - first);
    }
  }
  return {};
}

}  // namespace llmsys
