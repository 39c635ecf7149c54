// The functions that Python calls, as plain C: `data_pipeline/core/native.py` has the other side.
//
// A call handles a batch, without Python's lock. Results are owned by the object that a function
// returns, until it is freed.
#include <new>

#include "languages.h"
#include "lines.h"
#include "main_content.h"
#include "ngrams.h"
#include "page_tree.h"
#include "text_layout.h"
#include "word_table.h"

#ifndef LLMSYS_SOURCES
#define LLMSYS_SOURCES "unknown"
#endif

namespace {

// Raise it with every change of a function's arguments or results.
constexpr int kAbi = 3;

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

// Write for every code point what Unicode says of it: 1 if it is a letter, 2 if it is \w, 4 if it
// is \d, 8 if it is a combining mark, 16 if it is punctuation; 32 if it is assigned.
void llmsys_describe_characters(uint8_t* to) {
  for (uint32_t point = 0; point <= llmsys::kLastCharacter; point++) {
    to[point] = static_cast<uint8_t>(
        llmsys::is_letter(point) | llmsys::get_word_characters().contains(point) << 1 |
        llmsys::get_digits().contains(point) << 2 | llmsys::is_combining_mark(point) << 3 |
        llmsys::is_punctuation(point) << 4 |
        llmsys::get_assigned_characters().contains(point) << 5);
  }
}

// Create a table of words. `texts` are the members of RuleTexts and then those of CharacterTexts,
// each with its size; without a prefix every chunk is a word. `flags`: 1 if letters are whole, 2 if
// the prefix is anchored. Chunks of more than `longest` characters are left. Return null where an
// expression is unknown, or without memory.
void* llmsys_create_words(const char* const* texts, const int64_t* sizes, int flags, int longest) {
  const auto get = [&](int place) {
    return llmsys::string_view(texts[place], static_cast<size_t>(sizes[place]));
  };
  try {
    std::shared_ptr<const llmsys::SplittingRules> rules;
    if (sizes[0]) {
      rules = std::make_shared<const llmsys::SplittingRules>(llmsys::RuleTexts{
          get(0), get(1), get(2), get(3), get(4), get(5), get(6), get(7), get(8),
          static_cast<bool>(flags & 1), static_cast<bool>(flags & 2)});
    }
    const llmsys::CharacterTexts characters{get(9), get(10), get(11)};
    return new llmsys::WordTable(std::move(rules), characters, longest);
  } catch (...) {
    return nullptr;
  }
}

// Create an empty table with the rules of another one. Return null without memory.
void* llmsys_renew_words(void* table) {
  try {
    return static_cast<llmsys::WordTable*>(table)->renew().release();
  } catch (...) {
    return nullptr;
  }
}

void llmsys_free_words(void* table) { delete static_cast<llmsys::WordTable*>(table); }

// Look up the chunks of `count` texts of valid UTF-8. Return the number of new chunks that are left
// to Python, or -1 without memory: the table is then to be freed.
int64_t llmsys_look_up_words(void* table, const char* data, const int64_t* offsets,
                             int64_t count) {
  try {
    return static_cast<llmsys::WordTable*>(table)->look_up(data, offsets, count);
  } catch (...) {
    return -1;
  }
}

const char* llmsys_left_data(void* table) {
  return static_cast<llmsys::WordTable*>(table)->left_data();
}

const int64_t* llmsys_left_ends(void* table) {
  return static_cast<llmsys::WordTable*>(table)->left_ends();
}

// Take the words of the chunks that were left: their bytes, ends, flags and number per chunk.
// Return 0, or -1 without memory.
int llmsys_learn_words(void* table, const char* data, const int64_t* ends, const uint8_t* flags,
                       const int64_t* words_per_chunk) {
  try {
    static_cast<llmsys::WordTable*>(table)->learn(data, ends, flags, words_per_chunk);
    return 0;
  } catch (...) {
    return -1;
  }
}

// Write words per text, chunks, characters of chunks and distinct words, so far.
void llmsys_count_words(void* table, int64_t* counts) {
  const auto& words = *static_cast<llmsys::WordTable*>(table);
  counts[0] = words.count_words();
  counts[1] = words.num_chunks();
  counts[2] = words.num_characters();
  counts[3] = words.words().size();
}

void llmsys_write_words(void* table, int32_t* ids, int64_t* offsets) {
  static_cast<llmsys::WordTable*>(table)->write_words(ids, offsets);
}

// Write the columns of all words from number `first` on.
void llmsys_write_vocabulary(void* table, int32_t first, int32_t* lengths, int32_t* sizes,
                             uint64_t* hashes, uint64_t* powers, uint8_t* flags) {
  static_cast<llmsys::WordTable*>(table)->write_vocabulary(first, lengths, sizes, hashes, powers,
                                                           flags);
}

const char* llmsys_vocabulary_data(void* table) {
  return static_cast<llmsys::WordTable*>(table)->words().data();
}

const int64_t* llmsys_vocabulary_ends(void* table) {
  return static_cast<llmsys::WordTable*>(table)->words().ends();
}

// Return the number of a word, or -1.
int32_t llmsys_find_word(void* table, const char* word, int64_t size) {
  const llmsys::string_view text(word, static_cast<size_t>(size));
  return static_cast<llmsys::WordTable*>(table)->words().find(text);
}

// Write chunks, words and sentences of the lines of the texts that were looked up last. Return 0 if
// a text has more lines than it is said to have.
int llmsys_count_lines(void* table, const char* data, const int64_t* offsets,
                       const int64_t* lines_per_text, int64_t* chunks, int64_t* words,
                       int64_t* sentences) {
  return static_cast<llmsys::WordTable*>(table)->count_lines(data, offsets, lines_per_text, chunks,
                                                            words, sentences);
}

// Write parts, repeated parts and characters of these for paragraphs, then for lines: of shape
// (6, count). Return 0, or -1 without memory.
int llmsys_count_repeated_lines(const char* data, const int64_t* offsets, int64_t count,
                                int64_t* to) {
  try {
    llmsys::LineReader reader;
    for (int64_t text = 0; text < count; text++) {
      const llmsys::string_view own(data + offsets[text],
                                    static_cast<size_t>(offsets[text + 1] - offsets[text]));
      int64_t* column = to + text;
      for (const bool is_paragraph : {true, false}) {
        const auto found = is_paragraph ? reader.count_paragraphs(own) : reader.count_lines(own);
        for (const int64_t number : {found.parts, found.repeated, found.characters}) {
          *column = number;
          column += count;
        }
      }
    }
    return 0;
  } catch (...) {
    return -1;
  }
}

// Write lines, lines with a bullet and lines with an ellipsis, of shape (3, count).
void llmsys_count_line_marks(const char* data, const int64_t* offsets, int64_t count,
                             int64_t* to) {
  for (int64_t text = 0; text < count; text++) {
    const auto found = llmsys::LineReader::count_marks(llmsys::string_view(
        data + offsets[text], static_cast<size_t>(offsets[text + 1] - offsets[text])));
    to[text] = found.lines;
    to[count + text] = found.bullets;
    to[2 * count + text] = found.ellipses;
  }
}

// Write counts and characters of the most frequent n-gram, n = 2 … 4, both (3, documents).
// Return 0, or -1 without memory.
int llmsys_count_top_ngrams(const int32_t* ids, const int64_t* offsets, int64_t documents,
                            const int32_t* lengths, int64_t* counts, int64_t* characters) {
  try {
    llmsys::NgramCounter(ids, offsets, documents, lengths).count_top(counts, characters);
    return 0;
  } catch (...) {
    return -1;
  }
}

// Write the characters in repeated n-grams, n = 5 … 10, of shape (6, documents). Return 0, or -1
// without memory.
int llmsys_count_repeated_ngrams(const int32_t* ids, const int64_t* offsets, int64_t documents,
                                 const int32_t* lengths, const uint64_t* powers,
                                 const uint64_t* hashes, int64_t* characters) {
  try {
    llmsys::NgramCounter(ids, offsets, documents, lengths)
        .count_repeated(powers, hashes, characters);
    return 0;
  } catch (...) {
    return -1;
  }
}

// Write the sums of py3langid's model, of shape (count, num_labels), and the number of distinct
// features of each text. Return 0, or -1 without memory.
int llmsys_score_languages(const llmsys::LanguageTables* tables, const char* data,
                           const int64_t* offsets, int64_t count, float* sums, int64_t* found) {
  try {
    llmsys::LanguageScorer scorer(*tables);
    for (int64_t text = 0; text < count; text++) {
      found[text] = scorer.score(reinterpret_cast<const uint8_t*>(data) + offsets[text],
                                 offsets[text + 1] - offsets[text],
                                 sums + text * tables->num_labels);
    }
    return 0;
  } catch (...) {
    return -1;
  }
}

}  // extern "C"
#pragma GCC visibility pop
