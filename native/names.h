// Words of the Python constants, found by their bytes.
#pragma once

#include <string_view>
#include <vector>

#include "tables.h"
#include "text.h"

namespace llmsys {

// A table from names to small numbers, filled once.
class NameTable {
 public:
  template <typename Entries>
  explicit NameTable(const Entries& entries) {
    size_t slots = 64;
    while (slots < 4 * std::size(entries)) slots *= 2;
    slots_.resize(slots);
    for (const NamedNumber& entry : entries) add(entry.name, entry.number);
  }

  // Return the number of a name, or `none`.
  int find(string_view name, int none) const {
    if (name.empty()) return none;
    const size_t mask = slots_.size() - 1;
    for (size_t slot = hash(name) & mask; !slots_[slot].name.empty(); slot = (slot + 1) & mask)
      if (slots_[slot].name == name) return slots_[slot].number;
    return none;
  }

 private:
  struct Slot {
    string_view name;
    int number = 0;
  };

  void add(string_view name, int number) {
    const size_t mask = slots_.size() - 1;
    size_t slot = hash(name) & mask;
    while (!slots_[slot].name.empty()) slot = (slot + 1) & mask;
    slots_[slot] = {name, number};
  }

  static size_t hash(string_view name) {
    const auto byte = [&](size_t at) { return static_cast<uint8_t>(name[at]); };
    const size_t last = name.size() - 1;
    return name.size() * 131 + byte(0) * 31u + byte(last) * 7u + byte(last / 2) * 61u +
           byte(last > 0) * 17u;
  }

  std::vector<Slot> slots_;
};

inline bool has(uint64_t tags, int tag) { return tags >> tag & 1; }

}  // namespace llmsys
