// Regular expressions with the meaning that Python's `re` gives them, for the expressions of
// `splitting_rules`: alternatives are tried from the left, repetitions are greedy, nothing is
// captured.
//
// Reads: literals, classes, `.`, `^`, `$`, `\d \s \w` and their complements, `* + ? {m,n}`, groups,
// lookahead, lookbehind of a fixed width, and `(?u)`, `(?i)`, `(?iu)` at the beginning. Everything
// else raises `UnknownExpression`: Python then matches.
#pragma once

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "characters.h"

namespace llmsys {

using Characters = std::vector<uint32_t>;  // code points

struct UnknownExpression : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ExpressionNode;
using NodePointer = std::unique_ptr<ExpressionNode>;

struct ExpressionNode {
  enum Kind {kSet, kBegin, kEnd, kSequence, kBranch, kRepeat, kLook};
  static constexpr int kUnlimited = 1 << 30;

  explicit ExpressionNode(Kind of) : kind(of) {}

  Kind kind;
  int set = 0;
  int least = 0;
  int most = 0;
  bool is_behind = false;
  bool is_negative = false;
  std::vector<NodePointer> parts;
};

// The program of an expression, and the sets that it names.
class Expression {
 public:
  explicit Expression(const Characters& text) : text_(text) {
    read_flags();
    const NodePointer root = parse_branches();
    if (at_ != text_.size()) throw UnknownExpression("a bracket that closes nothing");
    compile(*root);
    emit(kMatch);
    text_.clear();
    known_sets_.clear();
  }

  // Return the end of a match that begins at `position` of `size` characters, or -1.
  int match(const uint32_t* text, int size, int position) const {
    return run({text, size}, 0, position);
  }

  // Find the first match at or after `position`. Return false if there is none. After an empty
  // match the next one `must_advance`: it may not be empty at the same place.
  bool search(const uint32_t* text, int size, int position, int& first, int& last,
              bool must_advance = false) const {
    for (first = position; first <= size; first++) {
      const int forbidden = must_advance && first == position ? position : kNone;
      last = run({text, size}, 0, first, forbidden);
      if (last >= 0) return true;
    }
    return false;
  }

 private:
  enum Operation {kTakeSet, kTakeMany, kAtBegin, kAtEnd, kSplit, kJump, kTry, kAssert, kMatch};

  struct Instruction {
    Operation operation;
    int set;     // kTakeSet, kTakeMany; of kTry the number of its branches
    int target;  // kSplit: what is tried later; kJump; kAssert: where to go on
    int least;   // kTakeMany; of kAssert the characters to step back
    int most;    // kTakeMany; of kAssert whether it is negative
  };

  struct Subject {
    const uint32_t* text;
    int size;
  };

  // A state to come back to: the position, and down to `least` those before it.
  struct Choice {
    int instruction;
    int position;
    int least;
  };

  // The alternatives of one place, and which of them can begin with a character.
  struct Branches {
    std::vector<int> starts;
    std::vector<int> firsts;  // a set for each; kAny if it may match without a character
    std::vector<int> if_end;
    mutable std::unordered_map<uint32_t, std::vector<int>> known;
    mutable std::vector<int> ascii[128];
  };

  static constexpr int kAny = -1;
  static constexpr int kNone = -1;
  static constexpr size_t kMostKnown = 20'000;

  // --- parsing ---

  bool has_more() const { return at_ < text_.size(); }

  bool begins_with(const char* with) const {
    size_t at = at_;
    for (; *with; with++, at++)
      if (at >= text_.size() || text_[at] != static_cast<uint8_t>(*with)) return false;
    return true;
  }

  bool skip(const char* what) {
    if (!begins_with(what)) return false;
    for (; *what; what++) at_++;
    return true;
  }

  void read_flags() {
    if (skip("(?iu)") || skip("(?i)")) ignores_case_ = true;
    else skip("(?u)");
  }

  NodePointer parse_branches() {
    auto branch = std::make_unique<ExpressionNode>(ExpressionNode::kBranch);
    branch->parts.push_back(parse_sequence());
    while (skip("|")) branch->parts.push_back(parse_sequence());
    if (branch->parts.size() == 1) return std::move(branch->parts[0]);
    return branch;
  }

  NodePointer parse_sequence() {
    auto sequence = std::make_unique<ExpressionNode>(ExpressionNode::kSequence);
    while (has_more() && text_[at_] != '|' && text_[at_] != ')')
      sequence->parts.push_back(parse_repeated());
    return sequence;
  }

  NodePointer parse_repeated() {
    NodePointer item = parse_item();
    int least = 0;
    int most = 0;
    if (!read_quantifier(least, most)) return item;
    if (begins_with("?") || begins_with("+") || begins_with("*"))
      throw UnknownExpression("a lazy, possessive or double quantifier");
    const bool is_plain = item->kind == ExpressionNode::kSet;
    if (!is_plain && (item->kind == ExpressionNode::kBegin || !measure_least(*item)))
      throw UnknownExpression("a repetition of what may be empty");
    auto repeat = std::make_unique<ExpressionNode>(ExpressionNode::kRepeat);
    repeat->least = least;
    repeat->most = most;
    repeat->parts.push_back(std::move(item));
    return repeat;
  }

  bool read_quantifier(int& least, int& most) {
    if (skip("*")) return least = 0, most = ExpressionNode::kUnlimited, true;
    if (skip("+")) return least = 1, most = ExpressionNode::kUnlimited, true;
    if (skip("?")) return least = 0, most = 1, true;
    if (!begins_with("{")) return false;
    const size_t before = at_++;
    const bool has_least = read_number(least);
    if (!has_least) least = 0;
    if (skip(",")) {
      const bool has_most = read_number(most);
      if (!has_most) most = ExpressionNode::kUnlimited;
      if (skip("}") && (has_least || has_most)) return true;
    } else {
      most = least;
      if (has_least && skip("}")) return true;
    }
    at_ = before;
    throw UnknownExpression("a brace");
  }

  bool read_number(int& number) {
    const size_t before = at_;
    for (number = 0; has_more() && text_[at_] >= '0' && text_[at_] <= '9'; at_++)
      number = std::min(number * 10 + static_cast<int>(text_[at_] - '0'), 10'000);
    return at_ > before;
  }

  NodePointer parse_item() {
    if (skip("^")) return std::make_unique<ExpressionNode>(ExpressionNode::kBegin);
    if (skip("$")) return std::make_unique<ExpressionNode>(ExpressionNode::kEnd);
    if (begins_with("(")) return parse_group();
    if (begins_with("[")) return parse_class();
    if (begins_with("*") || begins_with("+") || begins_with("?") || begins_with("{"))
      throw UnknownExpression("a quantifier of nothing");
    if (skip(".")) return build_set({{0, '\n' - 1}, {'\n' + 1, kLastCharacter}});
    if (begins_with("\\")) {
      CharacterRanges ranges;
      read_escape(ranges);
      return build_set(fold_case(std::move(ranges)));
    }
    const uint32_t point = text_[at_++];
    return build_set(fold_case({{point, point}}));
  }

  NodePointer parse_group() {
    at_++;
    auto look = std::make_unique<ExpressionNode>(ExpressionNode::kLook);
    look->is_behind = begins_with("?<");
    bool is_look = true;
    if (skip("?=") || skip("?<=")) look->is_negative = false;
    else if (skip("?!") || skip("?<!")) look->is_negative = true;
    else is_look = false;
    if (!is_look && !skip("?:") && begins_with("?")) throw UnknownExpression("another group");
    NodePointer inside = parse_branches();
    if (!skip(")")) throw UnknownExpression("a bracket that is not closed");
    if (!is_look) return inside;
    if (look->is_behind) {
      look->least = measure_least(*inside);
      if (look->least != measure_most(*inside))
        throw UnknownExpression("a lookbehind of no fixed width");
    }
    look->parts.push_back(std::move(inside));
    return look;
  }

  NodePointer parse_class() {
    const size_t begin = at_++;
    const bool is_negative = skip("^");
    CharacterRanges ranges;
    const size_t first = at_;
    while (!(begins_with("]") && at_ > first)) {
      if (!has_more()) throw UnknownExpression("a class that is not closed");
      CharacterRanges low;
      const bool is_character = read_class_item(low);
      if (!is_character || !begins_with("-") || at_ + 1 >= text_.size() || text_[at_ + 1] == ']') {
        ranges.insert(ranges.end(), low.begin(), low.end());
        continue;
      }
      at_++;
      CharacterRanges high;
      if (!read_class_item(high) || high[0].first < low[0].first)
        throw UnknownExpression("a range of characters");
      ranges.emplace_back(low[0].first, high[0].first);
    }
    at_++;
    const std::string name = name_class(begin);
    const auto known = known_sets_.find(name);
    if (known != known_sets_.end()) {
      auto node = std::make_unique<ExpressionNode>(ExpressionNode::kSet);
      node->set = known->second;
      return node;
    }
    ranges = fold_case(std::move(ranges));
    if (is_negative) ranges = complement(ranges);
    NodePointer node = build_set(std::move(ranges));
    known_sets_[name] = node->set;
    return node;
  }

  std::string name_class(size_t begin) const {
    return std::string(reinterpret_cast<const char*>(text_.data() + begin),
                       (at_ - begin) * sizeof(uint32_t));
  }

  // Read a character or an escape. Return whether it is one character.
  bool read_class_item(CharacterRanges& ranges) {
    if (begins_with("\\")) return read_escape(ranges);
    if (!has_more()) throw UnknownExpression("a class that is not closed");
    const uint32_t point = text_[at_++];
    ranges = {{point, point}};
    return true;
  }

  // Read an escape. Return whether it is one character.
  bool read_escape(CharacterRanges& ranges) {
    at_++;
    if (!has_more()) throw UnknownExpression("a backslash at the end");
    const uint32_t name = text_[at_++];
    switch (name) {
      case 'd': ranges = get_digits().ranges(); return false;
      case 'D': ranges = complement(get_digits().ranges()); return false;
      case 's': ranges = get_spaces().ranges(); return false;
      case 'S': ranges = complement(get_spaces().ranges()); return false;
      case 'w': ranges = get_word_characters().ranges(); return false;
      case 'W': ranges = complement(get_word_characters().ranges()); return false;
      case 'n': ranges = {{'\n', '\n'}}; return true;
      case 't': ranges = {{'\t', '\t'}}; return true;
      case 'r': ranges = {{'\r', '\r'}}; return true;
      case 'x': return read_hexadecimal(2, ranges);
      case 'u': return read_hexadecimal(4, ranges);
      case 'U': return read_hexadecimal(8, ranges);
      default: break;
    }
    const bool is_letter = (name | 32) >= 'a' && (name | 32) <= 'z';
    if (is_letter || (name >= '0' && name <= '9')) throw UnknownExpression("another escape");
    ranges = {{name, name}};
    return true;
  }

  bool read_hexadecimal(int digits, CharacterRanges& ranges) {
    uint32_t point = 0;
    for (; digits > 0; digits--) {
      if (!has_more()) throw UnknownExpression("an escape that is cut off");
      const uint32_t digit = text_[at_++];
      const uint32_t lower = digit | 32;
      if (digit >= '0' && digit <= '9') point = point * 16 + digit - '0';
      else if (lower >= 'a' && lower <= 'f') point = point * 16 + lower - 'a' + 10;
      else throw UnknownExpression("an escape without digits");
    }
    ranges = {{point, point}};
    return true;
  }

  // With (?i) return every character that equals one of the given in some case.
  CharacterRanges fold_case(CharacterRanges ranges) const {
    normalize(ranges);
    if (!ignores_case_) return ranges;
    const auto& lower = get_lower_cases();
    CharacterRanges lowered;
    for (const CharacterRange& range : ranges) {
      for (uint32_t point = range.first; point <= range.second; point++) {
        const auto found = lower.find(point);
        const uint32_t low = found == lower.end() ? point : found->second;
        lowered.emplace_back(low, low);
        for (const auto& pair : EXTRA_CASES)
          if (pair[0] == low) lowered.emplace_back(pair[1], pair[1]);
      }
    }
    const CharacterSet wanted(std::move(lowered));
    CharacterRanges folded;
    for (const CharacterRange& range : wanted.ranges())
      for (uint32_t point = range.first; point <= range.second; point++)
        if (!lower.count(point)) folded.emplace_back(point, point);
    for (const auto& pair : LOWER_CASES)
      if (wanted.contains(pair[1])) folded.emplace_back(pair[0], pair[0]);
    normalize(folded);
    return folded;
  }

  static const std::unordered_map<uint32_t, uint32_t>& get_lower_cases() {
    static const std::unordered_map<uint32_t, uint32_t> lower = [] {
      std::unordered_map<uint32_t, uint32_t> pairs;
      for (const auto& pair : LOWER_CASES) pairs[pair[0]] = pair[1];
      return pairs;
    }();
    return lower;
  }

  NodePointer build_set(CharacterRanges ranges) {
    auto node = std::make_unique<ExpressionNode>(ExpressionNode::kSet);
    node->set = static_cast<int>(sets_.size());
    sets_.emplace_back(std::move(ranges));
    return node;
  }

  // --- widths ---

  static int measure_least(const ExpressionNode& node) { return measure(node, false); }
  static int measure_most(const ExpressionNode& node) { return measure(node, true); }

  // Return the characters that a match of the node has at least, or at most.
  static int measure(const ExpressionNode& node, bool is_most) {
    int64_t width = 0;
    switch (node.kind) {
      case ExpressionNode::kSet:
        return 1;
      case ExpressionNode::kSequence:
        for (const NodePointer& part : node.parts) width += measure(*part, is_most);
        break;
      case ExpressionNode::kBranch:
        width = measure(*node.parts[0], is_most);
        for (const NodePointer& part : node.parts) {
          const int64_t other = measure(*part, is_most);
          width = is_most ? std::max(width, other) : std::min(width, other);
        }
        break;
      case ExpressionNode::kRepeat:
        width = static_cast<int64_t>(measure(*node.parts[0], is_most)) *
                (is_most ? node.most : node.least);
        break;
      default:
        break;
    }
    return static_cast<int>(std::min<int64_t>(width, ExpressionNode::kUnlimited));
  }

  // --- compiling ---

  int emit(Operation operation, int set = 0, int target = 0, int least = 0, int most = 0) {
    program_.push_back({operation, set, target, least, most});
    return static_cast<int>(program_.size()) - 1;
  }

  int next() const { return static_cast<int>(program_.size()); }

  void compile(const ExpressionNode& node) {
    switch (node.kind) {
      case ExpressionNode::kSet:
        emit(kTakeSet, node.set);
        break;
      case ExpressionNode::kBegin:
        emit(kAtBegin);
        break;
      case ExpressionNode::kEnd:
        emit(kAtEnd);
        break;
      case ExpressionNode::kSequence:
        for (const NodePointer& part : node.parts) compile(*part);
        break;
      case ExpressionNode::kBranch:
        compile_branches(node);
        break;
      case ExpressionNode::kRepeat:
        compile_repeat(node);
        break;
      case ExpressionNode::kLook: {
        const int place = emit(kAssert, 0, 0, node.is_behind ? node.least : 0, node.is_negative);
        compile(*node.parts[0]);
        emit(kMatch);
        program_[place].target = next();
        break;
      }
    }
  }

  void compile_branches(const ExpressionNode& node) {
    const int place = emit(kTry);
    const int number = static_cast<int>(branches_.size());
    branches_.emplace_back(new Branches);
    program_[place].set = number;
    std::vector<int> jumps;
    for (const NodePointer& part : node.parts) {
      CharacterRanges first;
      const bool may_be_empty = add_first(*part, first);
      int set = kAny;
      if (!may_be_empty) {
        set = static_cast<int>(sets_.size());
        sets_.emplace_back(std::move(first));
      }
      branches_[number]->firsts.push_back(set);
      branches_[number]->starts.push_back(next());
      compile(*part);
      jumps.push_back(emit(kJump));
    }
    for (const int jump : jumps) program_[jump].target = next();
    Branches& made = *branches_[number];
    for (size_t branch = 0; branch < made.starts.size(); branch++)
      if (made.firsts[branch] == kAny) made.if_end.push_back(made.starts[branch]);
    for (uint32_t point = 0; point < 128; point++) made.ascii[point] = list_possible(made, point);
  }

  // Add the characters that a match can begin with. Return whether it may have none.
  bool add_first(const ExpressionNode& node, CharacterRanges& to) const {
    switch (node.kind) {
      case ExpressionNode::kSet: {
        const CharacterRanges& ranges = sets_[node.set].ranges();
        to.insert(to.end(), ranges.begin(), ranges.end());
        return false;
      }
      case ExpressionNode::kSequence:
        for (const NodePointer& part : node.parts)
          if (!add_first(*part, to)) return false;
        return true;
      case ExpressionNode::kBranch: {
        bool may_be_empty = false;
        for (const NodePointer& part : node.parts) may_be_empty |= add_first(*part, to);
        return may_be_empty;
      }
      case ExpressionNode::kRepeat:
        return add_first(*node.parts[0], to) || node.least == 0;
      default:
        return true;
    }
  }

  void compile_repeat(const ExpressionNode& node) {
    const ExpressionNode& body = *node.parts[0];
    if (body.kind == ExpressionNode::kSet) {
      emit(kTakeMany, body.set, 0, node.least, node.most);
      return;
    }
    for (int time = 0; time < node.least; time++) compile(body);
    if (node.most == ExpressionNode::kUnlimited) {
      const int loop = emit(kSplit);
      compile(body);
      emit(kJump, 0, loop);
      program_[loop].target = next();
      return;
    }
    std::vector<int> splits;
    for (int time = node.least; time < node.most; time++) {
      splits.push_back(emit(kSplit));
      compile(body);
    }
    for (const int split : splits) program_[split].target = next();
  }

  std::vector<int> list_possible(const Branches& branches, uint32_t point) const {
    std::vector<int> possible;
    for (size_t branch = 0; branch < branches.starts.size(); branch++) {
      const int first = branches.firsts[branch];
      if (first == kAny || sets_[first].contains(point))
        possible.push_back(branches.starts[branch]);
    }
    return possible;
  }

  const std::vector<int>& find_possible(const Branches& branches, Subject on, int position) const {
    if (position >= on.size) return branches.if_end;
    const uint32_t point = on.text[position];
    if (point < 128) return branches.ascii[point];
    const auto known = branches.known.find(point);
    if (known != branches.known.end()) return known->second;
    if (branches.known.size() >= kMostKnown) branches.known.clear();
    return branches.known[point] = list_possible(branches, point);
  }

  // --- matching ---

  // Return the end of a match, but for `forbidden`, or -1.
  int run(Subject on, int instruction, int position, int forbidden = kNone) const {
    const size_t base = choices_.size();
    while (true) {
      const int end = run_until_choice(on, instruction, position);
      if (end >= 0 && end != forbidden) {
        choices_.resize(base);
        return end;
      }
      if (choices_.size() == base) return -1;
      Choice& choice = choices_.back();
      instruction = choice.instruction;
      position = choice.position;
      if (choice.position > choice.least) choice.position--;
      else choices_.pop_back();
    }
  }

  // Return the end of a match, or -1 where the way ends and another choice must be made.
  int run_until_choice(Subject on, int place, int position) const {
    while (true) {
      const Instruction& now = program_[place];
      switch (now.operation) {
        case kTakeSet:
          if (position >= on.size || !sets_[now.set].contains(on.text[position])) return -1;
          position++;
          place++;
          break;
        case kTakeMany: {
          const CharacterSet& set = sets_[now.set];
          const int end = on.size - position > now.most ? position + now.most : on.size;
          const int least = position + now.least;
          while (position < end && set.contains(on.text[position])) position++;
          if (position < least) return -1;
          place++;
          if (position > least) choices_.push_back({place, position - 1, least});
          break;
        }
        case kAtBegin:
          if (position) return -1;
          place++;
          break;
        case kAtEnd: {
          // before a last line end, too
          const bool is_last = position + 1 == on.size && on.text[position] == '\n';
          if (position < on.size && !is_last) return -1;
          place++;
          break;
        }
        case kSplit:
          choices_.push_back({now.target, position, position});
          place++;
          break;
        case kJump:
          place = now.target;
          break;
        case kTry: {
          const std::vector<int>& possible = find_possible(*branches_[now.set], on, position);
          if (possible.empty()) return -1;
          for (size_t later = possible.size() - 1; later > 0; later--)
            choices_.push_back({possible[later], position, position});
          place = possible[0];
          break;
        }
        case kAssert: {
          const int from = position - now.least;
          const bool holds = from >= 0 && run(on, place + 1, from) >= 0;
          if (holds == static_cast<bool>(now.most)) return -1;
          place = now.target;
          break;
        }
        case kMatch:
          return position;
      }
    }
  }

  Characters text_;
  size_t at_ = 0;
  bool ignores_case_ = false;
  std::map<std::string, int> known_sets_;

  std::vector<CharacterSet> sets_;
  std::vector<std::unique_ptr<Branches>> branches_;
  std::vector<Instruction> program_;
  mutable std::vector<Choice> choices_;
};

}  // namespace llmsys
