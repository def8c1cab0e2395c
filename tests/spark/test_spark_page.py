"""Everything in docs/spark.md works when pasted in order (the other pages: tests/scenario/test_pages_pasted.py)."""

import pytest
from pages import PATIENCE_S, paste


@pytest.mark.root
@pytest.mark.timeout(PATIENCE_S)
def test_everything_pasted_in_order_works_as_printed(tmp_path):
    paste("docs/spark.md", tmp_path)
