"""Paths of the checkout that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST_DATA = ROOT / "tests" / "data"
SAMPLE_CRAWL = TEST_DATA / "sample_crawl"
GOLDEN = ROOT / "tests" / "golden"
CONFIGS = ROOT / "configs"
