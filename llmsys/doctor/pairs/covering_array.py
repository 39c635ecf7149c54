"""A covering array: few cases with every pair of values that is not refused (Cohen 1997, AETG).

Cases are built one after another. Each begins with a pair that no case has yet; every further
factor then takes the value that covers most new pairs among those that the config accepts.

Invariants:
- The array is a function of the factors, of what is refused, and of the seed.
- Every pair of values is covered, refused with a message, or void: one of its factors does not act
  beside the other.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice

from llmsys.doctor.pairs.factor import Assignment, Factor

# (factor, label) twice, the earlier factor first.
Pair = tuple[tuple[str, str], tuple[str, str]]
# assignment → the message of its refusal, or None.
Check = Callable[[Assignment], str | None]

# Completions of a pair that are tried before it counts as refused.
MAX_REPAIRS = 40
# New pairs that a value must cover beyond another one to be worth its time.
COST = 3
SLOW_COST = 12
# First cases that are compared for each pair, of which the one with most new pairs is taken.
CANDIDATES = 2
# Other pairs that are put into a case as they are, where it has room, once so few are left that
# values which are chosen one by one would seldom meet.
MAX_PACKED = 150
FEW_LEFT = 4000


@dataclass
class CoveringArray:
    """Cases, and the pairs that none of them has.

    Attributes:
        cases: assignments.
        refused_values: message of each value that is refused with what it needs, such as a dtype of
            other machines.
        refused: message of each pair that is refused.
        untold: message of pairs that no completion is accepted of, though no message names both
            values.
        num_pairs: pairs that are covered.
    """

    cases: list[dict[str, str]] = field(default_factory=list)
    refused_values: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: dict[Pair, str] = field(default_factory=dict)
    untold: dict[Pair, str] = field(default_factory=dict)
    num_pairs: int = 0


def build_covering_array(
    factors: Sequence[Factor],
    check: Check,
    seed: int,
    is_wanted: Callable[[Pair], bool] = lambda pair: True,
    must_avoid: Collection[tuple[str, str]] = (),
    on_case: Callable[[int, int], None] = lambda cases, left: None,
) -> CoveringArray:
    """Build the cases for every wanted pair of values.

    Args:
        factors: the factors, defaults first.
        check: returns the message of a refusal.
        seed: seed of the choice between equal ones.
        is_wanted: whether a pair is covered.
        must_avoid: values that no case takes.
        on_case: called with the number of cases and of pairs that are left.

    Returns:
        The array.
    """
    return _Builder(factors, check, random.Random(seed), is_wanted, must_avoid).build(on_case)


class _Builder:
    def __init__(
        self,
        factors: Sequence[Factor],
        check: Check,
        choose: random.Random,
        is_wanted: Callable[[Pair], bool],
        must_avoid: Collection[tuple[str, str]],
    ) -> None:
        self.factors = {factor.name: factor for factor in factors}
        self.order = {factor.name: place for place, factor in enumerate(factors)}
        self.labels = {
            factor.name: [
                value.label
                for value in factor.values
                if (factor.name, value.label) not in must_avoid
            ]
            for factor in factors
        }
        self.check, self.choose = check, choose
        self.dependents: dict[str, list[str]] = {}
        for factor in factors:
            for gate in factor.acts_with:
                self.dependents.setdefault(gate, []).append(factor.name)
        self.known: dict[tuple[tuple[str, str], ...], str | None] = {}
        self.array = CoveringArray()
        self.left: dict[Pair, None] = {
            pair: None
            for first, second in combinations(factors, 2)
            for pair in self._iter_factor_pairs(first, second)
            if is_wanted(pair) and not self._is_void(pair)
        }
        # Wanted partners of each value that are not covered yet.
        self.partners: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for first, second in self.left:
            self.partners.setdefault(first, set()).add(second)
            self.partners.setdefault(second, set()).add(first)

    def _has_left(self, name: str) -> bool:
        return any((name, label) in self.partners for label in self.labels[name])

    def build(self, on_case: Callable[[int, int], None]) -> CoveringArray:
        """Build the cases until no pair is left."""
        self._drop_refused_values()
        while self.left:
            pair = self._pick_pair()
            begun = self._complete_pair(pair)
            if begun is None:
                continue
            candidates = [self._fill_case(pair, begun) for _ in range(CANDIDATES)]
            case = max(candidates, key=lambda one: sum(1 for _ in self._iter_new_pairs(one)))
            covered = list(self._iter_new_pairs(case))
            assert covered, f"a case for {pair} covers nothing"
            for one in covered:
                self._drop_pair(one)
            self.array.cases.append(case)
            self.array.num_pairs += len(covered)
            on_case(len(self.array.cases), len(self.left))
        return self.array

    def _drop_refused_values(self) -> None:
        for value in list(self.partners):
            chosen = dict([value])
            case = self._complete(chosen)
            if (message := self._check_case(case)) is None:
                continue
            if any(
                self._check_case(one) is None
                for one in islice(self._iter_repairs(chosen, case, message), MAX_REPAIRS)
            ):
                continue
            self._drop_value(value, message)
        # Factors that act beside values that are all refused, such as the schedule of stages of a
        # model that does not run in stages.
        for value in list(self.partners):
            for needed, labels in self.factors[value[0]].acts_with.items():
                if value in self.partners and labels.isdisjoint(self.labels[needed]):
                    choices = " or ".join(sorted(labels))
                    self._drop_value(
                        value, f"acts beside {needed}={choices} only, which no case has"
                    )

    def _drop_value(self, value: tuple[str, str], message: str) -> None:
        """Take a value out of the array, with its pairs."""
        self.array.refused_values[value] = message
        self.labels[value[0]].remove(value[1])
        for partner in list(self.partners[value]):
            self._drop_pair(self._sort_pair(value, partner))

    def _iter_factor_pairs(self, first: Factor, second: Factor) -> Iterator[Pair]:
        for one in self.labels[first.name]:
            for other in self.labels[second.name]:
                yield (first.name, one), (second.name, other)

    def _is_void(self, pair: Pair) -> bool:
        """Return whether one of the values does not act beside the other."""
        for (name, _), (other, label) in (pair, pair[::-1]):
            allowed = self.factors[name].acts_with.get(other)
            if allowed is not None and label not in allowed:
                return True
        return False

    def _pick_pair(self) -> Pair:
        """Return a pair of the value with most partners that are left."""
        value = max(self.partners, key=lambda one: (len(self.partners[one]), one))
        partner = max(self.partners[value], key=lambda one: (len(self.partners[one]), one))
        return self._sort_pair(value, partner)

    def _sort_pair(self, one: tuple[str, str], other: tuple[str, str]) -> Pair:
        return (one, other) if self.order[one[0]] < self.order[other[0]] else (other, one)

    def _drop_pair(self, pair: Pair) -> None:
        del self.left[pair]
        for one, other in (pair, pair[::-1]):
            self.partners[one].discard(other)
            if not self.partners[one]:
                del self.partners[one]

    def _iter_new_pairs(self, case: Mapping[str, str]) -> Iterator[Pair]:
        active = [
            (name, label) for name, label in case.items() if self.factors[name].is_active(case)
        ]
        active.sort(key=lambda one: self.order[one[0]])
        chosen = set(active)
        for one in active:
            for other in self.partners.get(one, set()) & chosen:
                if self.order[one[0]] < self.order[other[0]]:
                    yield one, other

    def _complete(self, chosen: Mapping[str, str]) -> dict[str, str]:
        """Return chosen values with what they need, and defaults."""
        full = {name: factor.default for name, factor in self.factors.items()}
        for name, label in chosen.items():
            for needed, value in self.factors[name].get_value(label).needs.items():
                full[needed] = value
            for needed, labels in self.factors[name].acts_with.items():
                if full[needed] not in labels:
                    # Where all are refused the value does not act.
                    allowed = (one for one in self.labels[needed] if one in labels)
                    full[needed] = next(allowed, full[needed])
        return full | dict(chosen)

    def _check_case(self, case: Mapping[str, str]) -> str | None:
        key = tuple(sorted(case.items()))
        if key not in self.known:
            self.known[key] = self.check(case)
        return self.known[key]

    def _complete_pair(self, pair: Pair) -> dict[str, str] | None:
        """Return a case with the pair that is accepted; else record why there is none."""
        chosen = dict(pair)
        case = self._complete(chosen)
        message = self._check_case(case)
        if message is None and self._is_in(pair, case):
            return case
        for number, repaired in enumerate(self._iter_repairs(chosen, case, message or "")):
            if number >= MAX_REPAIRS:
                break
            if self._is_in(pair, repaired) and self._check_case(repaired) is None:
                return repaired
        text = message or "one of them does not act"
        alone = [self._check_case(self._complete({name: label})) for name, label in pair]
        self._drop_pair(pair)
        # Each is accepted by itself, so it is the pair that is refused.
        (self.array.refused if alone == [None, None] else self.array.untold)[pair] = text
        return None

    def _is_in(self, pair: Pair, case: Mapping[str, str]) -> bool:
        return all(
            case[name] == label and self.factors[name].is_active(case) for name, label in pair
        )

    def _iter_repairs(
        self, chosen: Mapping[str, str], case: Mapping[str, str], message: str
    ) -> Iterator[dict[str, str]]:
        """Yield completions with another value of one factor that the message is about."""
        free = [name for name in self.factors if name not in chosen]
        named = [name for name in free if self._is_named(name, case, message)]
        for name in named:
            for label in self.labels[name]:
                if label != case[name]:
                    yield self._complete(dict(chosen) | {name: label})

    def _is_named(self, name: str, case: Mapping[str, str], message: str) -> bool:
        """Return whether a message has a key that some value of the factor sets."""
        keys = {
            key
            for value in self.factors[name].values
            for key in value.build_settings(case)
            if "." in key
        } | {self.factors[name].path or name}
        return any(key in message or key.rpartition(".")[2] in message for key in keys)

    def _fill_case(self, pair: Pair, begun: Mapping[str, str]) -> dict[str, str]:
        """Return a case with the pair whose other factors take values that cover new pairs."""
        fixed = dict(pair)
        # What differs from a default is there because the pair needs it.
        fixed |= {
            name: label for name, label in begun.items() if label != self.factors[name].default
        }
        # Without these one of the pair would not act.
        fixed |= {gate: begun[gate] for name, _ in pair for gate in self.factors[name].acts_with}
        current = dict(begun)
        if len(self.left) < FEW_LEFT:
            current, fixed = self._pack_pairs(current, fixed)
        names = [name for name in self.factors if name not in fixed]
        self.choose.shuffle(names)
        # Others act with some of their values only.
        names.sort(key=lambda name: name not in self.dependents)
        for name in names:
            current, fixed = self._choose_value(name, current, fixed)
        return current

    def _pack_pairs(
        self, current: dict[str, str], fixed: dict[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Put pairs that are left into a case, as many as its fixed values and the config allow."""
        pairs = list(self.left)
        self.choose.shuffle(pairs)
        tried = 0
        for pair in pairs:
            wanted = fixed | dict(pair)
            if any(wanted[name] != label for name, label in fixed.items()):
                continue
            full = self._complete(wanted)
            if not self._is_in(pair, full) or any(full[name] != wanted[name] for name in wanted):
                continue
            if self._check_case(full) is None:
                needed = {
                    name: label
                    for name, label in full.items()
                    if label != self.factors[name].default
                }
                gates = {
                    gate: full[gate] for name, _ in pair for gate in self.factors[name].acts_with
                }
                current, fixed = full, wanted | needed | gates
            tried += 1
            if tried == MAX_PACKED:
                break
        return current, fixed

    def _choose_value(
        self, name: str, current: dict[str, str], fixed: dict[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        if name in fixed:  # another value needed it
            return current, fixed
        gains = []
        for label in self.labels[name]:
            partners = self.partners.get((name, label), set())
            gain = sum(1 for other, chosen in fixed.items() if (other, chosen) in partners)
            acting = sum(
                label in self.factors[other].acts_with[name] and self._has_left(other)
                for other in self.dependents.get(name, ())
            )
            value = self.factors[name].get_value(label)
            gain -= COST * value.is_costly + SLOW_COST * value.is_slow
            gains.append((gain + acting, self.choose.random(), label))
        for _, _, label in sorted(gains, reverse=True):
            if label == current[name]:
                return current, fixed | {name: label}
            tried = self._complete(fixed | {name: label})
            if any(tried[other] != chosen for other, chosen in fixed.items()):
                continue
            if self._check_case(tried) is None:
                needed = {
                    other: tried[other]
                    for other in tried
                    if tried[other] != self.factors[other].default
                }
                return tried, fixed | needed | {name: label}
        return current, fixed | {name: current[name]}
