"""What all of these have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsparq.storage import batch, segment


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    """Room is made ahead in small segments, too, so that a crash leaves zeros behind the
    batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "PREPARE_FROM", 200)
        patch.setattr(batch, "PREPARE_SIZE", 512)
        patch.setattr(segment, "PREPARE_SIZE", 512)
        yield
