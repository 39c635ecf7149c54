"""Write labelled images as two token files: the bytes of each image as its source, the number of
its label as target.

Writes token files in the format of pairs. A source has the values of an image, channel by channel
and row by row.
"""

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.images import ImagesConfig
from llmsys.config.patches import BYTE_VALUES
from llmsys.data_pipeline.core.document_schema import DROPPED_SCHEMA
from llmsys.data_pipeline.core.funnel import FunnelCounts, build_dropped_rows
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.images.read import ImagePart, LabelledImage, iter_images
from llmsys.data_pipeline.tokenize.encode_documents import build_list_array
from llmsys.dataset.token_shards import (
    ArrowFileWriter,
    build_token_schema,
    choose_token_dtype,
    describe_token_file,
)

STAGE = "images"
# Values of a record batch; bounds memory.
BATCH_VALUES = 1 << 24


def encode_images(
    report: Report,
    *,
    part: ImagePart,
    data: ImagesConfig,
    labels: tuple[str, ...],
    outputs: tuple[Path, ...],
) -> dict[str, Any]:
    """Write the images of one part. Progress is in images.

    Args:
        report: Progress callback.
        part: The images.
        data: Their size and channels.
        labels: Names of the labels in the order of their numbers.
        outputs: Files to write: targets, sources, images that cannot be read.

    Returns:
        Descriptions of both token files, and funnel counts.
    """
    schema = build_token_schema(choose_token_dtype(BYTE_VALUES))
    tally = FunnelCounts()
    images = iter_images(part, data)
    rows = max(1, BATCH_VALUES // (data.num_channels * data.image_size**2))
    with (
        ArrowFileWriter(outputs[0], schema) as targets,
        ArrowFileWriter(outputs[1], schema) as sources,
        ArrowFileWriter(outputs[2], DROPPED_SCHEMA, "zstd") as rejected,
    ):
        while batch := list(islice(images, rows)):
            pairs = [
                (image, image.pixels_CHW.ravel()) for image in batch if image.pixels_CHW is not None
            ]
            good = [image for image, _ in pairs]
            pixels = [values for _, values in pairs]
            bad = [_build_dropped_row(image) for image in batch if image.pixels_CHW is None]
            tally.add_drops(bad)
            tally.add_amounts(STAGE, documents_in=len(batch), documents_out=len(good))
            tally.add_amounts(
                STAGE, bytes_in=0, bytes_out=sum(_count_bytes(image) for image in good)
            )
            if good:
                numbers = [np.array([labels.index(image.label)]) for image in good]
                targets.write(_build_rows(good, numbers, schema))
                sources.write(_build_rows(good, pixels, schema))
            if bad:
                rejected.write(pa.RecordBatch.from_pylist(bad, schema=DROPPED_SCHEMA))
            report(len(batch), len(bad))
    files = [describe_token_file(path).model_dump() for path in outputs[:2]]
    return {"targets": files[0], "sources": files[1], "tally": tally.to_dict()}


def _count_bytes(image: LabelledImage) -> int:
    return 0 if image.pixels_CHW is None else image.pixels_CHW.size


def _build_rows(
    images: Sequence[LabelledImage], tokens: Sequence[Any], schema: pa.Schema
) -> pa.RecordBatch:
    """Build token rows of some images. `offset` is the number of an image in its part of the
    input.
    """
    lengths = np.array([len(one) for one in tokens])
    values = np.concatenate(tokens).astype(schema.field("tokens").type.value_type.to_pandas_dtype())
    columns = [
        build_list_array(values, lengths, schema),
        pa.array([_compute_image_id(image) for image in images]),
        pa.array([str(image.file) for image in images]),
        pa.array([image.number for image in images], pa.int64()),
        pa.array(np.zeros(len(images), np.uint64)),
        pa.array([_count_bytes(image) for image in images], pa.int64()),
    ]
    return pa.record_batch(columns, schema=schema)


def _compute_image_id(image: LabelledImage) -> str:
    return hashlib.blake2b(f"{image.file}\0{image.number}".encode(), digest_size=16).hexdigest()


def _build_dropped_row(image: LabelledImage) -> dict[str, Any]:
    file = str(image.file)
    document = {
        "id": _compute_image_id(image),
        "url": file,
        "file": file,
        "offset": image.number,
        "text": image.label,
    }
    return build_dropped_rows([document], STAGE, [("unreadable", None, None, image.problem)])[0]
