// Characters of UTF-8 texts as Python sees them: white space, code points, letter case.
//
// Invariants:
// - Input is valid UTF-8.
// - Nothing depends on the version of Unicode: white space, and the letters of the tables, are the
//   same in all versions that Python has. What would depend on it is left to Python.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace llmsys {

using std::string;
using std::string_view;

// Return the code point at `p`, and advance `p` behind it.
inline uint32_t decode(const char*& p, const char* end) {
  const uint8_t first = static_cast<uint8_t>(*p++);
  if (first < 0x80) return first;
  int following = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
  uint32_t point = first & (0x3F >> following);
  for (; following > 0 && p < end; following--) point = point << 6 | (*p++ & 0x3F);
  return point;
}

inline void append_code_point(uint32_t point, string& to) {
  if (point < 0x80) {
    to += static_cast<char>(point);
  } else if (point < 0x800) {
    to += static_cast<char>(0xC0 | point >> 6);
    to += static_cast<char>(0x80 | (point & 63));
  } else if (point < 0x10000) {
    to += static_cast<char>(0xE0 | point >> 12);
    to += static_cast<char>(0x80 | (point >> 6 & 63));
    to += static_cast<char>(0x80 | (point & 63));
  } else {
    to += static_cast<char>(0xF0 | point >> 18);
    to += static_cast<char>(0x80 | (point >> 12 & 63));
    to += static_cast<char>(0x80 | (point >> 6 & 63));
    to += static_cast<char>(0x80 | (point & 63));
  }
}

inline bool is_continuation(char byte) { return (byte & 0xC0) == 0x80; }

// Return the number of code points of a text.
inline int64_t count_characters(string_view text) {
  int64_t count = 0;
  for (const char byte : text) count += !is_continuation(byte);
  return count;
}

// Return the bytes of the white space at `p`, 0 if there is none. These are the 29 characters of
// str.isspace, str.split and \s.
inline int measure_space(const char* p, const char* end) {
  const uint8_t first = static_cast<uint8_t>(*p);
  if (first < 0x80) return first == 32 || (first >= 9 && first <= 13) || (first >= 28 && first <= 31);
  const int64_t size = end - p;
  const uint8_t second = size > 1 ? static_cast<uint8_t>(p[1]) : 0;
  if (first == 0xC2) return second == 0x85 || second == 0xA0 ? 2 : 0;
  if (first < 0xE1 || first > 0xE3 || size < 3) return 0;
  const uint8_t third = static_cast<uint8_t>(p[2]);
  switch (first) {
    case 0xE1:
      return second == 0x9A && third == 0x80 ? 3 : 0;
    case 0xE2:
      if (second == 0x80) {
        // U+2000 to U+200A, line and paragraph separator, narrow no-break space
        const bool is_space = third <= 0x8A || third == 0xA8 || third == 0xA9 || third == 0xAF;
        return is_space ? 3 : 0;
      }
      return second == 0x81 && third == 0x9F ? 3 : 0;
    default:
      return second == 0x80 && third == 0x80 ? 3 : 0;
  }
}

// Return the bytes of the white space that ends at `end`, 0 if there is none.
inline int measure_space_before(const char* begin, const char* end) {
  const char* p = end - 1;
  while (p > begin && is_continuation(*p)) p--;
  const int size = p < begin ? 0 : measure_space(p, end);
  return size == end - p ? size : 0;
}

// Return the bytes of the line end at `p`, as str.splitlines finds it, 0 if there is none.
inline int measure_break(const char* p, const char* end) {
  const uint8_t first = static_cast<uint8_t>(*p);
  const int64_t size = end - p;
  switch (first) {
    case '\r':
      return size > 1 && p[1] == '\n' ? 2 : 1;
    case '\n': case '\v': case '\f': case 0x1C: case 0x1D: case 0x1E:
      return 1;
    case 0xC2:
      return size > 1 && static_cast<uint8_t>(p[1]) == 0x85 ? 2 : 0;
    case 0xE2: {  // U+2028 and U+2029
      const bool is_break = size > 2 && static_cast<uint8_t>(p[1]) == 0x80 &&
                            (static_cast<uint8_t>(p[2]) & 0xFE) == 0xA8;
      return is_break ? 3 : 0;
    }
    default:
      return 0;
  }
}

// Return whether a text is empty or white space alone.
inline bool is_blank(string_view text) {
  const char* end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    const int size = measure_space(p, end);
    if (!size) return false;
    p += size;
  }
  return true;
}

// Append the words of a text with single spaces between them: " ".join(text.split()).
inline void append_folded(const char* p, const char* end, string& to) {
  bool is_first = true;
  while (true) {
    while (p < end) {
      const int size = measure_space(p, end);
      if (!size) break;
      p += size;
    }
    if (p >= end) return;
    const char* word = p;
    while (p < end && !measure_space(p, end)) p++;
    if (!is_first) to += ' ';
    to.append(word, p - word);
    is_first = false;
  }
}

inline bool is_ascii_letter(char byte) { return (byte | 32) >= 'a' && (byte | 32) <= 'z'; }

inline bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }

inline bool begins_with(string_view text, string_view with) {
  return text.substr(0, with.size()) == with;
}

inline bool contains(string_view text, string_view part) {
  return text.find(part) != string_view::npos;
}

}  // namespace llmsys
