"""Write scikit-learn's handwritten digits as .npz files, and print the accuracy of a linear model.

    pip install scikit-learn
    python tools/digits.py [FOLDER]

Writes train.npz and heldout.npz: 8 × 8 grey images as uint8, a fifth of each digit held out at
random (seed 0). The linear model is scikit-learn's logistic regression on the same pixels and
images.
"""

import argparse
from pathlib import Path

import numpy as np


def write_digits(folder: Path) -> tuple[np.ndarray, ...]:
    """Write both files; return training images, held-out images, training labels and held-out
    labels.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit(
            "The digits are a part of scikit-learn, which is not installed: pip install "
            "scikit-learn"
        ) from None
    digits = load_digits()
    # 0 to 16 in the package; 0 to 255 as images have.
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("train", "heldout")):
        np.savez(folder / f"{name}.npz", images=parts[number], labels=parts[number + 2])
    return tuple(parts)


def measure_linear_accuracy(parts: tuple[np.ndarray, ...]) -> float:
    """Return the held-out accuracy of logistic regression."""
    from sklearn.linear_model import LogisticRegression

    train, heldout = (images.reshape(len(images), -1) / 255 for images in parts[:2])
    model = LogisticRegression(max_iter=1000).fit(train, parts[2])
    return float(model.score(heldout, parts[3]))


def main() -> None:
    """Write the files into the folder of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("runs/digits"),
        help="folder (default: %(default)s)",
    )
    parts = write_digits(parser.parse_args().folder)
    print(f"{len(parts[0])} training and {len(parts[1])} held-out images")
    print(f"logistic regression: {measure_linear_accuracy(parts):.2%} of the held-out images")


if __name__ == "__main__":
    main()
