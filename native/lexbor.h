// What the core uses of lexbor, which is inside the library of selectolax.
//
// selectolax exports lexbor's functions, but ships no headers. The functions are found by their
// names when the core is loaded. The fields of nodes that are read at every step are declared here,
// and `check_layout` compares them with what lexbor's own functions return for two small pages.
//
// Invariants:
// - A page is parsed by the lexbor that the Python extractor uses.
// - A lexbor with other fields is recognized before the first page, and the core is not used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmsys {

struct LexborString {
  const char* data;
  size_t length;
};

struct LexborNode {
  void* events;
  uintptr_t local_name;  // id of the tag or attribute; an address for unknown names
  uintptr_t prefix;
  uintptr_t ns;
  void* document;
  LexborNode* next;
  LexborNode* prev;
  LexborNode* parent;
  LexborNode* first_child;
  LexborNode* last_child;
  void* user;
  unsigned type;
};

struct LexborText {
  LexborNode node;
  LexborString data;
};

struct LexborAttribute {
  LexborNode node;
  uintptr_t upper_name;
  uintptr_t qualified_name;
  LexborString* value;
  void* owner;
  LexborAttribute* next;
  LexborAttribute* prev;
};

struct LexborElement {
  LexborNode node;
  uintptr_t upper_name;
  uintptr_t qualified_name;
  LexborString* is_value;
  LexborAttribute* first_attribute;
  LexborAttribute* last_attribute;
};

struct LexborDocument {
  LexborNode node;
  unsigned quirks;  // 0: a page with a doctype; parsing depends on it
};

constexpr unsigned kElementType = 1;
constexpr unsigned kTextType = 3;
constexpr unsigned kCommentType = 8;
constexpr uintptr_t kHtmlNamespace = 2;
constexpr uintptr_t kNumStaticTags = 512;  // ids of names that lexbor knows are smaller

// In the order in which Python passes their addresses.
struct Lexbor {
  LexborDocument* (*create_document)();
  LexborDocument* (*destroy_document)(LexborDocument*);
  void (*clean_document)(LexborDocument*);
  unsigned (*parse)(LexborDocument*, const unsigned char*, size_t);
  LexborNode* (*get_body)(LexborDocument*);
  LexborNode* (*get_root)(LexborDocument*);
  const unsigned char* (*get_name)(LexborElement*, size_t*);
  const unsigned char* (*get_attribute_name)(LexborAttribute*, size_t*);
  // used by the comparison alone
  LexborNode* (*get_next)(LexborNode*);
  LexborNode* (*get_parent)(LexborNode*);
  LexborNode* (*get_first_child)(LexborNode*);
  uintptr_t (*get_tag)(LexborNode*);
  unsigned (*get_type)(LexborNode*);
  LexborAttribute* (*get_first_attribute)(LexborElement*);
  LexborAttribute* (*get_next_attribute)(LexborAttribute*);
  const unsigned char* (*get_attribute_value)(LexborAttribute*, size_t*);
  const unsigned char* (*get_text)(LexborNode*, size_t*);
};
constexpr int kNumFunctions = sizeof(Lexbor) / sizeof(void*);

// Parses pages one after another into one document.
class PageParser {
 public:
  explicit PageParser(const Lexbor& lexbor) : lexbor_(lexbor) {}
  PageParser(const PageParser&) = delete;
  PageParser& operator=(const PageParser&) = delete;
  ~PageParser() { release(); }

  // Return the body, or the root of a page without one; null if lexbor gave up.
  LexborNode* parse(const char* html, size_t size) {
    if (parsed_bytes_ > kKeptBytes) release();
    if (!document_) document_ = lexbor_.create_document();
    if (!document_) return nullptr;
    if (parsed_bytes_) lexbor_.clean_document(document_);
    // Cleaning keeps the mode of the page before.
    document_->quirks = 0;
    parsed_bytes_ += size + 1;
    is_empty_ = false;
    const auto* bytes = reinterpret_cast<const unsigned char*>(html);
    if (lexbor_.parse(document_, bytes, size) != 0) {
      release();
      return nullptr;
    }
    LexborNode* body = lexbor_.get_body(document_);
    if (!body) body = lexbor_.get_root(document_);
    is_empty_ = !body;
    return body;
  }

  bool is_empty() const { return is_empty_; }
  LexborDocument* document() const { return document_; }

  void release() {
    if (document_) lexbor_.destroy_document(document_);
    document_ = nullptr;
    parsed_bytes_ = 0;
  }

 private:
  // A document keeps the memory of its largest page, so it is replaced now and then.
  static constexpr size_t kKeptBytes = 4 << 20;
  const Lexbor& lexbor_;
  LexborDocument* document_ = nullptr;
  size_t parsed_bytes_ = 0;
  bool is_empty_ = false;
};

inline bool equals(const char* data, size_t size, const char* expected) {
  return size == strlen(expected) && !memcmp(data, expected, size);
}

// Return whether a function of lexbor returns a text for a node.
template <typename Function, typename Node>
bool returns(Function function, Node* node, const char* expected) {
  size_t size = 0;
  const auto* data = reinterpret_cast<const char*>(function(node, &size));
  return data && equals(data, size, expected);
}

// Return whether the fields above are those of this lexbor.
inline bool check_layout(const Lexbor& lexbor) {
  const char quirks[] = "<i>a</i><p id=x lang=en>bcd<b>e</b><!--f--></p><u>g</u>";
  const char standard[] = "<!doctype html><p>a";
  PageParser parser(lexbor);
  LexborNode* body = parser.parse(quirks, sizeof quirks - 1);
  if (!body || lexbor.get_type(body) != kElementType || parser.document()->quirks != 1) return false;
  LexborNode* before = lexbor.get_first_child(body);
  LexborNode* element = before ? lexbor.get_next(before) : nullptr;
  LexborNode* text = element ? lexbor.get_first_child(element) : nullptr;
  LexborNode* bold = text ? lexbor.get_next(text) : nullptr;
  LexborNode* comment = bold ? lexbor.get_next(bold) : nullptr;
  if (!comment || lexbor.get_type(text) != kTextType || lexbor.get_type(comment) != kCommentType)
    return false;
  for (LexborNode* node : {body, before, element, text, bold, comment}) {
    const bool is_same = node->next == lexbor.get_next(node) &&
                         node->parent == lexbor.get_parent(node) &&
                         node->first_child == lexbor.get_first_child(node) &&
                         node->type == lexbor.get_type(node) &&
                         node->local_name == lexbor.get_tag(node);
    if (!is_same) return false;
  }
  if (element->ns != kHtmlNamespace || element->local_name >= kNumStaticTags) return false;
  const auto* data = reinterpret_cast<LexborText*>(text);
  if (!returns(lexbor.get_text, text, "bcd")) return false;
  if (!data->data.data || !equals(data->data.data, data->data.length, "bcd")) return false;
  auto* paragraph = reinterpret_cast<LexborElement*>(element);
  if (!returns(lexbor.get_name, paragraph, "p") || paragraph->is_value) return false;
  LexborAttribute* first = lexbor.get_first_attribute(paragraph);
  LexborAttribute* second = first ? lexbor.get_next_attribute(first) : nullptr;
  if (!second || paragraph->first_attribute != first || first->next != second || second->next)
    return false;
  if (!returns(lexbor.get_attribute_name, second, "lang")) return false;
  if (!returns(lexbor.get_attribute_value, second, "en")) return false;
  if (!second->value || !equals(second->value->data, second->value->length, "en")) return false;
  if (second->node.ns != kHtmlNamespace) return false;
  return parser.parse(standard, sizeof standard - 1) && parser.document()->quirks == 0;
}

}  // namespace llmsys
