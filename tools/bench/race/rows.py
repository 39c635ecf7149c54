"""Write the rows of a race: training rows in the order of llmsys, and held-out rows of documents.

    python -m tools.bench.race.rows DATASET FILE TOKENS SEED

TOKENS 0 writes held-out rows alone, for a run of llmsys, which reads its windows itself.

Reads a prepared dataset. Writes one .npz file that every contender reads, so that reading pages and
shuffling costs none of them anything, and all see the same ids in the same order.

Invariants:
- Row n of `train` is window n of the run with this seed, with the target of its last position.
- A held-out row has tokens of one document; the first is preceded by the end of a document.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmsys.config.loading.load import load_run_config
from llmsys.data.step_batches import StepBatches
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.train.build_objective import build_step_batches
from tools.bench.race.judge import ABSENT

LENGTH = 512
# Windows that are read at a time.
SEQUENCES = 4


def build_training_rows(steps: StepBatches, count: int) -> NDArray[np.uint16]:
    """Return the first windows of a run.

    Args:
        steps: steps of SEQUENCES windows.
        count: number of windows.

    Returns:
        Ids (count, LENGTH + 1): those of a window, and the target of its last position.
    """
    rows = [np.empty((0, LENGTH + 1), np.int64)]
    for step in range(-(-count // SEQUENCES)):
        [batch] = steps.get_micro_batches(step)
        tokens_BT, targets_BT = batch.tokens_BT.numpy(), batch.targets_BT.numpy()
        if (tokens_BT[:, 1:] != targets_BT[:, :-1]).any():
            raise SystemExit(f"step {step}: targets are not the next tokens of their window")
        rows.append(np.concatenate([tokens_BT, targets_BT[:, -1:]], axis=1))
    return np.concatenate(rows)[:count].astype(np.uint16)


def build_heldout_rows(
    shards: TokenShards,
) -> tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.float64]]:
    """Cut held-out documents into rows.

    Args:
        shards: the held-out split, whose documents end with the id that ends documents.

    Returns:
        Inputs and targets (rows, LENGTH), ABSENT where there is no target, and the bytes of each
        row: those of its document in proportion to its targets.
    """
    inputs, targets, text_bytes = [], [], []
    for number in range(shards.num_documents):
        ids = shards.get_tokens(number).astype(np.int32)
        before = np.concatenate([ids[-1:], ids[:-1]])
        for first in range(0, len(ids), LENGTH):
            part = ids[first : first + LENGTH]
            rest = LENGTH - len(part)
            inputs.append(np.pad(before[first : first + LENGTH], (0, rest)))
            targets.append(np.pad(part, (0, rest), constant_values=ABSENT))
            text_bytes.append(float(shards.text_bytes[number]) * len(part) / len(ids))
    return np.stack(inputs).astype(np.uint16), np.stack(targets), np.array(text_bytes)


def main(words: list[str]) -> int:
    """Write the rows of one seed."""
    folder, file, tokens, seed = words
    config = load_run_config(
        "train/demo",
        [
            f"data.folder={folder}",
            f"batch.sequence_length={LENGTH}",
            f"batch.sequences={SEQUENCES}",
            f"run.seed={seed}",
            "layout.expert=1",
        ],
    )
    train = build_training_rows(build_step_batches(config, 1, 0), -(-int(tokens) // LENGTH))
    heldout, targets, text_bytes = build_heldout_rows(open_tokens(folder, "heldout"))
    unfinished = Path(file).with_suffix(".unfinished.npz")
    np.savez(
        unfinished,
        train=train,
        heldout=heldout,
        heldout_targets=targets,
        heldout_bytes=text_bytes,
    )
    unfinished.replace(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
