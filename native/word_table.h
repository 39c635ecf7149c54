// Chunks of texts, the words that each is split into, and what is known of each word: `WordCache`
// and `Vocabulary` in `data_pipeline/text`.
#pragma once

#include <memory>
#include <unordered_set>

#include "splitting_rules.h"

namespace llmsys {

// as in data_pipeline/text/vocabulary.py
enum WordFlag {WORD_NOT_SYMBOL = 1, WORD_ALPHABETIC = 2, WORD_TERMINAL = 4, WORD_PASSING = 8};
constexpr uint64_t kHashBase = 0x9E3779B97F4A7C15;

// Texts with a number each, in the order in which they were added.
class TextTable {
 public:
  TextTable() : slots_(size_t{1} << bits_) {}

  int32_t size() const { return static_cast<int32_t>(ends_.size()) - 1; }

  string_view get(int32_t number) const {
    return string_view(data_).substr(ends_[number], ends_[number + 1] - ends_[number]);
  }

  const char* data() const { return data_.data(); }
  const int64_t* ends() const { return ends_.data(); }

  // Return the number of a text; a new one gets the next number.
  int32_t find_or_add(string_view text, bool& is_new) {
    const uint64_t hash = compute_hash(text);
    size_t slot = locate(text, hash);
    is_new = slots_[slot].number < 0;
    if (!is_new) return slots_[slot].number;
    const int32_t number = size();
    if (2 * static_cast<size_t>(number + 1) > slots_.size()) {
      double_slots();
      slot = locate(text, hash);
    }
    data_.append(text);
    ends_.push_back(static_cast<int64_t>(data_.size()));
    slots_[slot] = {hash, number, static_cast<uint32_t>(text.size())};
    return number;
  }

  // Return the number of a text, or -1.
  int32_t find(string_view text) const { return slots_[locate(text, compute_hash(text))].number; }

 private:
  struct Slot {
    uint64_t hash = 0;
    int32_t number = -1;
    uint32_t size = 0;
  };

  // Texts of so many bytes that have one size are equal if their hashes are.
  static constexpr size_t kShort = 8;

  static uint64_t compute_hash(string_view text) {
    uint64_t hash = text.size();
    size_t at = 0;
    for (; at + 8 <= text.size(); at += 8) hash = mix(hash, text.data() + at, 8);
    return at < text.size() ? mix(hash, text.data() + at, text.size() - at) : hash;
  }

  // Each step is a permutation of 64 bits, so that no two short texts of one size collide.
  static uint64_t mix(uint64_t hash, const char* from, size_t size) {
    uint64_t part = 0;
    memcpy(&part, from, size);
    hash = (hash ^ part) * kHashBase;
    return hash ^ hash >> 32;
  }

  size_t begin(uint64_t hash) const { return hash * 0xBF58476D1CE4E5B9 >> (64 - bits_); }

  // Return the slot of a text, or the free one that it would take.
  size_t locate(string_view text, uint64_t hash) const {
    for (size_t slot = begin(hash);; slot = (slot + 1) & (slots_.size() - 1)) {
      const Slot& there = slots_[slot];
      if (there.number < 0) return slot;
      if (there.hash != hash || there.size != text.size()) continue;
      if (text.size() <= kShort || get(there.number) == text) return slot;
    }
  }

  void double_slots() {
    const std::vector<Slot> before = std::move(slots_);
    bits_++;
    slots_.assign(size_t{1} << bits_, Slot());
    for (const Slot& each : before) {
      if (each.number < 0) continue;
      size_t slot = begin(each.hash);
      while (slots_[slot].number >= 0) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = each;
    }
  }

  int bits_ = 12;
  std::vector<Slot> slots_;
  std::vector<int64_t> ends_{0};
  string data_;
};

// What Python says of characters; the rest is in the tables.
struct CharacterTexts {
  string_view punctuation;     // what datatrove counts as such
  string_view sentence_marks;  // characters that end a sentence
  string_view changed;         // known otherwise by this Python
};

class WordTable {
 public:
  // `rules` is null where every chunk is a word.
  WordTable(std::shared_ptr<const SplittingRules> rules, const CharacterTexts& texts, int longest)
      : WordTable(std::move(rules), build_set(texts.punctuation), build_set(texts.sentence_marks),
                  build_set(texts.changed), longest) {}

  // Return an empty table with the rules of this one.
  std::unique_ptr<WordTable> renew() const {
    return std::unique_ptr<WordTable>(
        new WordTable(rules_, punctuation_, sentence_marks_, changed_, longest_));
  }

  // Find the chunks of texts. Return how many new ones are left to Python.
  int64_t look_up(const char* data, const int64_t* offsets, int64_t count) {
    numbers_.clear();
    per_text_.clear();
    left_.clear();
    left_data_.clear();
    left_ends_.assign(1, 0);
    for (int64_t text = 0; text < count; text++) {
      const size_t before = numbers_.size();
      const char* end = data + offsets[text + 1];
      for_each_chunk(data + offsets[text], end, [&](const char* from, const char* to) {
        look_up_chunk(string_view(from, static_cast<size_t>(to - from)));
      });
      per_text_.push_back(static_cast<int64_t>(numbers_.size() - before));
    }
    return static_cast<int64_t>(left_.size());
  }

  const char* left_data() const { return left_data_.data(); }
  const int64_t* left_ends() const { return left_ends_.data(); }

  // Take the words of the chunks that were left, with their flags.
  void learn(const char* data, const int64_t* word_ends, const uint8_t* flags,
             const int64_t* words_per_chunk) {
    int64_t word = 0;
    for (size_t place = 0; place < left_.size(); place++) {
      std::vector<int32_t> words;
      for (const int64_t end = word + words_per_chunk[place]; word < end; word++) {
        const int64_t from = word ? word_ends[word - 1] : 0;
        const string_view text(data + from, static_cast<size_t>(word_ends[word] - from));
        words.push_back(add_word(text, flags[word]));
      }
      late_words_[left_[place]] = std::move(words);
    }
    left_.clear();
  }

  // Return the number of words of the texts that were looked up.
  int64_t count_words() const {
    int64_t total = 0;
    for (const int32_t number : numbers_) total += get_words(number).size;
    return total;
  }

  // Write the words of the texts that were looked up, and where each text begins.
  void write_words(int32_t* ids, int64_t* offsets) const {
    int64_t written = 0;
    size_t place = 0;
    offsets[0] = 0;
    for (size_t text = 0; text < per_text_.size(); text++) {
      for (const size_t end = place + per_text_[text]; place < end; place++) {
        const Words words = get_words(numbers_[place]);
        std::copy(words.first, words.first + words.size, ids + written);
        written += words.size;
      }
      offsets[text + 1] = written;
    }
  }

  // Write chunks, words and sentences of each line of the texts that were looked up. A line ends
  // as in str.splitlines. Return whether no text has more lines than it is said to have.
  bool count_lines(const char* data, const int64_t* offsets, const int64_t* lines_per_text,
                   int64_t* chunks, int64_t* words, int64_t* sentences) const {
    int64_t first_line = 0;
    size_t place = 0;
    for (size_t text = 0; text < per_text_.size(); text++) {
      LineCounter counter(*this, chunks, words, sentences, first_line,
                          first_line + lines_per_text[text]);
      const char* p = data + offsets[text];
      const char* end = data + offsets[text + 1];
      while (p < end) {
        const char* space = p;
        int64_t breaks = 0;
        for (int size; p < end && (size = measure_space(p, end)); p += size) {
          const int line_end = measure_break(p, end);
          if (line_end) breaks++;
          if (line_end > size) size = line_end;  // a carriage return and a newline
        }
        counter.add_breaks(breaks);
        if (p >= end) break;
        const bool is_single = p - space == 1 && *space == ' ';
        if (!counter.add_chunk(numbers_[place++], p > space && !is_single)) return false;
        while (p < end && !measure_space(p, end)) p++;
      }
      first_line += lines_per_text[text];
    }
    return true;
  }

  int32_t num_chunks() const { return chunks_.size(); }
  int64_t num_characters() const { return num_characters_; }

  const TextTable& words() const { return words_; }

  // Write what is known of the words from number `first` on.
  void write_vocabulary(int32_t first, int32_t* lengths, int32_t* sizes, uint64_t* hashes,
                        uint64_t* powers, uint8_t* flags) const {
    for (int32_t word = first; word < words_.size(); word++) {
      const Traits& traits = traits_[word];
      *lengths++ = traits.length;
      *sizes++ = static_cast<int32_t>(words_.get(word).size());
      *hashes++ = traits.hash;
      *powers++ = traits.power;
      *flags++ = traits.flags;
    }
  }

 private:
  struct Traits {
    uint64_t hash;
    uint64_t power;
    int32_t length;
    uint8_t flags;
  };

  struct Words {
    const int32_t* first;
    int64_t size;
  };

  // Counts of the lines of one text.
  class LineCounter {
   public:
    LineCounter(const WordTable& table, int64_t* chunks, int64_t* words, int64_t* sentences,
                int64_t line, int64_t end)
        : table_(table), chunks_(chunks), words_(words), sentences_(sentences), line_(line),
          end_(end) {
      for (int64_t each = line; each < end; each++)
        chunks[each] = words[each] = sentences[each] = 0;
    }

    void add_breaks(int64_t count) {
      if (!count) return;
      line_ += count;
      is_empty_ = true;
    }

    bool add_chunk(int32_t number, bool has_odd_space) {
      if (line_ >= end_) return false;
      if (is_empty_) {
        // A sentence starts at the first word of a line.
        sentences_[line_]++;
        has_decisive_ = false;
      } else if (has_odd_space) {
        add_flags(table_.traits_[0].flags);  // it can start a sentence, and is not counted
      }
      is_empty_ = false;
      chunks_[line_]++;
      const Words words = table_.get_words(number);
      words_[line_] += words.size;
      for (int64_t word = 0; word < words.size; word++)
        add_flags(table_.traits_[words.first[word]].flags);
      return true;
    }

   private:
    void add_flags(uint8_t flags) {
      // Punctuation after a terminal mark (a closing quote) still belongs to the sentence.
      if (flags & WORD_PASSING) return;
      const bool is_terminal = flags & WORD_TERMINAL;
      if (has_decisive_ && was_terminal_ && !is_terminal) sentences_[line_]++;
      has_decisive_ = true;
      was_terminal_ = is_terminal;
    }

    const WordTable& table_;
    int64_t* chunks_;
    int64_t* words_;
    int64_t* sentences_;
    int64_t line_;
    int64_t end_;
    bool is_empty_ = true;
    bool has_decisive_ = false;
    bool was_terminal_ = false;
  };

  WordTable(std::shared_ptr<const SplittingRules> rules, CharacterSet punctuation,
            CharacterSet sentence_marks, CharacterSet changed, int longest)
      : rules_(std::move(rules)),
        punctuation_(std::move(punctuation)),
        sentence_marks_(std::move(sentence_marks)),
        changed_(std::move(changed)),
        longest_(longest) {
    // the run of white space that is a word: no chunk equals it
    bool is_new;
    chunks_.find_or_add(" ", is_new);
    word_ids_.push_back(add_word(" "));
    first_words_ = {0, 1};
  }

  static CharacterSet build_set(string_view marks) {
    CharacterRanges ranges;
    for (const uint32_t point : decode_all(marks)) ranges.emplace_back(point, point);
    return CharacterSet(std::move(ranges));
  }

  template <typename Use>
  static void for_each_chunk(const char* p, const char* end, Use use) {
    while (p < end) {
      const int size = measure_space(p, end);
      if (size) {
        p += size;
        continue;
      }
      const char* from = p;
      while (p < end && !measure_space(p, end)) p++;
      use(from, p);
    }
  }

  void look_up_chunk(string_view text) {
    bool is_new;
    const int32_t number = chunks_.find_or_add(text, is_new);
    numbers_.push_back(number);
    if (!is_new) return;
    chunk_.set(text);
    num_characters_ += chunk_.size();
    if (chunk_.size() > longest_ || !is_known()) {
      left_.push_back(number);
      left_data_.append(text);
      left_ends_.push_back(static_cast<int64_t>(left_data_.size()));
    } else if (rules_) {
      rules_->split(chunk_, spans_);
      for (const WordSpan& span : spans_) word_ids_.push_back(add_word(chunk_.get(span)));
    } else {
      word_ids_.push_back(add_word(text));
    }
    first_words_.push_back(static_cast<int64_t>(word_ids_.size()));
  }

  // Return whether all characters of the chunk are the same in Python's version of Unicode.
  bool is_known() const {
    for (const uint32_t point : chunk_.points)
      if (!get_assigned_characters().contains(point) || changed_.contains(point)) return false;
    return true;
  }

  Words get_words(int32_t number) const {
    const int64_t size = first_words_[number + 1] - first_words_[number];
    if (size) return {word_ids_.data() + first_words_[number], size};
    const auto late = late_words_.find(number);
    if (late == late_words_.end()) return {nullptr, 0};
    return {late->second.data(), static_cast<int64_t>(late->second.size())};
  }

  int32_t add_word(string_view text) {
    bool is_new;
    const int32_t word = words_.find_or_add(text, is_new);
    if (is_new) traits_.push_back(compute_traits(text, kUnknown));
    return word;
  }

  int32_t add_word(string_view text, uint8_t flags) {
    bool is_new;
    const int32_t word = words_.find_or_add(text, is_new);
    if (is_new) traits_.push_back(compute_traits(text, flags));
    return word;
  }

  Traits compute_traits(string_view text, uint8_t flags) const {
    Traits traits{0, 1, 0, 0};
    bool is_all_marks = true;
    bool has_letter = false;
    bool is_all_punctuation = true;
    uint32_t point = 0;
    const char* p = text.data();
    const char* end = p + text.size();
    while (p < end) {
      point = decode(p, end);
      traits.length++;
      traits.hash = traits.hash * kHashBase + point + 1;
      traits.power *= kHashBase;
      is_all_marks = is_all_marks && punctuation_.contains(point);
      has_letter = has_letter || is_letter(point);
      is_all_punctuation = is_all_punctuation && is_punctuation(point);
    }
    const bool is_terminal = traits.length == 1 && sentence_marks_.contains(point);
    traits.flags = static_cast<uint8_t>(
        (is_all_marks ? 0 : WORD_NOT_SYMBOL) | (has_letter ? WORD_ALPHABETIC : 0) |
        (is_terminal ? WORD_TERMINAL : !has_letter && is_all_punctuation ? WORD_PASSING : 0));
    if (flags != kUnknown) traits.flags = flags;
    return traits;
  }

  static constexpr uint8_t kUnknown = 255;

  std::shared_ptr<const SplittingRules> rules_;
  CharacterSet punctuation_, sentence_marks_, changed_;
  int longest_;

  TextTable chunks_;
  std::vector<int64_t> first_words_;  // of each chunk in `word_ids_`
  std::vector<int32_t> word_ids_;
  std::unordered_map<int32_t, std::vector<int32_t>> late_words_;  // of chunks that were left
  int64_t num_characters_ = 0;

  TextTable words_;
  std::vector<Traits> traits_;

  // of the texts that were looked up last
  std::vector<int32_t> numbers_;
  std::vector<int64_t> per_text_;
  std::vector<int32_t> left_;
  string left_data_;
  std::vector<int64_t> left_ends_;

  Chunk chunk_;
  WordSpans spans_;
};

}  // namespace llmsys
