// From lexbor's nodes to the tree: what `normalize_html` and `parse_tree` do by way of the page's
// serialized form, without writing it.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "html_tree.h"
#include "lexbor.h"

namespace llmsys {

// Keeps texts at fixed addresses until the next page.
class TextArena {
 public:
  void clear() {
    blocks_.resize(blocks_.empty() ? 0 : 1);
    used_ = 0;
  }
  string_view add(string_view text) {
    if (blocks_.empty() || text.size() > blocks_.back().size - used_) {
      const size_t size = std::max<size_t>(kBlockBytes, text.size());
      blocks_.push_back({std::make_unique<char[]>(size), size});
      used_ = 0;
    }
    char* to = blocks_.back().bytes.get() + used_;
    memcpy(to, text.data(), text.size());
    used_ += text.size();
    return {to, text.size()};
  }

 private:
  static constexpr size_t kBlockBytes = 1 << 18;
  struct Block {
    std::unique_ptr<char[]> bytes;
    size_t size;
  };
  std::vector<Block> blocks_;
  size_t used_ = 0;
};

// Append a text as lexbor serializes it.
inline void append_escaped(string_view text, bool is_attribute, string& to) {
  size_t from = 0;
  for (size_t i = 0; i < text.size(); i++) {
    string_view by;
    size_t size = 1;
    switch (static_cast<uint8_t>(text[i])) {
      case '&': by = "&amp;"; break;
      case '<': by = "&lt;"; break;
      case '>': by = "&gt;"; break;
      case '"':
        if (!is_attribute) continue;
        by = "&quot;";
        break;
      case 0xC2:
        if (i + 1 >= text.size() || static_cast<uint8_t>(text[i + 1]) != 0xA0) continue;
        by = "&nbsp;";
        size = 2;
        break;
      default:
        continue;
    }
    to.append(text.substr(from, i - from));
    to.append(by);
    i += size - 1;
    from = i + 1;
  }
  to.append(text.substr(from));
}

// Reads pages into a tree, one after another.
class PageTreeReader {
 public:
  explicit PageTreeReader(const Lexbor& lexbor) : lexbor_(lexbor), parser_(lexbor) {
    kinds_.fill(kUnknown);
  }

  // Return false for a page that is left to Python: raw text, formulas, foreign blocks, much text
  // for readers without scripts, or no memory.
  bool read(string_view html, Tree& tree) {
    if (may_hold_raw_text(html)) return false;
    LexborNode* body = parser_.parse(html.data(), html.size());
    if (!body && !parser_.is_empty()) return false;
    arena_.clear();
    text_.clear();
    is_left_ = false;
    unscripted_ = 0;
    TreeBuilder builder(tree);
    if (body) walk(body, builder);
    builder.finish();
    tree.is_discussion = contains_one(html, DISCUSSION_TYPES);
    tree.is_product = contains_one(html, PRODUCT_TYPES);
    return !is_left_ && !is_for_readers_without_scripts(tree);
  }

 private:
  static constexpr int16_t kUnknown = -3;
  static constexpr int16_t kRemoved = -2;  // with its tags: the texts around it become one
  static constexpr int16_t kOther = -1;
  // larger than any block
  static constexpr int16_t kLink = 100, kLineBreak = 101, kRule = 102, kSkipped = 103;
  static constexpr int16_t kSuperscript = 104, kSubscript = 105;
  // They may be formulas, which are left to Python. Others of the last two are removed.
  static constexpr int16_t kMath = 106, kScript = 107, kImage = 108;
  static constexpr int16_t kUnscripted = 109;  // removed, and its text is counted

  static bool is_block(int kind) { return kind >= 0 && kind < kLink; }

  // Whether "<xmp" or "<plaintext" occurs: lexbor does not escape their text, and Python removes
  // comments where one is in the serialized page.
  static bool may_hold_raw_text(string_view html) {
    const auto find = [&](char letter, string_view rest) {
      const char* end = html.data() + html.size();
      for (const char first : {letter, static_cast<char>(letter - 32)}) {
        const char* p = html.data();
        while ((p = static_cast<const char*>(memchr(p, first, end - p)))) {
          if (static_cast<size_t>(end - p) <= rest.size()) break;
          size_t same = 0;
          while (same < rest.size() && (p[same + 1] | 32) == rest[same]) same++;
          if (same == rest.size() && p > html.data() && p[-1] == '<') return true;
          p++;
        }
      }
      return false;
    };
    return find('x', "mp") || find('p', "laintext");
  }

  string_view get_name(LexborNode* node) const {
    size_t size = 0;
    const auto* name = lexbor_.get_name(reinterpret_cast<LexborElement*>(node), &size);
    return {reinterpret_cast<const char*>(name), name ? size : 0};
  }

  // The serialized form is split at white space of Unicode: `<td\x85>` is a cell.
  static size_t measure_name(string_view name) {
    const char* end = name.data() + name.size();
    const char* p = name.data();
    while (p < end && !measure_space(p, end)) p++;
    return p - name.data();
  }

  static int16_t find_kind(string_view name) {
    static const NameTable kBlocks(BLOCK_NAMES);
    static const NameTable kUnread(UNREAD_NAMES);
    static const NameTable kRemovedNames(REMOVED_NAMES);
    if (name == "script") return kScript;
    if (name == "img") return kImage;
    if (name == "noscript") return kUnscripted;
    if (kRemovedNames.find(name, 0)) return kRemoved;
    const string_view known = name.substr(0, measure_name(name));
    if (known == "a") return kLink;
    if (known == "br") return kLineBreak;
    if (known == "hr") return kRule;
    if (known == "sup") return kSuperscript;
    if (known == "sub") return kSubscript;
    if (known == "math") return kMath;
    if (kUnread.find(known, 0)) return kSkipped;
    return static_cast<int16_t>(kBlocks.find(known, kOther));
  }

  int16_t get_kind(LexborNode* node) {
    const uintptr_t tag = node->local_name;
    if (tag >= kNumStaticTags) return find_kind(get_name(node));
    if (kinds_[tag] == kUnknown) kinds_[tag] = find_kind(get_name(node));
    return kinds_[tag];
  }

  // Elements without an end tag and without children.
  bool is_void(LexborNode* node) {
    if (node->ns != kHtmlNamespace || node->local_name >= kNumStaticTags) return false;
    uint8_t& known = voids_[node->local_name];
    static const NameTable kVoid(VOID_NAMES);
    if (!known) known = kVoid.find(get_name(node), 0) ? 2 : 1;
    return known == 2;
  }

  void flush_text(TreeBuilder& builder) {
    if (text_.empty()) return;
    builder.add_text(text_);
    text_.clear();
  }

  // Write the attributes of an element as the serialized form has them.
  void write_attributes(LexborNode* node) {
    auto* element = reinterpret_cast<LexborElement*>(node);
    attributes_.clear();
    if (node->local_name >= kNumStaticTags) {
      const string_view name = get_name(node);
      attributes_.append(name.substr(measure_name(name)));
    }
    bool has_is = false;
    for (LexborAttribute* each = element->first_attribute; each; each = each->next) {
      size_t size = 0;
      const auto* name = lexbor_.get_attribute_name(each, &size);
      if (!name || each->node.ns != kHtmlNamespace) {
        is_left_ = true;
        return;
      }
      const string_view shown(reinterpret_cast<const char*>(name), size);
      has_is |= shown == "is";
      attributes_ += ' ';
      attributes_.append(shown);
      attributes_ += "=\"";
      if (each->value && each->value->data)
        append_escaped({each->value->data, each->value->length}, true, attributes_);
      attributes_ += '"';
    }
    if (element->is_value && element->is_value->data && !has_is) is_left_ = true;
  }

  // Whether one of some names occurs.
  template <size_t count>
  static bool contains_one(string_view html, const char* const (&names)[count]) {
    for (const char* name : names)
      if (contains(html, name)) return true;
    return false;
  }

  static bool is_removed(int kind) {
    return kind == kRemoved || kind == kScript || kind == kImage || kind == kUnscripted;
  }

  // Count the bytes of text in an element: at least as many as Python counts characters.
  static int64_t count_text_bytes(const LexborNode* root) {
    int64_t bytes = 0;
    for (const LexborNode* node = root; node;) {
      if (node->type == kTextType) bytes += static_cast<int64_t>(
          reinterpret_cast<const LexborText*>(node)->data.length);
      if (node->first_child) {
        node = node->first_child;
        continue;
      }
      while (node != root && !node->next) node = node->parent;
      if (node == root) break;
      node = node->next;
    }
    return bytes;
  }

  // Whether Python may find more text for readers without scripts than else.
  bool is_for_readers_without_scripts(const Tree& tree) const {
    if (unscripted_ < LEAST_UNSCRIPTED) return false;
    int64_t characters = 0;
    for (const Run& run : tree.runs) characters += run.length;
    return unscripted_ > characters;
  }

  // Return the value of an attribute, "" without one.
  string_view find_attribute(LexborNode* node, string_view wanted) const {
    auto* element = reinterpret_cast<LexborElement*>(node);
    for (LexborAttribute* each = element->first_attribute; each; each = each->next) {
      size_t size = 0;
      const auto* name = lexbor_.get_attribute_name(each, &size);
      if (!name || string_view(reinterpret_cast<const char*>(name), size) != wanted) continue;
      if (!each->value || !each->value->data) return {};
      return {each->value->data, each->value->length};
    }
    return {};
  }

  // Whether a script or image is a formula, as formulas.py decides.
  bool is_formula(int kind, LexborNode* node) const {
    if (kind == kScript) {
      string type(find_attribute(node, "type"));
      for (char& byte : type)
        if (byte >= 'A' && byte <= 'Z') byte = static_cast<char>(byte | 32);
      return begins_with(type, FORMULA_SCRIPT_TYPE);
    }
    if (kind != kImage) return false;
    const string_view source = find_attribute(node, "src");
    for (const char* part : FORMULA_SOURCES)
      if (contains(source, part)) return true;
    string_view words = find_attribute(node, "class");
    while (true) {
      const size_t end = words.find(' ');
      const string_view word = words.substr(0, end);
      for (const char* name : FORMULA_CLASSES)
        if (word == name) return true;
      for (const char* beginning : FORMULA_CLASS_BEGINNINGS)
        if (begins_with(word, beginning)) return true;
      if (end == string_view::npos) return false;
      words.remove_prefix(end + 1);
    }
  }

  // Return whether the children of an element are read.
  bool open_element(LexborNode* node, TreeBuilder& builder) {
    const int16_t kind = get_kind(node);
    if (kind == kMath || is_formula(kind, node)) is_left_ = true;
    if (kind == kUnscripted || kind == kSkipped) unscripted_ += count_text_bytes(node);
    if (is_removed(kind) || is_left_) return false;
    flush_text(builder);
    if (kind == kSkipped) return false;
    if (kind == kSuperscript || kind == kSubscript) {
      builder.open_script();
    } else if (kind == kLineBreak) {
      builder.add_line_break();
    } else if (kind == kRule) {
      builder.end_run();
    } else if (kind != kOther) {
      // Names and attributes of SVG and MathML have rules of their own.
      if (node->ns != kHtmlNamespace) is_left_ = true;
      write_attributes(node);
      if (kind == kLink) builder.open_link(contains(attributes_, "href="));
      else builder.open_block(kind, arena_.add(attributes_));
    }
    return !is_void(node);
  }

  void close_element(LexborNode* node, TreeBuilder& builder) {
    if (node->type != kElementType || is_void(node)) return;
    const int16_t kind = get_kind(node);
    if (is_removed(kind) || kind == kSkipped) return;
    flush_text(builder);
    if (kind == kLink) builder.close_link();
    else if (kind == kSuperscript || kind == kSubscript)
      builder.close_script(kind == kSuperscript);
    else if (is_block(kind)) builder.close_block(kind);
  }

  void walk(LexborNode* root, TreeBuilder& builder) {
    LexborNode* node = root;
    while (!is_left_) {
      bool descends = false;
      if (node->type == kTextType) {
        const LexborString& data = reinterpret_cast<LexborText*>(node)->data;
        append_escaped({data.data, data.length}, false, text_);
      } else if (node->type == kElementType) {
        descends = open_element(node, builder);
      } else {
        flush_text(builder);  // a comment divides texts
      }
      if (descends && node->first_child) {
        node = node->first_child;
        continue;
      }
      while (node != root && !node->next) {
        close_element(node, builder);
        node = node->parent;
      }
      close_element(node, builder);
      if (node == root) break;
      node = node->next;
    }
    flush_text(builder);
  }

  const Lexbor& lexbor_;
  PageParser parser_;
  TextArena arena_;
  string text_, attributes_;
  std::array<int16_t, kNumStaticTags> kinds_;
  std::array<uint8_t, kNumStaticTags> voids_{};
  int64_t unscripted_ = 0;  // bytes for readers without scripts, at most
  bool is_left_ = false;
};

}  // namespace llmsys
