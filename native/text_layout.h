// The kept runs as text: data_pipeline/extract/text_layout.py, and `clean_text` of extractor.py
// without NFC, which stays in Python.
#pragma once

#include <algorithm>
#include <vector>

#include "html_tree.h"

namespace llmsys {

// Append a text without the parser's escapes; it writes only these three.
inline void append_unescaped(string_view text, string& to) {
  while (true) {
    const size_t at = text.find('&');
    to.append(text.substr(0, at));
    if (at == string_view::npos) return;
    text.remove_prefix(at);
    const struct {
      string_view escaped;
      char character;
    } kEscapes[] = {{"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&", '&'}};
    for (const auto& escape : kEscapes) {
      if (!begins_with(text, escape.escaped)) continue;
      to += escape.character;
      text.remove_prefix(escape.escaped.size());
      break;
    }
  }
}

// Renders runs of one page after another.
class TextLayout {
 public:
  void render(const Tree& tree, const std::vector<int32_t>& kept, string& to) {
    if (kept.empty()) return;
    compute_contexts(tree, kept);
    find_layout_tables(tree, kept);
    Context before;
    bool is_first = true;
    for (const int32_t run : kept) {
      Context context = contexts_[tree.runs[run].owner];
      if (context.table && is_layout_[context.table]) context.table = context.row = context.cell = 0;
      string_view text = tree.get_text(tree.runs[run]);
      const string_view mark = "\xC2\xB6";  // ¶, the mark of a link to a heading
      if (text.size() >= mark.size() && text.substr(text.size() - mark.size()) == mark)
        text.remove_suffix(mark.size());
      if (!is_first) append_separator(before, context, to);
      is_first = false;
      if (context.row && context.row != before.row) {
        for (int i = 1; i < context.cell; i++) to += "| ";
        append_unescaped(text, to);
      } else if (context.item && !context.code && !context.row) {
        append_item(text, context.level, choose_mark(tree, context.item, before.item), to);
      } else {
        append_unescaped(text, to);
      }
      before = context;
    }
  }

 private:
  // The position of an element among lists, tables and code; 0 for none.
  struct Context {
    int level = 0;
    int outer_list = 0;
    int item = 0;
    int table = 0;
    int row = 0;
    int cell = 0;
    int code = 0;
  };

  void compute_contexts(const Tree& tree, const std::vector<int32_t>& kept) {
    const size_t elements = tree.elements.size();
    is_wanted_.assign(elements, 0);
    is_layout_.assign(elements, 0);
    has_number_.assign(elements, 0);
    contexts_.assign(elements, Context());
    is_wanted_[0] = 1;
    for (const int32_t run : kept)
      for (int32_t number = tree.runs[run].owner; !is_wanted_[number];
           number = tree.elements[number].parent)
        is_wanted_[number] = 1;
    number_cells(tree);
    for (size_t number = 1; number < elements; number++) {
      if (!is_wanted_[number]) continue;
      const Element& found = tree.elements[number];
      contexts_[number] = derive_context(found.tag, static_cast<int>(number),
                                         contexts_[found.parent]);
    }
  }

  // Number the cells of each row from 1; empty ones count. Without rows every cell is the first.
  void number_cells(const Tree& tree) {
    const size_t elements = tree.elements.size();
    cells_.assign(elements, 1);
    bool has_rows = false;
    for (size_t number = 0; number < elements && !has_rows; number++)
      has_rows = is_wanted_[number] && tree.elements[number].tag == TAG_tr;
    if (!has_rows) return;
    counts_.assign(elements, 0);
    for (size_t number = 0; number < elements; number++) {
      const Element& found = tree.elements[number];
      if (found.tag == TAG_td || found.tag == TAG_th) cells_[number] = ++counts_[found.parent];
    }
  }

  Context derive_context(int tag, int number, Context context) const {
    if (has(TAGS_LISTS, tag)) {
      context.level++;
      if (!context.outer_list) context.outer_list = number;
    } else if (tag == TAG_dl) {
      if (!context.outer_list) context.outer_list = number;
    } else if (tag == TAG_li) {
      context.level = std::max(1, context.level);
      context.item = number;
    } else if (tag == TAG_table) {
      context.table = number;
      context.row = context.cell = 0;
    } else if (tag == TAG_tr) {
      context.row = number;
      context.cell = 0;
    } else if (tag == TAG_pre) {
      if (!context.code) context.code = number;
    } else if (tag == TAG_td || tag == TAG_th) {
      context.cell = cells_[number];
    }
    return context;
  }

  // Mark the tables used for layout: a cell of several blocks or of much text, or code.
  void find_layout_tables(const Tree& tree, const std::vector<int32_t>& kept) {
    int last_row = 0;
    int last_cell = 0;
    for (const int32_t run : kept) {
      const Context& context = contexts_[tree.runs[run].owner];
      const bool is_same = context.cell && context.row == last_row && context.cell == last_cell;
      if (context.table && (context.code || is_same || tree.runs[run].length > 500))
        is_layout_[context.table] = 1;
      last_row = context.row;
      last_cell = context.cell;
    }
  }

  static void append_separator(const Context& before, const Context& context, string& to) {
    if (context.row && context.row == before.row) {
      for (int i = 0; i < std::max(1, context.cell - before.cell); i++) to += " | ";
      return;
    }
    const bool is_near = (context.code && context.code == before.code) ||
                         (context.table && context.table == before.table) ||
                         (context.outer_list && context.outer_list == before.outer_list);
    to += is_near ? "\n" : "\n\n";
  }

  // Return what stands before a paragraph of a list item: a mark, a number, or spaces.
  string choose_mark(const Tree& tree, int item, int before) {
    if (!tree.is_numbered(item)) return item != before ? "- " : "  ";
    const string mark = std::to_string(tree.get_item_number(item)) + ". ";
    if (has_number_[item]) return string(mark.size(), ' ');
    has_number_[item] = 1;
    return mark;
  }

  static void append_item(string_view text, int level, const string& mark, string& to) {
    const size_t indent = 2 * static_cast<size_t>(std::min(level, 8) - 1);
    to.append(indent, ' ');
    to += mark;
    while (true) {
      const size_t at = text.find('\n');
      append_unescaped(text.substr(0, at), to);
      if (at == string_view::npos) return;
      to += '\n';
      to.append(indent + mark.size(), ' ');
      text.remove_prefix(at + 1);
    }
  }

  std::vector<uint8_t> has_number_;  // items whose number was written
  std::vector<uint8_t> is_wanted_, is_layout_;
  std::vector<Context> contexts_;
  std::vector<int> cells_, counts_;
};

// Remove the white space that the text from `begin` on ends with, up to a newline.
inline void strip_line_end(size_t begin, string& text) {
  while (text.size() > begin && text.back() != '\n') {
    const int size = measure_space_before(text.data() + begin, text.data() + text.size());
    if (!size) return;
    text.resize(text.size() - size);
  }
}

// Append a text without controls, stray white space and more than one blank line in a row.
inline void append_clean(string_view text, string& to) {
  const size_t begin = to.size();
  for (size_t i = 0; i < text.size();) {
    const uint8_t first = static_cast<uint8_t>(text[i]);
    const uint8_t second = i + 1 < text.size() ? static_cast<uint8_t>(text[i + 1]) : 0;
    const uint8_t third = i + 2 < text.size() ? static_cast<uint8_t>(text[i + 2]) : 0;
    if (first == '\r' || first == '\n') {
      strip_line_end(begin, to);
      to += '\n';
      i += first == '\r' && second == '\n' ? 2 : 1;
    } else if ((first < 32 && first != '\t') || first == 127) {
      i++;
    } else if (first == 0xC2 && second < 0xA0) {
      i += 2;  // U+0080 to U+009F
    } else if (first == 0xEF && ((second == 0xBB && third == 0xBF) ||
                                 (second == 0xBF && third >= 0xBE))) {
      i += 3;  // U+FEFF, U+FFFE, U+FFFF
    } else {
      to += text[i++];
    }
  }
  strip_line_end(begin, to);
  while (to.size() > begin && to.back() == '\n') to.pop_back();
  size_t from = begin;
  while (from < to.size()) {
    const int size = measure_space(to.data() + from, to.data() + to.size());
    if (!size) break;
    from += size;
  }
  size_t end = begin;
  for (; from < to.size(); from++) {
    const bool is_blank_line = to[from] == '\n' && end >= begin + 2 && to[end - 1] == '\n' &&
                               to[end - 2] == '\n';
    if (!is_blank_line) to[end++] = to[from];
  }
  to.resize(end);
}

}  // namespace llmsys
