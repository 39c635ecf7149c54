// A page as two flat lists, block elements and runs of text: data_pipeline/extract/html_tree.py.
#pragma once

#include <algorithm>
#include <vector>

#include "names.h"
#include "superscripts.h"

namespace llmsys {

// A block element. `last` is -1 where no end tag closed it: Python then reads the last prefix sum.
struct Element {
  int32_t parent;
  int32_t first;  // run
  int32_t last;   // after its last run
  int16_t tag;
  int16_t flags;  // of boilerplate.h; -1: not computed yet
  string_view attributes;
  int32_t order = -1;  // of an ordered list in `lists`, of an item in `numbers`
};

// The number of the next item of an ordered list. `is_counted`: numbers begin with the number of
// items, which is known at the end.
struct OrderedList {
  int64_t next;
  int64_t step;
  int64_t items;
  bool is_counted;
};

// The number of a list item; with a list, the number of its items is added.
struct ItemNumber {
  int64_t number;
  int32_t counted_list;  // -1: none
};

// A run of text between the tags of blocks. Lengths count code points of the escaped text.
struct Run {
  int64_t offset;  // in the tree's texts
  int64_t size;    // bytes
  int32_t owner;   // innermost element
  int64_t length;
  int64_t linked;  // characters inside links
};

struct Tree {
  std::vector<Element> elements;
  std::vector<Run> runs;
  string texts;
  std::vector<OrderedList> lists;
  std::vector<ItemNumber> numbers;
  bool is_discussion = false;  // the page says that it is a thread of a forum
  bool is_product = false;

  void clear() {
    elements.clear();
    runs.clear();
    texts.clear();
    lists.clear();
    numbers.clear();
    elements.push_back({0, 0, 0, TAG_ROOT, 0, {}});
  }

  string_view get_text(const Run& run) const {
    return string_view(texts).substr(run.offset, run.size);
  }

  // Return whether a list item has a number.
  bool is_numbered(int32_t item) const {
    return elements[elements[item].parent].tag == TAG_ol;
  }

  int64_t get_item_number(int32_t item) const {
    const ItemNumber& found = numbers[elements[item].order];
    return found.number + (found.counted_list < 0 ? 0 : lists[found.counted_list].items);
  }
};

// Read an attribute with an integer of up to nine digits. Return false where it has none.
inline bool read_integer(string_view attributes, string_view name, int64_t& value) {
  size_t at = attributes.find(name);
  if (at == string_view::npos) return false;
  attributes.remove_prefix(at + name.size());
  at = attributes.find_first_not_of(" \t\n\f\r");
  if (at == string_view::npos) return false;
  const bool is_negative = attributes[at] == '-';
  if (is_negative || attributes[at] == '+') at++;
  int64_t read = 0;
  int digits = 0;
  for (; at < attributes.size() && is_digit(attributes[at]); at++) {
    if (++digits > 9) return false;
    read = read * 10 + (attributes[at] - '0');
  }
  if (!digits) return false;
  value = is_negative ? -read : read;
  return true;
}

// Builds a tree from tags and texts in document order, as the loop of `parse_tree` does.
class TreeBuilder {
 public:
  explicit TreeBuilder(Tree& tree) : tree_(tree) { tree_.clear(); }

  void open_block(int tag, string_view attributes) {
    end_run();
    const int32_t first = static_cast<int32_t>(tree_.runs.size());
    tree_.elements.push_back({current_, first, -1, static_cast<int16_t>(tag), -1, attributes});
    current_ = static_cast<int32_t>(tree_.elements.size()) - 1;
    if (tag == TAG_pre) preformatted_++;
    if (tag == TAG_ol || tag == TAG_li) number_element(tree_.elements.back());
  }

  void close_block(int tag) {
    end_run();
    Element& element = tree_.elements[current_];
    if (element.tag != tag) return;
    if (tag == TAG_pre) preformatted_--;
    element.last = static_cast<int32_t>(tree_.runs.size());
    const int32_t parent = element.parent;
    const bool is_newest = current_ == static_cast<int32_t>(tree_.elements.size()) - 1;
    // The element held no text and no other element; cells and rows count nevertheless.
    if (element.first == element.last && is_newest && !has(TAGS_KEPT_EMPTY, tag))
      tree_.elements.pop_back();
    current_ = parent;
  }

  void open_link(bool has_address) {
    in_link_ = has_address;
    if (!has_address) return;
    links_++;
    link_start_ = static_cast<int64_t>(run_.size());
  }
  void close_link() { in_link_ = false; }
  void add_line_break() { run_ += '\0'; }

  void open_script() { scripts_.push_back({static_cast<int64_t>(run_.size()), links_}); }
  void close_script(bool is_superscript) {
    if (scripts_.empty()) return;
    const Script script = scripts_.back();
    scripts_.pop_back();
    // A link in it, or around it alone, leads to a note.
    if (links_ != script.links || (in_link_ && script.start == link_start_)) return;
    if (preformatted_ > 0 || !write_superscript(run_, script.start, is_superscript)) return;
    link_start_ = -1;
    scripts_.clear();
  }

  // Add a text as lexbor serializes it: escaped, with `&nbsp;`.
  void add_text(string_view text) {
    if (text.empty()) return;
    // White space between blocks begins no run.
    if (run_.empty() && preformatted_ == 0 && is_blank(text)) return;
    run_.append(text);
    if (in_link_) linked_ += count_characters(text) - 5 * count_no_break_spaces(text);
  }

  void end_run() {
    if (run_.empty()) return;
    replace_no_break_spaces(run_);
    append_run();
    run_.clear();
    linked_ = 0;
    link_start_ = -1;
    scripts_.clear();
  }

  void finish() {
    end_run();
    tree_.elements[0].last = static_cast<int32_t>(tree_.runs.size());
  }

 private:
  static int64_t count_no_break_spaces(string_view text) {
    int64_t count = 0;
    for (size_t at = text.find("&nbsp;"); at != string_view::npos; at = text.find("&nbsp;", at + 6))
      count++;
    return count;
  }

  static void replace_no_break_spaces(string& text) {
    size_t at = text.find("&nbsp;");
    if (at == string::npos) return;
    size_t to = at;
    while (at < text.size()) {
      if (text.compare(at, 6, "&nbsp;") == 0) {
        text[to++] = ' ';
        at += 6;
      } else {
        text[to++] = text[at++];
      }
    }
    text.resize(to);
  }

  // Begin an ordered list, or number an item in one. Items that turn out empty count.
  void number_element(Element& element) {
    if (element.tag == TAG_ol) {
      const bool is_reversed = contains(element.attributes, " reversed=\"");
      int64_t start = is_reversed ? 0 : 1;
      const bool has_start = read_integer(element.attributes, " start=\"", start);
      element.order = static_cast<int32_t>(tree_.lists.size());
      tree_.lists.push_back({start, is_reversed ? -1 : 1, 0, is_reversed && !has_start});
      return;
    }
    const Element& parent = tree_.elements[element.parent];
    if (parent.tag != TAG_ol) return;
    OrderedList& list = tree_.lists[parent.order];
    list.items++;
    if (read_integer(element.attributes, " value=\"", list.next)) list.is_counted = false;
    element.order = static_cast<int32_t>(tree_.numbers.size());
    tree_.numbers.push_back({list.next, list.is_counted ? parent.order : -1});
    list.next += list.step;
  }

  // Append the pieces as a run, unless they are white space.
  void append_run() {
    string& texts = tree_.texts;
    const size_t begin = texts.size();
    if (preformatted_ > 0) {
      std::replace(run_.begin(), run_.end(), '\0', '\n');
      const string_view stripped = strip_newlines(run_);
      if (is_blank(stripped)) return;
      texts.append(stripped);
    } else if (run_.find('\0') == string::npos) {
      append_folded(run_.data(), run_.data() + run_.size(), texts);
    } else {
      string lines;
      append_lines(lines);
      texts.append(strip_newlines(lines));
    }
    if (texts.size() == begin) return;
    const string_view text = string_view(texts).substr(begin);
    const int64_t length = count_characters(text);
    const int64_t size = static_cast<int64_t>(text.size());
    // Links were counted before white space was folded: it can be more than the run has left.
    const int64_t linked = std::min(linked_, length);
    tree_.runs.push_back({static_cast<int64_t>(begin), size, current_, length, linked});
  }

  // Append the run with folded white space and a newline for each line break.
  void append_lines(string& to) const {
    const char* p = run_.data();
    const char* end = p + run_.size();
    while (true) {
      const char* stop = static_cast<const char*>(memchr(p, 0, end - p));
      append_folded(p, stop ? stop : end, to);
      if (!stop) return;
      to += '\n';
      p = stop + 1;
    }
  }

  static string_view strip_newlines(string_view text) {
    while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
    while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
    return text;
  }

  Tree& tree_;
  string run_;
  int64_t linked_ = 0;
  int32_t current_ = 0;
  int preformatted_ = 0;
  bool in_link_ = false;
  int64_t links_ = 0;        // that were opened so far
  int64_t link_start_ = -1;  // bytes of the run before the open link; -1: in another run
  struct Script {
    int64_t start;  // bytes of the run before it
    int64_t links;
  };
  std::vector<Script> scripts_;
};

}  // namespace llmsys
