// The runs of a page that are its main content: boilerplate.py, content_score.py and
// main_content.py of data_pipeline/extract. Numbers and the order of sums are theirs.
#pragma once

#include <algorithm>
#include <vector>

#include "boilerplate.h"
#include "html_tree.h"
#include "phrases.h"

namespace llmsys {

inline int64_t count_punctuation(string_view text) {
  int64_t count = 0;
  const char* end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    switch (decode(p, end)) {
      case ',': case '.': case ';': case '!': case '?':
      case 0x60C: case 0xFF0C: case 0x3001: case 0x3002:
        count++;
        break;
      default:
        break;
    }
  }
  return count;
}

// Finds the kept runs of one page after another; the buffers are used again.
class MainContent {
 public:
  Tree tree;
  std::vector<int32_t> kept;
  bool is_undecided = false;  // a character decides that depends on the version of Unicode

  void select() {
    is_undecided = false;
    kept.clear();
    const size_t runs = tree.runs.size();
    if (!runs) return;
    mark_boilerplate();
    score_elements();
    const int32_t root = find_root();
    keep_.assign(runs, 0);
    keep_element(root);
    if (root) {
      keep_siblings(root);
      if (!is_body(root)) add_lead(root);
    }
    drop_link_boxes(root);
    drop_phrases();
    select_kept_runs();
    int64_t in_paragraphs = 0;
    for (const int32_t run : kept)
      if (tree.runs[run].length >= kParagraph) in_paragraphs += tree.runs[run].length;
    const int32_t part = find_main_part();
    const double least = 0.3 * static_cast<double>(count_in(characters_, part));
    if (static_cast<double>(in_paragraphs) >= least) return;
    kept.clear();
    const Element& found = element(part);
    for (int32_t run = found.first; run < found.last; run++)
      if (!out_[run]) kept.push_back(run);
  }

 private:
  static constexpr int64_t kParagraph = 80;

  const Element& element(int32_t number) const { return tree.elements[number]; }
  int32_t count_elements() const { return static_cast<int32_t>(tree.elements.size()); }
  int32_t count_runs() const { return static_cast<int32_t>(tree.runs.size()); }

  int get_flags(int32_t number) {
    Element& found = tree.elements[number];
    if (found.flags < 0)
      found.flags = static_cast<int16_t>(classify_attributes(found.attributes));
    return found.flags;
  }
  bool is_body(int32_t number) { return get_flags(number) & FLAG_BODY; }

  // Return the difference of two prefix sums; `last` -1 is the last sum, as in Python.
  int64_t count_in(const std::vector<int64_t>& sums, int32_t number) const {
    const Element& found = element(number);
    return (found.last < 0 ? sums.back() : sums[found.last]) - sums[found.first];
  }

  bool is_paragraph(const Run& run) const {
    return run.length >= kParagraph && run.linked * 4 <= run.length &&
           !has(TAGS_HEADINGS, element(run.owner).tag);
  }

  // --- boilerplate ---

  void mark_boilerplate() {
    const int32_t runs = count_runs();
    all_.assign(runs + 1, 0);
    all_paragraphs_.assign(runs + 1, 0);
    for (int32_t run = 0; run < runs; run++) {
      const Run& found = tree.runs[run];
      all_[run + 1] = all_[run] + found.length;
      all_paragraphs_[run + 1] = all_paragraphs_[run] + (is_paragraph(found) ? found.length : 0);
    }
    if (!mark_runs(true) && !mark_runs(false)) out_.assign(runs, 0);
    characters_.assign(runs + 1, 0);
    linked_.assign(runs + 1, 0);
    paragraphs_.assign(runs + 1, 0);
    for (int32_t run = 0; run < runs; run++) {
      const Run& found = tree.runs[run];
      const bool is_kept = !out_[run];
      characters_[run + 1] = characters_[run] + (is_kept ? found.length : 0);
      linked_[run + 1] = linked_[run] + (is_kept ? found.linked : 0);
      const bool counts = is_kept && is_paragraph(found);
      paragraphs_[run + 1] = paragraphs_[run] + (counts ? found.length : 0);
    }
  }

  // Mark the runs in one pass over the elements. Return whether enough text is left.
  bool mark_runs(bool trust_names) {
    const int32_t runs = count_runs();
    out_.assign(runs, 0);
    const int64_t total = all_[runs];
    const double most = std::max(static_cast<double>(all_paragraphs_[runs]) * 0.5, 400.0);
    // What readers say is the content of a discussion; what buyers say is not that of a product.
    const int named_flags = FLAG_SIDE | (tree.is_discussion ? 0 : FLAG_COMMENT) |
                            (tree.is_product ? FLAG_REVIEW : 0);
    const int side_flags = FLAG_HIDDEN | FLAG_GUTTER | named_flags;
    int32_t done = 0;
    int32_t header_done = 0;
    flows_.clear();
    for (int32_t number = 0; number < count_elements(); number++) {
      const Element& found = element(number);
      const int32_t start = found.first;
      const int32_t end = found.last;
      if (end <= start || end <= done) continue;
      if (found.tag == TAG_header && trust_names && end > header_done) {
        header_done = end;
        for (int32_t run = start; run < end; run++) {
          const Run& inside = tree.runs[run];
          if (inside.length < kParagraph || inside.linked * 4 > inside.length) out_[run] = 1;
        }
      }
      const int flags = get_flags(number);
      const bool is_side_tag = has(TAGS_SIDE, found.tag);
      const bool is_side = flags & side_flags;
      if (!(is_side || is_side_tag) || has(TAGS_NEVER, found.tag)) continue;
      const int64_t in_paragraphs = all_paragraphs_[end] - all_paragraphs_[start];
      const bool may_be_most = !is_side_tag || found.tag == TAG_form;
      if (may_be_most && static_cast<double>(in_paragraphs) > most) continue;
      const double size = static_cast<double>(all_[end] - all_[start]);
      const bool is_box = (flags & FLAG_BOX) && !(flags & FLAG_HIDDEN) && !is_side_tag;
      if (is_box && static_cast<double>(in_paragraphs) >= size * 0.5 && is_flow(found.parent))
        continue;
      if (!(size <= static_cast<double>(total) * 0.4)) continue;
      const bool is_large = size > static_cast<double>(total) * 0.15;
      const bool is_named = flags & named_flags;
      if (!is_boilerplate(found.tag, flags, is_named, is_large, trust_names)) continue;
      std::fill(out_.begin() + start, out_.begin() + end, 1);
      done = end;
    }
    int64_t left = 0;
    for (int32_t run = 0; run < runs; run++) left += out_[run] ? 0 : tree.runs[run].length;
    return left >= std::min<int64_t>(250, total);
  }

  // Return whether paragraphs stand in an element.
  bool is_flow(int32_t number) {
    if (flows_.empty()) {
      flows_.assign(count_elements(), 0);
      for (const Run& run : tree.runs) {
        if (!is_paragraph(run)) continue;
        flows_[run.owner] = 1;
        flows_[element(run.owner).parent] = 1;
      }
    }
    return flows_[number];
  }

  static bool is_boilerplate(int tag, int flags, bool is_named, bool is_large, bool trust_names) {
    if (flags & (FLAG_HIDDEN | FLAG_GUTTER)) return true;
    if (!trust_names) return tag == TAG_footer || tag == TAG_menu;
    if (has(TAGS_SIDE, tag)) return true;
    return is_named && !(flags & FLAG_BODY) && !((flags & FLAG_MAIN) && is_large);
  }

  // --- the root ---

  void score_elements() {
    const int32_t elements = count_elements();
    weights_.assign(elements, 0.0);
    containers_.resize(elements);
    for (int32_t number = 0; number < elements; number++) {
      const Element& found = element(number);
      containers_[number] = has(TAGS_SHAPES, found.tag) ? containers_[found.parent] : number;
    }
    static const double kShares[] = {1, 2, 6, 9, 12, 15};
    for (int32_t run = 0; run < count_runs(); run++) {
      const Run& found = tree.runs[run];
      if (found.length < 25 || out_[run] || found.linked * 2 > found.length) continue;
      const Element& owner = element(found.owner);
      if (has(TAGS_HEADINGS, owner.tag)) continue;
      const double marks = static_cast<double>(1 + count_punctuation(tree.get_text(found)));
      const double weight = marks + std::min(static_cast<double>(found.length) / 100.0, 3.0);
      const bool is_alone = owner.last - owner.first == 1 && !has(TAGS_OWN_RUN, owner.tag);
      int32_t number = containers_[is_alone ? owner.parent : found.owner];
      for (const double share : kShares) {
        if (number == 0) break;
        weights_[number] += weight / share;
        number = element(number).parent;
      }
    }
    for (int32_t number = 0; number < elements; number++) {
      if (weights_[number] == 0.0) continue;
      const double links = static_cast<double>(count_in(linked_, number));
      const double characters = static_cast<double>(count_in(characters_, number));
      const double weight = weights_[number] * (1.0 - links / characters);
      weights_[number] = is_body(number) ? weight * 1.3 : weight;
    }
  }

  int32_t find_root() {
    const auto heaviest = std::max_element(weights_.begin(), weights_.end());
    const int32_t root = static_cast<int32_t>(heaviest - weights_.begin());
    if (tree.is_discussion) return find_thread(root);
    return find_named_post(is_body(root) ? find_twin_ancestor(root) : grow_root(root));
  }

  int32_t find_thread(int32_t root) const {
    const double least = static_cast<double>(count_in(paragraphs_, 0)) * 0.8;
    while (root > 0 && static_cast<double>(count_in(paragraphs_, root)) < least)
      root = element(root).parent;
    return root;
  }

  int32_t grow_root(int32_t root) const {
    int64_t own = count_in(paragraphs_, root);
    for (int32_t number = root; number > 0;) {
      number = element(number).parent;
      const int64_t around = count_in(paragraphs_, number);
      if (static_cast<double>(around - own) > 0.25 * static_cast<double>(own)) {
        root = number;
        own = around;
      }
    }
    return root;
  }

  int32_t find_twin_ancestor(int32_t root) const {
    int32_t first = element(root).first;
    int32_t last = element(root).last;
    for (int32_t number = 0; number < count_elements(); number++) {
      const Element& found = element(number);
      if (found.tag != element(root).tag || found.attributes != element(root).attributes) continue;
      if (!count_in(paragraphs_, number)) continue;
      first = std::min(first, found.first);
      last = std::max(last, found.last);
    }
    while (root > 0 && (element(root).first > first || element(root).last < last))
      root = element(root).parent;
    return root;
  }

  int32_t find_named_post(int32_t root) {
    string_view number_of_post;
    for (int32_t number = 1; number < std::min(3, count_elements()); number++) {
      number_of_post = find_post_number(element(number).attributes, is_undecided);
      if (!number_of_post.empty()) break;
    }
    if (number_of_post.empty()) return root;
    const string name = " id=\"post-" + string(number_of_post) + "\"";
    for (int32_t number = root + 1; number < count_elements(); number++) {
      const Element& found = element(number);
      if (found.first >= element(root).last) break;
      if (contains(found.attributes, name) && count_in(characters_, number) >= 250) return number;
    }
    return root;
  }

  // --- which runs are kept ---

  void keep_element(int32_t number) {
    for (int32_t run = element(number).first; run < element(number).last; run++)
      keep_[run] = !out_[run];
  }

  void keep_siblings(int32_t root) {
    const int32_t parent = element(root).parent;
    const double least = std::max(10.0, weights_[root] * 0.2);
    for (int32_t number = parent + 1; number < count_elements(); number++) {
      if (element(number).parent != parent || number == root) continue;
      const int64_t size = count_in(characters_, number);
      const bool is_text = element(number).tag == TAG_p && size > kParagraph &&
                           count_in(linked_, number) * 4 < size;
      if (weights_[number] >= least || is_text) keep_element(number);
    }
  }

  void add_lead(int32_t root) {
    const int32_t start = element(root).first;
    int32_t headline = start;
    for (int32_t run = start - 1; run >= 0; run--) {
      if (element(tree.runs[run].owner).tag != TAG_h1) continue;
      headline = run;
      break;
    }
    for (int32_t run = headline + 1; run < start; run++) {
      const Run& found = tree.runs[run];
      if (found.length < 60 || found.linked * 4 > found.length || out_[run]) continue;
      if (!count_punctuation(tree.get_text(found))) continue;
      const int flags = get_flags(found.owner) | get_flags(element(found.owner).parent);
      if (!(flags & FLAG_TEASER)) keep_[run] = 1;
    }
  }

  void drop_link_boxes(int32_t root) {
    const double largest = static_cast<double>(count_in(characters_, root)) * 0.3;
    int32_t done = 0;
    for (int32_t number = root + 1; number < count_elements(); number++) {
      const Element& found = element(number);
      if (found.first >= element(root).last) break;
      if (!has(TAGS_BOXES, found.tag) || found.last <= done || is_body(number)) continue;
      const double size = static_cast<double>(count_in(characters_, number));
      const double links = static_cast<double>(count_in(linked_, number));
      if (size == 0 || links <= size * 0.5) continue;
      if (size >= largest) {
        if (has(TAGS_LINK_LISTS, found.tag)) done = found.last;
        continue;
      }
      done = found.last;
      std::fill(keep_.begin() + found.first, keep_.begin() + done, 0);
    }
  }

  int32_t find_main_part() const {
    const double least = static_cast<double>(count_in(characters_, 0)) * 0.2;
    for (int32_t number = 0; number < count_elements(); number++) {
      const Element& found = element(number);
      const bool is_marked = found.tag == TAG_main || contains(found.attributes, " role=\"main\"");
      if (is_marked && static_cast<double>(count_in(characters_, number)) > least) return number;
    }
    return 0;
  }

  void drop_phrases() {
    for (int32_t run = 0; run < count_runs(); run++) {
      if (!keep_[run]) continue;
      const Run& found = tree.runs[run];
      if (has(TAGS_NO_PHRASES, element(found.owner).tag)) continue;
      if (is_phrase(tree.get_text(found), found.length, is_undecided)) keep_[run] = 0;
    }
  }

  // Drop headings without text; backwards, because it is known only from what follows them.
  void select_kept_runs() {
    int32_t following = count_runs();
    int level = 0;  // tag of the following run if it is a heading
    for (int32_t run = count_runs() - 1; run >= 0; run--) {
      if (!keep_[run]) continue;
      const int tag = element(tree.runs[run].owner).tag;
      const bool is_heading = has(TAGS_HEADINGS, tag);
      const bool is_last = following == count_runs();
      if (is_heading && (is_last || (following > run + 1 && level && level <= tag))) continue;
      following = run;
      level = is_heading ? tag : 0;
      kept.push_back(run);
    }
    std::reverse(kept.begin(), kept.end());
  }

  std::vector<uint8_t> out_, keep_;
  std::vector<uint8_t> flows_;  // elements in which paragraphs stand; empty: not computed yet
  std::vector<int64_t> all_, all_paragraphs_;             // prefix sums of all runs
  std::vector<int64_t> characters_, linked_, paragraphs_;  // without boilerplate
  std::vector<double> weights_;
  std::vector<int32_t> containers_;
};

}  // namespace llmsys
