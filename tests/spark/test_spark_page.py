"""The pages about Spark work when pasted in order (the other pages: tests/scenario/test_pages_pasted.py)."""

import pytest
from pages import PATIENCE_S, paste


@pytest.mark.sampled(2)
@pytest.mark.root
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    "page", ["spark.md", "spark-reading.md", "spark-tables.md", "spark-tier.md", "spark-writing.md"]
)
def test_everything_pasted_in_order_works_as_printed(page, tmp_path):
    paste(f"docs/{page}", tmp_path)
