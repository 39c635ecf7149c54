"""Each published recipe of configs/data runs on the sample crawl and leaves some of it, through
the stages it names.
"""

from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from tests.helpers.paths import SAMPLE_CRAWL

SHARD = SAMPLE_CRAWL / "shard-00000.warc.gz"
STAGES = {
    "fineweb": ["gopher_repetition", "gopher_quality", "c4_datatrove", "fineweb_quality"],
    "c4": ["c4"],
    "gopher": ["gopher_quality", "gopher_repetition"],
}


@pytest.mark.parametrize("recipe", STAGES)
def test_a_published_recipe_runs_on_the_sample_crawl(recipe: str, tmp_path: Path) -> None:
    settings = [f"data.folder={tmp_path}", f"data.inputs=[{SHARD}]", "data.executor.kind=inline"]
    manifest = prepare_dataset(load_run_config(f"data/{recipe}", settings), until="documents")
    funnel = {stage.stage: stage for stage in manifest.funnel}
    assert [name for name in funnel if name in STAGES[recipe]] == STAGES[recipe]
    assert 0 < sum(file.rows for file in manifest.documents.files) < funnel["read"].documents_out
    for stage in manifest.funnel:
        assert stage.documents_in - stage.documents_out == sum(
            drop.documents for drop in stage.dropped
        )
