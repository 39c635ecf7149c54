// The functions that Python calls, as plain C: `data_pipeline/core/native.py` has the other side.
//
// A call handles a batch, without Python's lock. Results are owned by the object that a function
// returns, until it is freed.
#include <new>

#include "main_content.h"
#include "page_tree.h"
#include "text_layout.h"

#ifndef LLMSYS_SOURCES
#define LLMSYS_SOURCES "unknown"
#endif

namespace {

// Raise it with every change of a function's arguments or results.
constexpr int kAbi = 1;

llmsys::Lexbor lexbor;

struct Texts {
  llmsys::string data;
  std::vector<int64_t> offsets{0};
  std::vector<uint8_t> is_left;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int llmsys_abi() { return kAbi; }

// Return the digest of the sources that this library was built from.
const char* llmsys_sources() { return LLMSYS_SOURCES; }

// Take the addresses of lexbor's functions, in the order of `Lexbor`. Return 0 if this is another
// lexbor than the one that the core knows.
int llmsys_use_lexbor(void* const* functions, int count) {
  if (count != llmsys::kNumFunctions) return 0;
  memcpy(static_cast<void*>(&lexbor), functions, sizeof lexbor);
  return llmsys::check_layout(lexbor);
}

// Extract the main content of `count` pages, given as addresses and sizes of valid UTF-8 without
// NUL. A page that is left to Python has an empty text and 1 in `llmsys_left`.
void* llmsys_extract_articles(const char* const* pages, const int64_t* sizes, int64_t count) {
  auto* texts = new (std::nothrow) Texts;
  if (!texts) return nullptr;
  try {
    llmsys::PageTreeReader reader(lexbor);
    llmsys::MainContent content;
    llmsys::TextLayout layout;
    llmsys::string text;
    for (int64_t page = 0; page < count; page++) {
      const llmsys::string_view html(pages[page], static_cast<size_t>(sizes[page]));
      bool is_left = !reader.read(html, content.tree);
      if (!is_left) {
        content.select();
        is_left = content.is_undecided;
      }
      if (!is_left) {
        text.clear();
        layout.render(content.tree, content.kept, text);
        llmsys::append_clean(text, texts->data);
      }
      texts->offsets.push_back(static_cast<int64_t>(texts->data.size()));
      texts->is_left.push_back(is_left);
    }
  } catch (...) {  // std::bad_alloc: Python extracts the batch, or reports its own lack of memory
    delete texts;
    return nullptr;
  }
  return texts;
}

const char* llmsys_data(void* texts) { return static_cast<Texts*>(texts)->data.data(); }
const int64_t* llmsys_offsets(void* texts) { return static_cast<Texts*>(texts)->offsets.data(); }
const uint8_t* llmsys_left(void* texts) { return static_cast<Texts*>(texts)->is_left.data(); }
void llmsys_free(void* texts) { delete static_cast<Texts*>(texts); }

}  // extern "C"
#pragma GCC visibility pop
