"""One rank of a case, and the comparison of a case with the plain process.

Both run in separate processes.

Writes the recorded entries of a phase, or the error of a rank, into the folder of the case.
"""

import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.doctor.pairs.comparison import (
    Difference,
    decode_moments,
    find_action_difference,
    find_difference,
    format_action,
    select_bands,
)
from llmsys.doctor.pairs.events import (
    Entry,
    EventScript,
    KilledError,
    accept_overflows,
    find_overflowed_events,
    is_seen_at_the_end,
    list_actions,
    list_expected_actions,
)
from llmsys.doctor.pairs.factor import Assignment
from llmsys.doctor.pairs.fixed_dropout import replace_dropout
from llmsys.doctor.pairs.phase import Phase
from llmsys.doctor.pairs.plain_walk import (
    PlainWalk,
    WalkRounding,
    iter_step_rounding,
)
from llmsys.doctor.pairs.stored_losses import add_stored_losses
from llmsys.errors import StopRequested
from llmsys.parallel.process_group import (
    get_local_device,
    get_world_size,
    init_process_group,
)
from llmsys.train.auto_micro_batch import resolve_micro_sequences
from llmsys.train.build_trainer import build_trainer, check_config, set_num_threads
from llmsys.train.heldout_evaluator import HeldoutEvaluator
from llmsys.train.precision import resolve_compile, resolve_precision, set_matmul_numerics

FAILED = 3


def run_rank(
    folder: Path,
    assignment: Assignment,
    phase: Phase,
    rank: int,
    port: int,
    prepare: Callable[[], None],
) -> None:
    """Run one rank of a phase, and end the process.

    Args:
        folder: folder of the case.
        assignment: label by factor.
        phase: the phase.
        rank: the rank.
        port: port of the rendezvous.
        prepare: called before anything is built; tests plant bugs there.
    """
    _redirect_output(folder / f"output-{phase.number}-{rank}.txt")
    faulthandler.enable(all_threads=True)
    local = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": phase.ranks,
        "LOCAL_WORLD_SIZE": phase.ranks,
    }
    os.environ |= {name: str(value) for name, value in (local | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    script = EventScript(assignment, set(phase.fired), phase.run)
    try:
        prepare()
        with init_process_group(), contextlib.ExitStack() as stack:
            _train(phase, script, stack)
            torch.save(script.entries, folder / f"entries-{phase.number}-{rank}.pt")
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        (folder / f"error-{phase.number}-{rank}.txt").write_text(text)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    sys.stdout.flush()
    # torch's clean-up would wait for peers that are gone
    os._exit(0)


def _train(phase: Phase, script: EventScript, stack: contextlib.ExitStack) -> None:
    check_config(phase.config, get_world_size())
    config = resolve_micro_sequences(
        resolve_compile(resolve_precision(phase.config)), get_local_device()
    )
    set_num_threads(config)
    set_matmul_numerics()
    replace_dropout()
    # They compress the held-out documents with other programs, which takes longer than a step and
    # trains nothing.
    HeldoutEvaluator.compute_compressor_baselines = _skip_baselines  # type: ignore[method-assign]
    trainer = build_trainer(config, stack, lambda *_: [])
    script.attach(trainer)
    with contextlib.suppress(StopRequested, KilledError):
        trainer.train()
    # A rank that closes its connections while peers are in the step would end theirs with an error.
    dist.barrier()


def _skip_baselines(self: HeldoutEvaluator) -> tuple[float, float]:
    return 0.0, 0.0


def _redirect_output(path: Path) -> None:
    with path.open("w") as opened:
        # torch's C++ writes to the descriptors, not to sys.stderr
        os.dup2(opened.fileno(), sys.stdout.fileno())
        os.dup2(opened.fileno(), sys.stderr.fileno())


def compare_case(
    folder: Path, assignment: Assignment, phases: Sequence[Phase], twin: Sequence[Phase]
) -> None:
    """Compare a case with the plain process, write the first difference, and end this process.

    Args:
        folder: folder of the case.
        assignment: label by factor.
        phases: the phases of the run.
        twin: the phases of the same run in fast mode, for a run in bitwise mode; empty for others.
    """

    def find() -> Difference | None:
        entries = load_entries(folder, phases)
        difference = find_case_difference(assignment, phases, entries)
        if difference is None and twin:
            difference = find_twin_difference(phases, entries, load_entries(folder, twin))
        return difference

    _save_difference(folder, find)


def compare_watched_case(
    folder: Path, assignment: Assignment, phases: Sequence[Phase], watched: Sequence[Phase]
) -> None:
    """Compare a case that differs at its end by its steps, and end this process.

    The difference of the case is gone if the same run, looked at after each step, agrees with the
    plain process and has the same bits as the case.

    Args:
        folder: folder of the case, with its difference.
        assignment: label by factor of the run that is looked at after each step.
        phases: the phases of the case.
        watched: the phases of the run that is looked at after each step.
    """
    _save_difference(folder, lambda: find_watched_difference(folder, assignment, phases, watched))


def find_watched_difference(
    folder: Path, assignment: Assignment, phases: Sequence[Phase], watched: Sequence[Phase]
) -> Difference | None:
    """Return the difference of a case by its steps, see `compare_watched_case`."""
    entries = load_entries(folder, watched)
    difference = find_case_difference(assignment, watched, entries)
    if difference is None and not are_bits_equal(load_entries(folder, phases), entries):
        difference = torch.load(folder / "difference.pt", weights_only=False)
    return difference


def _save_difference(folder: Path, find: Callable[[], Difference | None]) -> None:
    """Write what `find` returns, or its error, and end this process."""
    _redirect_output(folder / "output-compare.txt")
    torch.set_num_threads(1)
    replace_dropout()
    try:
        torch.save(find(), folder / "difference.pt")
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            f"the plain process: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        )
        (folder / "error-compare.txt").write_text(text)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    os._exit(0)


def are_bits_equal(entries: Sequence[Entry], watched: Sequence[Entry]) -> bool:
    """Return whether two runs took the same actions with equal bits.

    Args:
        entries: what the one recorded. Tensors count where both have them.
        watched: what the other recorded.
    """
    if list_actions(entries) != list_actions(watched):
        return False
    for one, other in zip(entries, watched, strict=True):
        numbers = torch.tensor([one.loss, one.norm], dtype=torch.float64)
        others = torch.tensor([other.loss, other.norm], dtype=torch.float64)
        if not torch.equal(numbers.view(torch.int64), others.view(torch.int64)):
            return False
        if one.tensors is None or other.tensors is None:
            continue
        if one.tensors.keys() != other.tensors.keys() or not all(
            torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()
        ):
            return False
    return True


def load_entries(folder: Path, phases: Sequence[Phase]) -> list[Entry]:
    """Return what the phases of a run recorded, in order, with full tensors.

    Args:
        folder: folder of the case.
        phases: the phases.

    Raises:
        ReplicaError: two ranks have other values at one place of a tensor.
        StoredLossError: losses by document are stored of a step that the run has not trained, or
            as if it had not been refused.
    """
    found: list[Entry] = []
    for phase in phases:
        paths = [folder / f"entries-{phase.number}-{rank}.pt" for rank in range(phase.ranks)]
        ranks: list[list[Entry]] = [torch.load(path, weights_only=False) for path in paths]
        for same in zip(*ranks, strict=True):
            found.append(replace(same[0], tensors=join_pieces(same), pieces=None))
    return add_stored_losses(found, phases)


class ReplicaError(Exception):
    """Ranks that hold the same part of a tensor have other values."""


def join_pieces(entries: Sequence[Entry]) -> dict[str, Tensor] | None:
    """Return the full tensors of an action from the pieces of all ranks; None if it was not looked
    at.

    Args:
        entries: the entry of each rank.

    Raises:
        ReplicaError: two ranks have other values at one place.
    """
    if entries[0].pieces is None:
        return None
    full: dict[str, Tensor] = {}
    is_set: dict[str, Tensor] = {}
    for rank, entry in enumerate(entries):
        assert entry.pieces is not None
        for name, (shape, region, values) in entry.pieces.items():
            if name not in full:
                full[name] = torch.zeros(shape, dtype=values.dtype)
                is_set[name] = torch.zeros(shape, dtype=torch.bool)
            part, known = full[name], is_set[name]
            for dim, (begin, size) in enumerate(region):
                part, known = part.narrow(dim, begin, size), known.narrow(dim, begin, size)
            apart = (part.double() - values.double()).abs().where(known, 0.0)
            # Ranks sum in one order, so copies have the same bits but for what a library reorders.
            if apart.numel() and float(apart.max()) > 1e-6 * max(float(values.abs().max()), 1e-3):
                text = f"{format_action(entry.action)}: rank {rank} has other values of {name}"
                raise ReplicaError(
                    f"{text} than a rank before it (apart by {float(apart.max()):.1e})"
                )
            part.copy_(values)
            known.fill_(True)
    return full


def find_case_difference(
    assignment: Assignment, phases: Sequence[Phase], entries: Sequence[Entry]
) -> Difference | None:
    """Return the first difference of a run from the plain process, or None.

    Args:
        assignment: label by factor.
        phases: its phases.
        entries: what it recorded, begun with a load.
    """
    if assignment["precision"] == "fp16":
        overflowed = find_overflowed_events(assignment, entries)
        expected = accept_overflows(entries[1:], list_expected_actions(assignment, overflowed))
    else:
        expected = list_expected_actions(assignment)
    # The first phase begins with the initial weights.
    if (other := find_action_difference(list_actions(entries[1:]), expected)) is not None:
        return other
    is_corrected = not is_seen_at_the_end(assignment)
    walk = PlainWalk(phases, is_corrected=is_corrected)
    bands = select_bands(phases[0].config, is_corrected=is_corrected)
    walked = WalkRounding(phases, entries)
    # Steps since the plain process had the state of the run; the sign of an update that is rounding
    # may differ in each.
    steps = 0
    for place, entry in enumerate(entries):
        before = walk.plain.copy_state()
        loss, norm = walk.take_action(entry)
        if entry.action.kind == "train" and entry.action.is_applied:
            steps += 1
        rate = walk.sign_rate * (1 if is_corrected else steps)
        numbers = place, entry, loss, norm, walk.plain.state.tensors, bands, rate
        documents = walk.plain.documents
        difference = find_difference(*numbers, documents=documents)
        if difference is not None and entry.action.kind in ("train", "evaluate"):
            samples = (
                iter_step_rounding(walk, entry, before)
                if is_corrected
                else walked.iter_rounding(place)
            )
            for rounding in samples:
                difference = find_difference(*numbers, rounding, documents)
                if difference is None:
                    break
        if difference is not None:
            return difference
        walk.correct_state(entry)
    return None


def find_twin_difference(
    phases: Sequence[Phase], entries: Sequence[Entry], fast: Sequence[Entry]
) -> Difference | None:
    """Return the first difference of a run in bitwise mode from the same run in fast mode, or None.

    Args:
        phases: the phases of the run.
        entries: what the run recorded.
        fast: what it recorded in fast mode.
    """
    if (other := find_action_difference(list_actions(entries), list_actions(fast))) is not None:
        return other
    # The two runs are not set equal in between.
    bands = select_bands(phases[0].config, is_corrected=False)
    walked = WalkRounding(phases, entries)
    for place, (entry, twin) in enumerate(zip(entries, fast, strict=True)):
        numbers = place, entry, twin.loss, twin.norm, decode_moments(twin.tensors or {}), bands, 0.0
        difference = find_difference(*numbers, documents=twin.documents)
        if difference is not None:
            for rounding in walked.iter_rounding(place):
                difference = find_difference(*numbers, rounding, twin.documents)
                if difference is None:
                    break
        if difference is not None:
            return difference
    return None
